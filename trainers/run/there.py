"""Whether what a run names is there, in seconds: before anything is read, and for `--dry_run`.

Of the Hub a single question with a time limit: the libraries that read from it ask for minutes where no network is.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from fused_rl.trainers.data.sources import FUNCTIONS, MODELS
from fused_rl.trainers.options import handed
from fused_rl.trainers.options.config import FILES, InputError
from fused_rl.trainers.options.source import Source
from fused_rl.trainers.options.text import in_a_line

OF_A_MODEL = ("config.json", "adapter_config.json")  # the folder of a run has neither
PATIENCE = 5.0  # seconds, of one question to the Hub


def check(sources: Iterable[Source]) -> None:
    """Refuse a model or a dataset that is neither on this machine nor on the Hub.

    Raises:
        InputError: names the option, and whether the Hub does not have it, or could not be asked.
    """
    for source in sources:
        if source.kind == "rows" and handed.are_rows(source.name):
            handed.rows_of(source.name)
            continue
        if source.kind in MODELS:
            _check_no_run(source)
        if source.kind in FUNCTIONS or Path(source.name).exists():
            continue
        if source.kind == "rows" and Path(source.name).suffix in FILES:
            raise InputError(f"dataset file {source.name} does not exist, or is a folder")
        beside = [source.name + suffix for suffix in FILES if Path(source.name + suffix).is_file()]
        try:
            _ask_hub(source)
        except InputError as error:
            if source.kind == "rows" and beside:
                raise InputError(f"{source.said} is neither there nor on the Hub; did you mean {beside[0]}?") from error
            raise


def _check_no_run(source: Source) -> None:
    """Refuse the folder of a run, and say where its model is."""
    folder = Path(source.name)
    if not (folder / "config.yaml").is_file() or any((folder / name).is_file() for name in OF_A_MODEL):
        return
    if (folder / "model").is_dir():
        raise InputError(f"{source.said} is the folder of a run, whose model is in it: give {folder / 'model'}")
    raise InputError(
        f"{source.said} is the folder of a run that has not ended, so there is no model in it yet: go on with that run "
        "(--resume), and give the model/ that it saves at its end"
    )


def _ask_hub(source: Source) -> None:
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    api = huggingface_hub.HfApi()
    ask = api.dataset_info if source.kind == "rows" else api.model_info
    try:
        ask(source.name, revision=source.revision, timeout=PATIENCE)
    except HFValidationError as error:
        raise InputError(f"{source.said} is neither there, nor can it be a name on the Hub") from error
    except RevisionNotFoundError as error:
        raise InputError(f"{source.said} is on the Hub, but has no revision {source.revision}") from error
    except RepositoryNotFoundError as error:
        if _is_kept(source):  # a token that has expired: what was read before is read again
            return
        raise InputError(
            f"{source.said} is neither there nor on the Hub, or is private or gated there: see `hf auth whoami`"
        ) from error
    except Exception as error:  # no network, offline mode, a server that fails: as many as ways to be away
        if not _is_kept(source):
            raise InputError(
                f"{source.said} is neither there nor in the Hub's cache, and the Hub cannot be asked: "
                f"{in_a_line(error)}; look at the network, or give a local path"
            ) from error


def _is_kept(source: Source) -> bool:
    """Whether something of the Hub was read before, and is in a cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    kind = "datasets" if source.kind == "rows" else "models"
    found = [Path(HF_HUB_CACHE, f"{kind}--{source.name.replace('/', '--')}")]
    if source.kind == "rows":
        import datasets
        from datasets.naming import camelcase_to_snakecase

        *owner, last = source.name.split("/")
        place = "___".join([*owner, camelcase_to_snakecase(last)])
        found.append(Path(os.fspath(datasets.config.HF_DATASETS_CACHE), place))
    return any(folder.exists() for folder in found)
