"""A Ray job works in a copy of its --working-dir, which leaves out what git ignores and is removed after the job.

`ray job submit --working-dir .` --> /tmp/ray/session_.../runtime_resources/working_dir_files/_ray_pkg_.../
"""

from pathlib import Path

PACKAGE = "_ray_pkg_"  # how Ray names the copies


def is_job_copy(folder: Path) -> bool:
    """Whether `folder`, absolute, lies in such a copy."""
    return any(part.startswith(PACKAGE) for part in folder.parts)


def about_copy(path: str) -> str:
    """A hint about a relative path that is not there; empty outside of a job, and for an absolute one."""
    if Path(path).is_absolute() or not is_job_copy(Path.cwd()):
        return ""
    return (
        "; this Ray job works in a copy of its --working-dir, without what git ignores: give an absolute path that "
        "every node has"
    )
