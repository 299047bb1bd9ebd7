"""One hash for each input of a run: rows, model folders, chat template; and adapters, whose weights lie elsewhere.

The processes of a run must agree on them, and a resumed run on what its checkpoint recorded. Names and paths only say
where an input was. CRC-32 reads a model's folder at 1 GB/s and core; a model on the Hub is known by its commit.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.files import fingerprint
from fused_rl.trainers.options import InputError

OF_A_MODEL = ("*.safetensors", "*.bin", "*.index.json", "config.json", "generation_config.json", "adapter_config.json")


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
    folder = Path(name)
    if folder.is_dir():
        files = sorted(set().union(*(folder.glob(pattern) for pattern in OF_A_MODEL)))
        found = of_text(str([(file.name, fingerprint(file)) for file in files]))
    else:
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(name, revision=revision, allow_patterns=["*config.json"]))
        found = folder.name
    adapters = folder / "adapter_config.json"
    if not adapters.is_file():
        return found
    config = json.loads(adapters.read_bytes())
    return f"{found} on {of_model(config['base_model_name_or_path'], config.get('revision'))}"


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
