"""What a server says of its tensors, beside those of the folder that it was to read.

A server joins some of a model's tensors into one, and may put the name of a rank before all of them.
"""

import json
import re
import struct
import zlib
from pathlib import Path

OF_JOINED = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj")
OF_JOINED |= dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj")
BLOCK = 1 << 24  # bytes
EVERY_TIME = 4 << 30  # bytes of a folder; of a larger one the tensors are compared once, after the second push


def tensors_of(folder: Path) -> dict[str, int]:
    """A sum of each tensor's bytes, by its name, over the safetensors files of a folder in the Hub format."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                start, end = entry["data_offsets"]
                file.seek(8 + length + start)
                found[name] = _sum(file, end - start)
    return found


def _sum(file, size: int) -> int:
    crc = 0
    while size > 0:
        block = file.read(min(BLOCK, size))
        crc, size = zlib.crc32(block, crc), size - len(block)
        if not block:
            break
    return crc


def kept_though_changed(before: dict[str, str], after: dict[str, str], changed: set[str]) -> list[str]:
    """The server's tensors that it has as before, though one of the folder's that it is made of is among `changed`.

    Args:
        before, after: digests by the server's names.
        changed: names in the folder.
    """
    made_of_changed = {_as_joined(name) for name in changed}
    kept = [name for name in after if before.get(name) == after[name]]
    found = [name for name in kept if not made_of_changed.isdisjoint(_endings(name))]
    # Names that are all unknown tell nothing of single tensors, but that none has changed is telling.
    return found or (kept if changed and len(kept) == len(after) else [])


def _as_joined(name: str) -> str:
    """`….q_proj.weight` as `….qkv_proj.weight`."""
    return ".".join(OF_JOINED.get(part, part) for part in name.split("."))


def _endings(name: str) -> set[str]:
    """The name, and what is left of it after each of its dots, colons and slashes."""
    starts = [match.end() for match in re.finditer(r"[./:]", name)]
    return {name, *(name[start:] for start in starts)}


def to_compare(folder: Path, pushes: int) -> dict[str, int] | None:
    """`tensors_of` a folder that is pushed after so many others; None where both sides would read too much for it."""
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return tensors_of(folder) if pushes < 2 or size <= EVERY_TIME else None
