"""How every trainer begins: its processes meet, agree on what they were told and what they read, and open the folder.

run = begin(config, arithmetic)
…                                   # read tokenizer and rows
run.has_read(tokenizer, asked, rows=…, held_out=…)
…                                   # load models
loop = Loop(config, run, …)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fused_rl.trainers.base import ending, engine, ranks
from fused_rl.trainers.base.screen import tell
from fused_rl.trainers.data import fingerprints, sources
from fused_rl.trainers.data.fingerprints import Fingerprints
from fused_rl.trainers.options.config import InputError, RunConfig
from fused_rl.trainers.run import there
from fused_rl.trainers.run.checkpoint import Checkpoints
from fused_rl.trainers.run.folder import Folder
from fused_rl.trainers.run.logger import phase

Arithmetic = Callable[[RunConfig, int], dict[str, object]]
"""(config, number of processes) -> how the batch divides; raises InputError on what does not."""


@dataclass
class Run:
    """A run that has begun."""

    config: RunConfig
    device: torch.device
    folder: Path
    """Where it writes, opened."""
    recorded: dict[str, object] = field(default_factory=dict)
    """The options in the checkpoint that it goes on from; empty where it begins."""
    made_of: Fingerprints = field(default_factory=dict)
    """Of all that it reads; empty until it was compared."""

    def has_read(self, tokenizer, asked: Callable[[object], list[int]], **rows: Sequence) -> None:
        """Compare what was read, with what the other processes read and with what a resumed run was made of.

        `rows` are as the trainer keeps them, by their name in `fingerprints.NAMES`; `asked` has the token ids of a
        row's prompt. What differs is refused on all ranks; held-out prompts that are trained on are told.
        """
        with phase("took the fingerprints of models and functions"), ranks.together():
            made_of = fingerprints.of_sources(sources.of_run(self.config))
        for name in fingerprints.without_source(made_of):
            if ranks.rank() == 0:
                tell(f"{name}: its source cannot be read, so that resuming cannot tell whether it is the same")
        made_of |= fingerprints.of_tokenizer(tokenizer)
        made_of |= {name: fingerprints.of_rows(of_name) for name, of_name in rows.items()}
        fingerprints.check_ranks(made_of)
        if self.config.resume:
            for line in Checkpoints(self.config).check_made_of(made_of):
                if ranks.rank() == 0:
                    tell(f"resume: {line}")
        self.made_of = made_of
        held_out = [tuple(asked(row)) for row in rows["held_out"]]
        wanted = set(held_out)  # of the other rows, which may be millions, only these are kept
        trained = {ids for ids in map(tuple, map(asked, rows["rows"])) if ids in wanted}
        known = sum(ids in trained for ids in held_out)
        if known and ranks.rank() == 0:
            what = f"{known} of {len(held_out)} held-out prompts are also among the rows to train on"
            tell(f"{what}: what is measured there is no measure of new ones")


def begin(config: RunConfig, arithmetic: Arithmetic) -> Run:
    """Meet the other processes, refuse what all or any of them cannot do, open the folder, look for what is read."""
    expected = arithmetic.__annotations__["config"]
    if not isinstance(config, expected):
        if isinstance(config, dict):
            raise InputError(f"train() takes a {expected.__qualname__}, got a dict; give {expected.__qualname__}(**it)")
        came = f"{type(config).__module__}.{type(config).__qualname__}"
        raise InputError(
            f"train() takes a {expected.__module__}.{expected.__qualname__}, got a {came}; of TRL's configs "
            "docs/from_trl.md says what each option is called here"
        )
    config.__post_init__()  # what was set since it was made
    if config.dry_run:
        raise InputError(
            f"dry_run: it is the command that describes a run, fused-rl {config.command} … --dry_run; leave it out"
        )
    ending.begin()
    device = engine.setup(config.seed)
    fingerprints.check_options(config)
    with ranks.together():
        arithmetic(config, ranks.world_size())
    folder = Folder(config).open()
    with ranks.together():
        there.check(config.reads())
        recorded = Checkpoints(config).recorded() if config.resume else {}
    return Run(config, device, folder, recorded)
