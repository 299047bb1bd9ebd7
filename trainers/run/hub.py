"""The trained model on the Hugging Face Hub: a run makes its repository at the start and uploads the model at the end.

Left out: pushing checkpoints, model cards, pull requests.
"""

from pathlib import Path

from ..base.screen import print_line
from ..base.text import InputError, in_a_line
from ..options import OutputConfig


def make_repository(config: OutputConfig) -> str:
    """Make the repository unless it exists, and return its full name, such as user/name.

    Raises:
        InputError: the repository cannot be made, for example because the token may not write, or it exists and is
            public although a private one is wanted.
    """
    import huggingface_hub

    api = huggingface_hub.HfApi()
    name = config.hub_model_id or Path(config.output_dir).resolve().name
    try:
        repository = api.create_repo(
            name, private=config.hub_private_repo or None, exist_ok=True
        ).repo_id
        is_private = api.model_info(repository).private
    # No token, no right to write, no network, an invalid name: the Hub's client has an exception for each of these, and
    # the remedy is the same for all.
    except Exception as error:
        problem = f"push_to_hub: the repository {name} cannot be made: {in_a_line(error)}"
        raise InputError(
            f"{problem}; look at `hf auth whoami` and the network, or leave out --push_to_hub"
        ) from error
    if config.hub_private_repo and not is_private:
        raise InputError(
            f"hub_private_repo: {repository} is on the Hub already, and public; name another repository"
        )
    return repository


def push(config: OutputConfig, model: Path, message: str) -> None:
    """Upload the folder of the trained model in one commit with this message. Call it on one rank alone."""
    import huggingface_hub

    try:
        repository = make_repository(config)
        huggingface_hub.HfApi().upload_folder(
            repo_id=repository, folder_path=str(model), commit_message=message
        )
    # The model is on the disk and only the upload is missing, so the error says how to repeat that.
    except Exception as error:
        target = f"{config.hub_model_id or 'REPOSITORY'} {model}{' --private' if config.hub_private_repo else ''}"
        problem = f"the model is in {model}, but could not be pushed: {in_a_line(error)}"
        raise InputError(f"{problem}; push it with: hf upload {target}") from error
    print_line(f"pushed the model to {repository}")
