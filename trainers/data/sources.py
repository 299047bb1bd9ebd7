"""What a run reads, directly and through what it reads: one table of options, and what follows from each.

An option whose value is text stands in `MODELS`, `ROWS`, `SPELLED` or `FUNCTIONS`, or it names nothing that is read
(`NOT_READ`): a test holds every option of every trainer to that.
"""

import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from fused_rl.trainers.models import lora
from fused_rl.trainers.options.config import InputError, Options
from fused_rl.trainers.scorers.options import FUNCTION, read

MODELS = {"model": "model", "critic": "critic"}  # option -> under which name it is known
ROWS = ("dataset", "eval_dataset", "reference_dataset")
SPELLED = ("verifiers",)
FUNCTIONS = ("surrogate",)
NOT_READ = frozenset(
    (
        *("output_dir", "resume_from", "accept_changes", "wandb_project", "trackio_project", "hub_model_id"),
        *("revision", "attn_implementation", "lora_targets", "preset", "advantage", "system_prompt", "stop_token"),
        *("dataset_config", "dataset_split", "eval_dataset_config", "eval_split"),
        *("prompt_column", "completion_column", "answer_column", "chosen_column", "rejected_column", "margin_column"),
    )
)
SHARED = "shared"  # as `critic`: the policy's own backbone


class Source(NamedTuple):
    """Something that a run reads."""

    kind: str
    """model, adapters, critic, reward_model, rows, scorer or surrogate."""
    said: str
    """The option with its value, and by way of what, for errors."""
    name: str
    """A path, the name of something on the Hub, or `module:function`."""
    revision: str | None = None

    def path(self) -> Path | None:
        """Where it lies on this machine; None for what lies on the Hub, or nowhere."""
        if self.kind in ("scorer", "surrogate"):
            return module_file(self.name)
        path = Path(self.name).expanduser()
        return path if path.exists() else None


def of_run(config: Options, *, hub: bool = True) -> list[Source]:
    """All that a run of this config reads; without `hub` nothing that the Hub would have to be asked for."""
    found = []
    for option, kind in MODELS.items():
        name = getattr(config, option, None)
        if name is not None and name != SHARED:
            found += _of_model(kind, f"{option}={name}", name, config.revision if option == "model" else None, hub)
    for option in ROWS:
        name = getattr(config, option, None)
        if name is not None:
            found.append(Source("rows", f"{option}={name}", name))
    for option in SPELLED:
        spelled = getattr(config, option, None)
        for part in [] if spelled is None else read(spelled):
            said = f"{option}: {part.name}"
            if part.kind == "reward_model":
                found += _of_model("reward_model", said, part.detail, None, hub)
            elif part.kind == FUNCTION:
                found.append(Source("scorer", said, part.detail))
    for option in FUNCTIONS:
        name = getattr(config, option, None)
        if name is not None and ":" in name:
            found.append(Source("surrogate", f"{option}={name}", name))
    return found


def _of_model(kind: str, said: str, name: str, revision: str | None, hub: bool) -> Iterator[Source]:
    """A model; of adapters also what they belong to."""
    if not hub and not Path(name).exists():
        return
    adapters = lora.find_adapters(name, revision)
    if adapters is None:
        yield Source(kind, said, name, revision)
        return
    yield Source("adapters" if kind == "model" else kind, said, name, revision)
    base, of_base = adapters.base
    if base != name:
        yield from _of_model(kind, f"{said}, adapters to {base}", base, of_base, hub)


def module_file(function: str) -> Path | None:
    """The file of the module in `module:function`; None where there is none that is read."""
    name = function.partition(":")[0]
    loaded = getattr(sys.modules.get(name), "__file__", None)
    if loaded is not None:
        return Path(loaded)
    try:
        spec = importlib.util.find_spec(name)
    except (Exception, SystemExit):  # of a package around it, or a name that is none: loading it says so
        return None
    if spec is not None:
        return None if spec.origin is None else Path(spec.origin)
    here = Path.cwd() / Path(*name.split("."))  # `load_function` looks there last
    places = [path for path in (here.with_suffix(".py"), here / "__init__.py") if path.is_file()]
    return places[0] if places else None


def refuse_to_delete(config: Options, doomed: Iterable[Path]) -> None:
    """Refuse to delete paths of which the run reads something, or which lie in a folder of rows.

    Raises:
        InputError: names what would be deleted, and by which option it is read.
    """
    for source in of_run(config):
        path = source.path()
        if path is not None:
            # Of a model's folder its own files are read, and what a run in that folder writes is none of them.
            refuse_if_inside(path, source.said, doomed, below=source.kind == "rows")


def refuse_if_inside(path: Path, said: str, doomed: Iterable[Path], *, below: bool = False) -> None:
    """Refuse where one of `doomed` is or holds `path`, links followed or not; with `below` also where it lies in it."""
    for target in doomed:
        for one, other in ((_named(path), _named(target)), (path.resolve(), target.resolve())):
            if one == other or other in one.parents:
                raise InputError(f"overwrite would delete {target}, and {said} lies there; choose another folder")
            if below and one in other.parents:
                raise InputError(f"overwrite would delete {target}, which lies in {said}; choose another folder")


def _named(path: Path) -> Path:
    """The absolute path by its own name, without following links."""
    return Path(os.path.abspath(path))
