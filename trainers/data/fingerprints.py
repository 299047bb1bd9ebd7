"""What a run was made of, in short sums by name: compared between its processes when it begins, and when it is resumed.

Names and paths say where something lay, and not what it was. Of a model's folder every byte that is read is summed:
weights are read once anyway, and a sample of them would miss adapters that were merged into one layer. CRC-32 runs at
1 GB/s and core, in threads; it finds change, not intent. What lies on the Hub is known by its commit.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.files import fingerprint
from fused_rl.trainers.data.sources import FUNCTIONS, path_of
from fused_rl.trainers.options.config import InputError
from fused_rl.trainers.options.handed import HERE, plain, source_of
from fused_rl.trainers.options.source import Source

Fingerprints = dict[str, dict[str, str]]
"""Name -> part -> its sum, such as {"model": {"config.json": "…", "model.safetensors": "…"}}."""

# Name -> what it is of. All but HELD_OUT must be as they were when a run is resumed.
NAMES = {
    "rows": "the rows to train on: token ids in order, and what scorers may read beside them",
    "reference_rows": "the pairs whose scores are normalised",
    "model": "weights and config of the model, with adapters those of what they belong to",
    "adapters": "the adapters that model names",
    "critic": "weights and config of the critic that the run starts from",
    "reward_models": "weights and config of the reward models that score",
    "scorers": "source files of the functions that score",
    "surrogate": "source file of the surrogate",
    "sampler": "source file of the sampler of your own",
    "tokenizer": "vocabulary and special tokens",
    "chat_template": "the tokenizer's chat template",
    "held_out": "the held-out rows",
}
HELD_OUT = "held_out"  # may change: what is measured, not what is trained
KINDS = {"reward_model": "reward_models", "scorer": "scorers"}  # of a source, where its name here is another
OF_A_MODEL = ("*.safetensors", "*.bin", "*.index.json", "config.json", "generation_config.json", "adapter_config.json")
THREADS = 4
UNKNOWN = "unknown"


def of_sources(sources: Iterable[Source]) -> Fingerprints:
    """Of the models and functions that a run reads; rows are summed when they are tokens (`of_rows`)."""
    found: Fingerprints = {}
    for source in (source for source in sources if source.kind != "rows"):
        parts = found.setdefault(KINDS.get(source.kind, source.kind), {})
        path = path_of(source)
        if source.kind not in FUNCTIONS:
            parts |= _of_model(source, path)
        elif source.name.startswith(HERE):
            parts[source.name] = _of_source(source.name)
        elif path is not None:  # of the file that its module is in, and not of what that imports
            parts[source.name] = _of_file(path)
    return found


def _of_model(source: Source, path: Path | None) -> dict[str, str]:
    prefix = "" if source.kind in ("model", "adapters", "critic") else f"{source.name}/"
    if path is None:
        return {source.name: _commit(source)}
    named = set().union(*(path.glob(pattern) for pattern in OF_A_MODEL))
    files = sorted(file for file in named if file.is_file())
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        return {f"{prefix}{file.name}": told for file, told in zip(files, pool.map(_of_file, files), strict=True)}


def _of_file(path: Path) -> str:
    try:
        return str(fingerprint(path))
    except OSError as error:  # whoever reads it says more
        return f"unreadable: {error.strerror}"


def _of_source(name: str) -> str:
    """Of a function of the notebook or script that runs, whose rest may be edited, to resume for example."""
    try:
        return _sum(source_of(name))
    except (OSError, TypeError, ValueError, KeyError):  # typed at a prompt; no such function: whoever loads it says so
        return UNKNOWN


def without_source(found: Fingerprints) -> list[str]:
    """The functions of which nothing but the name is known."""
    parts = [part for of_name in found.values() for part in of_name.items()]
    return [name for name, told in parts if name.startswith(HERE) and told == UNKNOWN]


def _commit(source: Source) -> str:
    """Of a model on the Hub."""
    from transformers.utils.hub import cached_file, extract_commit_hash

    name = "adapter_config.json" if source.kind == "adapters" else "config.json"
    try:
        return extract_commit_hash(cached_file(source.name, name, revision=source.revision), None) or UNKNOWN
    except Exception:  # no such name, no network: whoever reads it says more
        return UNKNOWN


def of_rows(rows: Iterable) -> dict[str, str]:
    """Of rows as a trainer keeps them (named tuples, dataclasses), in order; not of where they came from."""
    total, count = hashlib.blake2b(digest_size=16), 0
    for row in rows:
        fields = row._asdict() if isinstance(row, tuple) else vars(row)
        told = {name: value for name, value in fields.items() if name != "where"}
        total.update(json.dumps(told, sort_keys=True, default=plain).encode())
        count += 1
    return {"count": str(count), "contents": total.hexdigest()}


def of_tokenizer(tokenizer) -> Fingerprints:
    """Of what it makes token ids and prompts with."""
    vocabulary = json.dumps([sorted(tokenizer.get_vocab().items()), str(tokenizer.special_tokens_map)])
    template = json.dumps(tokenizer.chat_template, sort_keys=True)
    return {"tokenizer": {"vocabulary": _sum(vocabulary)}, "chat_template": {"template": _sum(template)}}


def _sum(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


# Comparisons.


def differing(one: Fingerprints, other: Fingerprints) -> dict[str, str]:
    """The names that differ, each with the parts that do, in words."""
    found = {}
    for name in NAMES:
        a, b = one.get(name, {}), other.get(name, {})
        parts = [part for part in sorted({*a, *b}) if a.get(part) != b.get(part)]
        if parts:
            found[name] = ", ".join(_shown(part, a, b) for part in parts[:3]) + (", …" if len(parts) > 3 else "")
    return found


def _shown(part: str, one: dict[str, str], other: dict[str, str]) -> str:
    return f"{part} {one.get(part)} -> {other.get(part)}" if part == "count" else part


def check_ranks(found: Fingerprints) -> None:
    """Refuse processes that do not read the same, on all of them; the first one is what others are compared with."""
    of_ranks = ranks.gather(found)
    told = [f"{_listed(differing(of_ranks[0], of))} of rank {n}" for n, of in enumerate(of_ranks) if of != of_ranks[0]]
    if told:
        raise InputError(
            f"the processes of a run must read the same, and not what rank 0 reads are {'; '.join(told)}: copy the "
            "files anew to every machine, or put them where all read them"
        )


def check_options(config) -> None:
    """Refuse processes that were told other options, on all of them."""
    of_ranks = ranks.gather({"command": config.command} | dataclasses.asdict(config))
    told = []
    for number, options in enumerate(of_ranks):
        names = [name for name in {**of_ranks[0], **options} if options.get(name) != of_ranks[0].get(name)]
        told += [
            f"{name} is {of_ranks[0].get(name)} on rank 0 and {options.get(name)} on rank {number}" for name in names
        ]
    if told:
        raise InputError(f"the processes of a run must be told the same options: {'; '.join(told)}")


def check_resumed(found: Fingerprints, recorded: Fingerprints | None, accepted: list[str], where: Path) -> list[str]:
    """What was accepted to be another than in the checkpoint, a line each.

    Raises:
        InputError: something else is another, or something that was accepted is not.
    """
    if recorded is None:
        if accepted:
            raise InputError(f"accept_changes: {where} does not say of what its run was made; leave it out")
        return [f"{where} does not say what rows and models were; that they are the same is not known"]
    changed = differing(recorded, found)
    unchanged = [name for name in accepted if name not in changed]
    if unchanged:
        raise InputError(f"accept_changes: {', '.join(unchanged)} has not changed since {where}; leave it out")
    refused = {name: parts for name, parts in changed.items() if name not in (*accepted, HELD_OUT)}
    if refused:
        raise InputError(
            f"resume: not what {where} was made with: {_listed(refused)}; put it back, go on with what is there now "
            f"(--accept_changes {' '.join(refused)}), or start anew: --overwrite"
        )
    return [f"{name} ({parts}) is another than before" for name, parts in changed.items()]


def _listed(names: dict[str, str]) -> str:
    return "; ".join(f"{name} ({NAMES[name]}: {parts})" for name, parts in names.items())
