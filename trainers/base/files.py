"""Files and folders that are written whole or not at all, also after a power cut; one hash for each input of a run."""

import hashlib
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .text import InputError, in_a_line

UNFINISHED = ".unfinished-"  # how names begin until all is written; nobody else uses such names
UNUSUAL = re.compile(r"[^ -~\n]")
OF_A_MODEL = (
    "*.safetensors",
    "*.bin",
    "*.index.json",
    "config.json",
    "generation_config.json",
    "adapter_config.json",
)


# The files and folders that the run of this process has read.
names_read: set[str] = set()


def unfinished(path: Path) -> Path:
    """Return the path that a file or folder is written to before it gets its name."""
    return path.with_name(UNFINISHED + path.name)


def fingerprint(path: Path) -> tuple[int, int]:
    """Return the size in bytes and the CRC-32 of a file, at about 1 GB/s per core, three times as fast as BLAKE2."""
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            size = size + len(block)
            crc = zlib.crc32(block, crc)
    return size, crc


def hash_of(value: object) -> str:
    """Return the hash of what JSON can write, such as a chat template."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def hash_of_model(name: str, revision: str | None = None) -> str:
    """Return the hash of a model's folder, or its commit on the Hub; adapters include the weights below them."""
    folder = Path(name)
    if folder.is_dir():
        files: set[Path] = set()
        for pattern in OF_A_MODEL:
            files |= set(folder.glob(pattern))
        try:
            model_hash = hash_of([(file.name, *fingerprint(file)) for file in sorted(files)])
        except OSError as error:
            raise InputError(f"{error.filename} cannot be read: {error.strerror}") from error
    else:
        check_exists(name)
        from huggingface_hub import snapshot_download

        try:
            folder = Path(
                snapshot_download(name, revision=revision, allow_patterns=["*config.json"])
            )
        except Exception as error:  # of the network, the Hub, or a name that cannot be one
            raise InputError(
                f"{name!r} is neither a folder nor found on the Hub: {in_a_line(error)}"
            ) from error
        model_hash = folder.name  # a snapshot's folder is named by its commit
    # Adapters of the same bytes on other weights are another model.
    config = adapter_config(folder)
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not base:  # reading the model refuses them
        return model_hash
    base = base_of_adapters(folder, base, revision)
    return f"{model_hash} on {hash_of_model(base, revision)}"


def base_of_adapters(folder: str | Path, base: str, revision: str | None = None) -> str:
    """Return the model below the adapters in a folder: its own folder, or its name on the Hub.

    A relative folder is looked for in the current one, and then in that of the adapters.
    """
    from transformers.utils.hub import cached_file

    for path in (Path(base), Path(folder, base)):
        if path.is_dir():
            if path.resolve() == Path(folder).resolve():
                remedy = "give their model's as base_model_name_or_path in its adapter_config.json"
                raise InputError(f"{str(folder)!r} holds adapters to its own folder; {remedy}")
            return base if path == Path(base) else str(path.resolve())
    try:
        check_exists(base)
        cached_file(base, "config.json", revision=revision)
    # Of the network, the Hub, or a name that cannot be one.
    except (OSError, ValueError) as error:
        problem = f"{str(folder)!r} holds adapters to {base!r}, which is neither a folder in {os.getcwd()}"
        remedy = "correct base_model_name_or_path in its adapter_config.json"
        raise InputError(
            f"{problem} (the current folder) or in {folder}, nor found on the Hub; {remedy}"
        ) from error
    return base


def is_missing_path(name: str) -> bool:
    """Return True for a local path at which nothing lies; a name that the Hub may have is no path."""
    path = Path(name)
    try:
        in_a_folder = "/" in name and path.parent.is_dir()
        is_path = in_a_folder or name.startswith((".", os.sep)) or name.count("/") > 1
        return is_path and not path.exists()
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror}") from error


def check_exists(name: str) -> None:
    """Refuse a name to be read at which nothing lies: the Hub would be asked for it, without a network for minutes."""
    if is_missing_path(name):
        raise InputError(f"{name} does not exist; the current folder is {os.getcwd()}")
    names_read.add(name)


def weights_below(name: str) -> str | None:
    """Return the local folder of the weights that the adapters in a local folder belong to, or None."""
    base = adapter_config(Path(name)).get("base_model_name_or_path") or ""
    folders = [folder for folder in (Path(base), Path(name, base)) if base and folder.is_dir()]
    return str(folders[0]) if folders else None


def adapter_config(folder: Path) -> dict:
    """Return what says to which model the adapters in a folder belong; {} where there are none."""
    file = folder / "adapter_config.json"
    try:
        contents = json.loads(file.read_bytes()) if file.is_file() else {}
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {in_a_line(error)}") from error
    if not isinstance(contents, dict):
        raise InputError(f"{file}: expected a JSON object, got {contents!r:.80}")
    return contents


def sync(path: Path) -> None:
    """Write a file's bytes, or a folder's names, to the disk before returning."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file in one step."""
    new = unfinished(path)
    try:
        with new.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # After a power cut there is the old file or the new one: its bytes are on the disk before its name is.
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    sync(path.parent)


def as_json(value, *, indent: int | None = None) -> str:
    """Return strict JSON in UTF-8: NaN and infinite numbers are null, and unknown objects are text."""
    text = json.dumps(
        _finite(value), indent=indent, default=str, allow_nan=False, ensure_ascii=False
    )
    # A file that is printed must not steer the terminal, and half of a surrogate pair is no UTF-8.
    return UNUSUAL.sub(lambda m: m[0] if m[0].isprintable() else json.dumps(m[0])[1:-1], text)


def _finite(value):
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def write_rows(path: Path, rows: list[dict]) -> str:
    """Write one JSON object per line, make the file's folder if needed, and return the path as text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(as_json(row) + "\n" for row in rows))
    return str(path)


def remove(path: Path) -> None:
    """Remove a folder, if there is one; of a link the link alone."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def delete(path: Path) -> None:
    """Delete a folder; it loses its name first, so that no half of it is taken for the whole."""
    remove(unfinished(path))
    os.rename(path, unfinished(path))
    remove(unfinished(path))


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder to write into. It gets its name when the block ends; if the block raises, nothing is left."""
    new = unfinished(folder)
    remove(new)
    new.mkdir(parents=True)
    try:
        yield new
        # Every byte and name is on the disk before the folder gets the name by which it counts as whole.
        for path in new.rglob("*"):
            sync(path)
        sync(new)
        os.rename(new, folder)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    sync(folder.parent)


@contextmanager
def io_errors_in_a_line(content: str, folder: Path) -> Iterator[None]:
    """Turn a full disk or a missing permission in a block that writes `content` into `folder` into one line."""
    from safetensors import SafetensorError
    from torch.distributed import DistError

    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        # gloo has no class of error of its own.
        if isinstance(error, DistError) or "/gloo/" in str(error):
            lost = f"another process of the run ended while {content} was written to {folder}"
            raise InputError(f"{lost}, and its own error says why ({in_a_line(error)})") from error
        # torch.save raises a RuntimeError if the disk is full; others, such as no memory, are not of the disk.
        if isinstance(error, RuntimeError) and "inline_container.cc" not in str(error):
            raise
        reason = getattr(error, "strerror", None) or f"{in_a_line(error)}; is the disk full?"
        raise InputError(f"{content} could not be written to {folder}: {reason}") from error
