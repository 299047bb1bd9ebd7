"""The beginning of a run: its processes meet, compare options and inputs, and open the folder.

run = begin(config, arithmetic)
…                                   # read tokenizer and rows
run.has_read(tokenizer, asked, rows=…, held_out=…)
…                                   # load models
loop = Loop(config, run, …)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fused_rl.trainers.base import engine, ranks
from fused_rl.trainers.base.screen import tell
from fused_rl.trainers.data import fingerprints
from fused_rl.trainers.options import InputError, RunConfig
from fused_rl.trainers.run import hub, there
from fused_rl.trainers.run.logger import phase, require_trackers
from fused_rl.trainers.run.store import RunFolder

Arithmetic = Callable[[RunConfig, int], dict[str, object]]
"""(config, number of processes) -> how the batch divides; raises InputError on what does not."""


@dataclass
class Run:
    """A run that has begun."""

    config: RunConfig
    device: torch.device
    folder: Path
    """Where it writes, locked."""
    recorded: dict[str, object] = field(default_factory=dict)
    """The options in the checkpoint that it goes on from; empty where it begins."""
    inputs: dict[str, str] = field(default_factory=dict)
    """The hash of each input; empty until they were compared."""

    def has_read(
        self, tokenizer, asked: Callable[[object], list[int]], models: Mapping[str, str], **rows: Sequence
    ) -> None:
        """Refuse inputs that are not those of the other processes, or not those of the run that is resumed.

        Args:
            tokenizer: of the run, whose chat template is compared.
            asked: returns the token ids of a row's prompt.
            models: folders or Hub names that are read beside `config.model`, by option.
            rows: as the trainer keeps them, by name.
        """
        with phase("hashed models and rows"):
            inputs = {"model": fingerprints.of_model(self.config.model, self.config.revision)}
            inputs |= {option: fingerprints.of_model(name) for option, name in models.items()}
            inputs |= {name: fingerprints.of_rows(of_name) for name, of_name in rows.items()}
            inputs["chat_template"] = fingerprints.of_text(tokenizer.chat_template)
        fingerprints.check_ranks(inputs)
        del inputs["held_out"]  # may change: it is measured, not trained on
        if self.config.resume:
            changed = RunFolder(self.config).check_inputs(inputs)
            if changed and ranks.rank() == 0:
                tell(f"resume: continues with other inputs: {', '.join(changed)}")
        self.inputs = inputs
        held_out = [tuple(asked(row)) for row in rows["held_out"]]
        wanted = set(held_out)  # of the other rows, which may be millions, only these are kept
        trained = {ids for ids in map(tuple, map(asked, rows["rows"])) if ids in wanted}
        known = sum(ids in trained for ids in held_out)
        if known and ranks.rank() == 0:
            what = f"{known} of {len(held_out)} held-out prompts are also among the rows to train on"
            tell(f"{what}: what is measured there is no measure of new ones")


def begin(config: RunConfig, arithmetic: Arithmetic) -> Run:
    """Meet the other processes, lock the folder, and check that model and datasets exist."""
    expected = arithmetic.__annotations__["config"]
    if not isinstance(config, expected):
        came = f"{type(config).__module__}.{type(config).__qualname__}"
        raise InputError(
            f"train() takes a {expected.__module__}.{expected.__qualname__}, got a {came}; docs/from_trl.md has the "
            "names of TRL's options"
        )
    config.check()  # what was set since it was made
    if config.dry_run:
        raise InputError(f"dry_run is for the command: fused-rl {config.command} … --dry_run; leave it out")
    arithmetic(config, ranks.processes())
    device = engine.setup(config.seed)
    fingerprints.check_ranks({"command": config.command, **config.plain()})
    require_trackers(config)
    if config.push_to_hub:
        ranks.on_first_rank(lambda: hub.make_repository(config))
    folder = RunFolder(config)
    folder.open()
    there.check(config.model, config.revision, [config.dataset, config.eval_dataset])
    recorded = folder.state()["options"] if config.resume else {}
    return Run(config, device, folder.path, recorded)
