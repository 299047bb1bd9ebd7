"""A check that a model and datasets exist, in seconds: before anything is read, and for `--dry_run`.

The Hub gets a single question with a time limit: the libraries that read from it retry for minutes without a network.
"""

from collections.abc import Iterable
from pathlib import Path

from fused_rl.trainers.base.text import in_a_line
from fused_rl.trainers.options import FILES, InputError

OF_A_MODEL = ("config.json", "adapter_config.json")  # the folder of a run has neither
PATIENCE = 5.0  # seconds, of one question to the Hub


def check(model: str, revision: str | None, datasets: Iterable[str | None]) -> None:
    """Refuse a model or a dataset that is neither on this machine nor on the Hub."""
    folder = Path(model)
    if (folder / "config.yaml").is_file() and not any((folder / name).is_file() for name in OF_A_MODEL):
        raise InputError(f"model={model} is the folder of a run: give {folder / 'model'}, which it saves at its end")
    if not folder.exists():
        _ask_hub(f"model={model}", "model", model, revision)
    for name in [name for name in datasets if name is not None]:
        if Path(name).suffix in FILES and not Path(name).is_file():
            raise InputError(f"dataset file {name} does not exist, or is a folder")
        if not Path(name).exists():
            _ask_hub(f"dataset={name}", "dataset", name, None)


def _ask_hub(what: str, kind: str, name: str, revision: str | None) -> None:
    import huggingface_hub
    from huggingface_hub.constants import HF_HUB_CACHE

    try:
        huggingface_hub.HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=PATIENCE)
    except Exception as error:  # no such name, no network, offline mode, an expired token
        if not Path(HF_HUB_CACHE, f"{kind}s--{name.replace('/', '--')}").exists():
            raise InputError(f"{what} does not exist here, and not on the Hub: {in_a_line(error)}") from error
