"""Where the weights for servers are written, and how a head that is tied to its embedding becomes a tensor of its own.

vLLM on a CPU packs its LM head once. At an update it packs again what the folder has a tensor for, and a tied head has
none: it would stay the old one, without an error. So such a server must be started from an untied copy of the model,

    python -m fused_rl.trainers.servers.published MODEL FOLDER

and then gets untied weights. The run trains MODEL itself, with one weight for both.
"""

import contextlib
import json
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.files import (
    as_json,
    io_errors_in_a_line,
    whole_folder,
    write_atomically,
)
from fused_rl.trainers.base.text import InputError

SHARED_MEMORY = Path("/dev/shm")
# Copies of the weights: two publications exist at once, and others write there too.
ROOM = 2.5
BYTES_IN_4_BIT = 4  # that one packed byte is saved as: two weights of 16 bits


def folder_of(urls: Sequence[str], published_dir: str | None, output_dir: Path, lm) -> Path:
    """Return the empty folder that a run publishes into, the same for every process. Call it on all.

    Args:
        urls: the servers.
        published_dir: the user's choice; None is /dev/shm where it will do, and else the run's own folder.
        output_dir: the run's, which exists.
        lm: the policy, whose bytes the first process counts.
    """
    found = []

    def look() -> None:
        # Two runs never have one name, and a run that is resumed on its machine has the one that it had before it was
        # killed. Machines of one image may number their folders alike.
        of_run = output_dir.stat()
        name = f"fused-rl-{socket.gethostname()}-{of_run.st_dev:x}-{of_run.st_ino:x}"
        if published_dir is not None:
            chosen = Path(published_dir).absolute() / name
            with io_errors_in_a_line("the weights for the servers", chosen):
                _remove(chosen)
        else:
            chosen = SHARED_MEMORY / name
            if not (all(map(is_here, urls)) and _is_made(chosen, lm)):
                chosen = output_dir / "published"
        found.append(chosen)

    ranks.on_first_rank(look)
    return ranks.gather_processes(found)[0][0]


def _remove(folder: Path) -> None:
    """Remove what a killed run has left."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def _is_made(folder: Path, lm) -> bool:
    """Make an empty folder in shared memory; return False without room, or with something of another's in its place."""
    # Everyone may write there, and the name can be known: no link is followed, and what is not this user's stays.
    try:
        _remove(folder)
        if not _fits(lm):
            return False
        folder.mkdir(mode=0o755)  # servers may be another user's
    except OSError:
        return False
    return True


def _fits(lm) -> bool:
    """Return True if shared memory has room for two publications and a half."""
    total = 0
    for weight in lm.parameters():
        elements = getattr(weight, "ds_numel", weight.numel())  # ZeRO 3 leaves a part of them here
        total += elements * (weight.itemsize if weight.is_floating_point() else BYTES_IN_4_BIT)
    return shutil.disk_usage(SHARED_MEMORY).free >= ROOM * total


def is_here(url: str) -> bool:
    """Return True if the URL is of this machine."""
    host = urlsplit(url).hostname or ""
    names = ("localhost", "::1", socket.gethostname().lower())
    return host.startswith("127.") or host in names


class TiedHead(NamedTuple):
    """The names of an embedding, which a folder has, and of the head that is tied to it."""

    embedding: str
    head: str

    @classmethod
    def of(cls, lm) -> "TiedHead | None":
        """Return the names of a model; None if its head has a weight of its own."""
        embedding, head = lm.get_input_embeddings(), lm.get_output_embeddings()
        if head is None or head.weight is not embedding.weight:
            return None
        names = {module: name for name, module in lm.named_modules()}
        return cls(f"{names[embedding]}.weight", f"{names[head]}.weight")

    def untie(self, folder: Path) -> None:
        """Give the head a tensor of its own in a saved model, and say so in its config."""
        from safetensors import safe_open
        from safetensors.torch import save_file

        # A model in one file gets an index, as one in several has.
        index_file = folder / "model.safetensors.index.json"
        if not index_file.exists():
            first = folder / "model-00001-of-00001.safetensors"
            (folder / "model.safetensors").rename(first)
            with safe_open(first, "pt") as file:
                index = {"metadata": {}, "weight_map": dict.fromkeys(file.keys(), first.name)}
        else:
            index = json.loads(index_file.read_bytes())
        places = index["weight_map"]
        if self.embedding not in places:
            raise InputError(f"{folder} has no tensor {self.embedding}, to which the head is tied")
        with safe_open(folder / places[self.embedding], "pt") as file:
            weight = file.get_tensor(self.embedding)
        places[self.head] = "model-head.safetensors"
        save_file({self.head: weight}, folder / places[self.head], {"format": "pt"})
        write_atomically(index_file, as_json(index, indent=2))

        config_file = folder / "config.json"
        config = json.loads(config_file.read_bytes())
        for part in (config, config.get("text_config")):
            if part is not None:
                part["tie_word_embeddings"] = False
        write_atomically(config_file, as_json(config, indent=2))


def write_untied(model: str, folder: Path) -> None:
    """Write an untied copy of a model, a name on the Hub or a folder, for a server on a CPU."""
    import transformers

    lm: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    tied = TiedHead.of(lm)
    if tied is None:
        raise InputError(f"the head of {model} has a weight of its own: it can be served as it is")
    with whole_folder(folder) as unfinished:
        lm.save_pretrained(unfinished)
        transformers.AutoTokenizer.from_pretrained(model).save_pretrained(unfinished)
        tied.untie(unfinished)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m fused_rl.trainers.servers.published MODEL FOLDER")
    write_untied(sys.argv[1], Path(sys.argv[2]))
