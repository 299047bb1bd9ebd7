"""One hash for each input of a run: rows, model folders, chat template; and adapters, whose weights lie elsewhere.

The processes of a run must agree on them, and a resumed run on what its checkpoint recorded. Names and paths only say
where an input was. CRC-32 reads a model's folder at 1 GB/s and core; a model on the Hub is known by its commit.
"""

import concurrent.futures
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.files import fingerprint
from fused_rl.trainers.options import InputError

OF_A_MODEL = ("*.safetensors", "*.bin", "*.index.json", "config.json", "generation_config.json", "adapter_config.json")


class Adapters(NamedTuple):
    """Adapters that were saved apart from the weights that they belong to."""

    name: str
    """The folder or Hub name that holds them."""
    revision: str | None
    config: object
    """peft's `LoraConfig`."""

    @property
    def base(self) -> tuple[str, str | None]:
        """The folder or Hub name of the weights that they belong to, and its revision."""
        return self.config.base_model_name_or_path, self.config.revision


def find_adapters(name: str, revision: str | None = None) -> Adapters | None:
    """Return the adapters that a folder or Hub name holds instead of whole weights, or None.

    Raises:
        InputError: adapters that are not read here, or that do not say what they belong to.
    """
    import peft
    from transformers.utils import find_adapter_config_file

    try:
        if find_adapter_config_file(name, revision=revision) is None:
            return None
    except OSError:  # no folder and no name of the Hub: reading the model says so
        return None
    config = peft.PeftConfig.from_pretrained(name, revision=revision)
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA" or config.use_dora or config.modules_to_save or config.bias != "none":
        raise InputError(
            f"{name!r} holds adapters of kind {kind}, or with use_dora, modules_to_save or bias; only plain LoRA is "
            "read: merge them into their model with peft first"
        )
    if not config.base_model_name_or_path:
        raise InputError(f"{name!r} holds adapters that do not name their model (base_model_name_or_path)")
    return Adapters(name, revision, config)


def base_of(name: str, revision: str | None = None) -> tuple[str, str | None]:
    """Return the name and revision of the whole weights: those that adapters belong to, else `name` itself."""
    adapters = find_adapters(name, revision)
    return (name, revision) if adapters is None else adapters.base


def of_rows(rows: Iterable) -> str:
    """Return the hash of rows as a trainer keeps them, in order, without where they came from."""
    total = hashlib.blake2b(digest_size=16)
    for row in rows:
        fields = row._asdict() if isinstance(row, tuple) else vars(row)
        kept = {name: value for name, value in fields.items() if name != "where"}
        total.update(json.dumps(kept, sort_keys=True, default=str).encode())
    return total.hexdigest()


def of_model(name: str, revision: str | None = None) -> str:
    """Return the hash of a model's folder, or its commit on the Hub; adapters include the weights below them."""
    adapters = find_adapters(name, revision)
    if adapters is not None and adapters.base[0] != name:
        return f"{_of_folder(name, revision, 'adapter_config.json')} on {of_model(*adapters.base)}"
    return _of_folder(name, revision, "config.json")


def _of_folder(name: str, revision: str | None, config_file: str) -> str:
    folder = Path(name)
    if not folder.is_dir():
        from transformers.utils.hub import cached_file, extract_commit_hash

        return str(extract_commit_hash(cached_file(name, config_file, revision=revision), None))
    files = sorted(set().union(*(folder.glob(pattern) for pattern in OF_A_MODEL)))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        sums = pool.map(fingerprint, files)
        named = [(file.name, found) for file, found in zip(files, sums, strict=True)]
    return of_text(str(named))


def of_text(value: object) -> str:
    """Return the hash of what JSON can write, such as a chat template."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def check_ranks(facts: Mapping[str, object]) -> None:
    """Refuse processes that have other options or read other inputs than rank 0, on all of them."""
    of_ranks = ranks.gather(dict(facts))
    for number, of_rank in enumerate(of_ranks):
        for name in [name for name in of_rank if of_rank[name] != of_ranks[0].get(name)]:
            raise InputError(
                f"the processes of a run must have the same options and read the same files: {name} is "
                f"{of_ranks[0].get(name)} on rank 0 and {of_rank[name]} on rank {number}"
            )


def check_resumed(
    found: Mapping[str, str],
    recorded: Mapping[str, str],
    accepted: bool,
    where: Path,
) -> list[str]:
    """Return the inputs that are not those of the checkpoint `where`; refuse them unless they are accepted."""
    changed = [name for name in {**recorded, **found} if recorded.get(name) != found.get(name)]
    if changed and not accepted:
        raise InputError(
            f"resume: these inputs are not those of {where}: {', '.join(changed)}; restore them, continue with the new "
            "ones (--accept_changes), or start again with --overwrite"
        )
    return changed
