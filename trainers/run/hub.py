"""The trained model on the Hugging Face Hub: asked for when the run begins, pushed when it has ended.

By then the model is on the disk: what goes wrong here costs the push alone, and the error says how to make up for it.
Left out: pushing checkpoints, model cards, pull requests.
"""

from pathlib import Path

from fused_rl.trainers.base.screen import tell
from fused_rl.trainers.options.config import InputError, OutputConfig
from fused_rl.trainers.options.text import in_a_line


def check(config: OutputConfig) -> None:
    """Refuse a run that could not push its model: as far as that can be known before there is one. On one rank."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError
    from huggingface_hub.utils import validate_repo_id

    # Who is asking.
    api = huggingface_hub.HfApi()
    try:
        user = api.whoami()
    except LocalTokenNotFoundError as error:
        raise InputError("push_to_hub: there is no token for the Hub; run `hf auth login`, or set HF_TOKEN") from error
    except Exception as error:  # no network, offline mode, a token that has expired
        raise InputError(
            f"push_to_hub: the Hub does not say whose token this is: {in_a_line(error)}; look at the network and at "
            "`hf auth whoami`, or drop --push_to_hub and push the model afterwards"
        ) from error
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise InputError(f"push_to_hub: the token of {user['name']} may read and not write; make one that may")

    # Where to.
    repository = _repository(config, user["name"])
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise InputError(f"hub_model_id={repository!r} is no name of a repository: {in_a_line(error)}") from error
    owner = repository.partition("/")[0]
    owners = [user["name"], *(organisation["name"] for organisation in user.get("orgs", []))]
    if owner not in owners:
        raise InputError(f"hub_model_id={repository!r}: the token is of {', '.join(owners)}, and not of {owner}")
    _refuse_public(api, repository, config)


def _repository(config: OutputConfig, user: str) -> str:
    """`owner/name`; without a name given, that of the output folder."""
    name = config.hub_model_id or Path(config.output_dir).resolve().name
    return name if "/" in name else f"{user}/{name}"


def _refuse_public(api, repository: str, config: OutputConfig) -> None:
    """What is meant to be private must not go where it can be read already."""
    if config.hub_private_repo and api.repo_exists(repository) and not api.model_info(repository).private:
        raise InputError(f"hub_private_repo: {repository} is on the Hub already, and public; name another repository")


def push(config: OutputConfig, model: Path, message: str) -> None:
    """Upload the folder of the trained model, under a commit's message. On one rank.

    Raises:
        InputError: it could not be pushed; the line says where it is, and how to push it.
    """
    import huggingface_hub

    api, repository = huggingface_hub.HfApi(), config.hub_model_id or "REPOSITORY"
    try:
        repository = _repository(config, "") if "/" in repository else _repository(config, api.whoami()["name"])
        _refuse_public(api, repository, config)
        api.create_repo(repository, private=config.hub_private_repo or None, exist_ok=True)
        found = api.upload_folder(repo_id=repository, folder_path=str(model), commit_message=message)
    except Exception as error:  # network, disk quota, a token that has expired meanwhile
        private = " --private" if config.hub_private_repo else ""
        raise InputError(
            f"the model is whole in {model}, but could not be pushed: {in_a_line(error)}; push it with: "
            f"hf upload {repository} {model}{private}"
        ) from error
    tell(f"pushed the model to {getattr(found, 'repo_url', repository)}")
