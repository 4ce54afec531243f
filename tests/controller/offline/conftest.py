from tests.controller.offline.local_run import local_runs

__all__ = ["local_runs"]
