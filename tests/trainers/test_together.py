"""Two ranks have the same options and inputs or say what differs, hear of rank 0's refusals, and add up their sums."""

import os
import re
import shutil
from pathlib import Path

import torch

from fused_rl.trainers import sft
from fused_rl.trainers.base import engine, ranks
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.rollouts.roll_out import roll_out, rollout_metrics
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.rollouts.types import Prompt, Response
from fused_rl.trainers.run import store
from tests.distributed import run_distributed
from tests.trainers import steps, tiny


def outcome(action) -> str:
    """What an action raises."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def sums_of_ranks(rank, world):
    engine.setup(1)
    scorer, sampler = (
        steps.Scorer([1.0] * (rank + 1)),
        steps.Sampler([Response([5], "length")] * (rank + 1)),
    )
    scorer.broken = ["d.jsonl, line 9 took too long"] * rank
    prompts = [Prompt([7, 8], {}, f"d.jsonl, line {rank}")] * (rank + 1)
    device = torch.device("cpu")
    struck = []
    for step in (1, 2):  # what one rollout has counted is not counted by the next
        sampling = Sampling(1.0, 1, (3,))
        rollout = roll_out(sampler, [scorer], prompts, sampling, tiny.tokenizer(), device)
        struck.append(rollout_metrics(rollout, {}, step)["verifier/points/timeouts"])
    counts = ranks.global_counts(torch.tensor(3 * rank), torch.tensor(0.0))
    largest = ranks.global_max(torch.tensor(float(rank)))

    def refuse():
        raise InputError("no")

    refusals = [outcome(lambda: ranks.on_first_rank(refuse))]
    return struck, counts, largest, refusals


def test_sums_and_refusals_are_the_same_on_all_ranks():
    expected = [1.0, 0.0], [3, 0], 1.0, ["InputError: no"]
    assert run_distributed(sums_of_ranks, 2) == [expected] * 2


def reorder_rows(folder: Path) -> None:
    path = folder / "rows.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[::-1]))


# (what spoils the files of rank 1, its other options, what both ranks say)
APART = [
    (None, {"lr": 0.5}, "lr is 0.001 on rank 0 and 0.5 on rank 1"),
    (reorder_rows, {}, "rows is .* on rank 0 and .* on rank 1"),
]


def apart(rank, world, folder) -> list[str]:
    """What a rank says in each of the cases."""
    messages = []
    for number, (spoil, options, _) in enumerate(APART):
        here = Path(shutil.copytree(f"{folder}/files", f"{folder}/{rank}-{number}"))
        os.chdir(here)
        if rank == 1 and spoil is not None:
            spoil(here)
        common = {
            "model": "model",
            "dataset": "rows.jsonl",
            "completion_column": "answer",
            "eval_size": 0,
        }
        common |= {
            "batch_size": 2,
            "lr": 1e-3,
            "zero_stage": 0,
            "output_dir": f"{folder}/run{number}",
        }
        config = sft.SFTConfig(**(common | (options if rank == 1 else {})))
        messages.append(outcome(lambda config=config: sft.train(config)))
        store.unlock()
        assert not list(Path(config.output_dir).glob("[!.]*"))
    return messages


def test_ranks_with_other_options_or_inputs_all_say_which(tmp_path):
    tiny.model_folder(tmp_path / "files" / "model")
    tiny.jsonl(tmp_path / "files" / "rows.jsonl", tiny.sums(8))
    for of_rank in run_distributed(apart, 2, str(tmp_path)):
        for message, (spoil, options, expected) in zip(of_rank, APART, strict=True):
            assert re.match(f"InputError: .*{expected}", message), (spoil, options, message)
