"""How every trainer begins: its processes meet, agree on what they were told and what they read, and open the folder.

run = begin(config, arithmetic)
…                                   # read tokenizer and rows
run.has_read(tokenizer, rows=…, held_out=…)
…                                   # load models
loop = Loop(config, run, …)
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from fused_rl.trainers.base import engine, ranks
from fused_rl.trainers.base.screen import tell
from fused_rl.trainers.data import fingerprints, sources
from fused_rl.trainers.data.fingerprints import Fingerprints
from fused_rl.trainers.options.config import InputError, RunConfig
from fused_rl.trainers.run.checkpoint import Checkpoints
from fused_rl.trainers.run.folder import Folder
from fused_rl.trainers.run.logger import phase


@dataclass
class Run:
    """A run that has begun."""

    config: RunConfig
    device: torch.device
    folder: Path
    """Where it writes, opened."""
    made_of: Fingerprints
    complete: bool = False
    """Whether rows and tokenizer are in `made_of`, and all of it was compared."""

    def has_read(self, tokenizer, **rows: Iterable) -> None:
        """Compare what was read, with what the other processes read and with what a resumed run was made of.

        Args:
            tokenizer: the run's.
            **rows: `rows`, `held_out`, …: rows as the trainer keeps them, by their name in `fingerprints.NAMES`.

        Raises:
            InputError: on all ranks, where any of it differs; names what, and how to go on.
        """
        with ranks.together():  # a name that is on no Hub has been told by now
            known = sources.of_run(self.config, hub=False)
            on_hub = [source for source in sources.of_run(self.config) if source not in known]
            for name, parts in fingerprints.of_sources(on_hub).items():
                self.made_of.setdefault(name, {}).update(parts)
        self.made_of |= fingerprints.of_tokenizer(tokenizer)
        self.made_of |= {name: fingerprints.of_rows(of_name) for name, of_name in rows.items()}
        fingerprints.check_ranks(self.made_of)
        if self.config.resume:
            for line in Checkpoints(self.config).check_made_of(self.made_of):
                if ranks.rank() == 0:
                    tell(f"resume: {line}")
        self.complete = True


def begin(config: RunConfig, arithmetic: Callable[[RunConfig, int], dict[str, object]]) -> Run:
    """Meet the other processes, refuse what all or any of them cannot do, open the output folder.

    Args:
        config: of the run.
        arithmetic: (config, number of processes) -> how the batch divides; raises InputError on what does not.
    """
    if config.dry_run:
        raise InputError(
            f"dry_run: it is the command that describes a run, fused-rl {config.command} … --dry_run; leave it out"
        )
    device = engine.setup(config.seed)
    fingerprints.check_options(config)
    with ranks.together():
        arithmetic(config, ranks.world_size())
    folder = Folder(config).open()
    with phase("took the fingerprints of models and functions"), ranks.together():
        made_of = fingerprints.of_sources(sources.of_run(config, hub=False))
    return Run(config, device, folder, made_of)
