"""The hub: a finished run's model goes to run.push_to_hub, if that is set.

runs/NAME/model --> the root of the repository        runs/NAME/adapters, critic --> folders of these names
"""

from collections.abc import Callable

from controller.config import TrainingConfig
from controller.observability.slow_work import told_if_slow
from workers.errors import OutputError, clause

BESIDE = ("adapters", "critic")


def push_to_hub(config: TrainingConfig, log: Callable[[str], None]) -> None:
    """Upload the run's model, and its adapters and critic where there are any; nothing without run.push_to_hub.

    A repository that is not there is made, private. Raises OutputError, with the command that uploads it later.
    """
    repository = config.run.push_to_hub
    if not repository:
        return
    from huggingface_hub import HfApi

    api, folder = HfApi(), config.run_folder
    try:
        with told_if_slow(log, f"pushing {folder / 'model'} to {repository}"):
            address = api.create_repo(repository, private=True, exist_ok=True)
            message = f"{config.run.name}: {config.headline}"
            api.upload_folder(repo_id=repository, folder_path=folder / "model", commit_message=message)
            for name in BESIDE:
                if (folder / name).is_dir():
                    api.upload_folder(
                        repo_id=repository, folder_path=folder / name, path_in_repo=name, commit_message=message
                    )
    except Exception as error:  # the hub's, and those of the client beneath it, which differ by version
        raise OutputError(
            f"run.push_to_hub={repository}: {type(error).__name__}: {clause(error)}; the model is in {folder}, and "
            f"`hf upload {repository} {folder / 'model'} .` uploads it."
        ) from error
    log(f"pushed to {address}")
