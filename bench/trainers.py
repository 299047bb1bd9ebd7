"""A training step beside TRL's, in CPU seconds: SFT, reward model, PPO, GRPO; and what ours costs beyond the model.

    python -m bench trainers --device cpu
    python -m bench trainers --device cpu --peers none --budget 60

Two models: the demo's small Llama on three-number sums, and one with the head of a large vocabulary and random weights.
In one process and on one thread, steps of TRL's trainer of the same job and of ours take turns, on the same token ids
with the same hyperparameters; whether it was the same is looked at in the first steps. Needed are the forward and
backward passes of the model on the tokens of a GRPO step, as our trainer lays them out, the head at the tokens that
count included, without anything around them.
"""

import contextlib
import ctypes
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from bench import machine, options, peers, results, trainer_losses, trainer_peers
from bench.trainer_steps import GRPO, NEEDED, PARTS, Ours
from bench.trainer_tasks import MORE, TASKS, Task
from fused_rl.trainers.base import engine
from fused_rl.trainers.options import InputError

SECONDS = 110  # of the CPU, for the steps of all tasks, unless --budget says otherwise; what they need takes 50 more
LEAST, MOST = 3, 10  # samples of a row
WARM_UP = 1  # step of each that is not counted where there is time for more: it touches memory for the first time
PATIENCE = 1.5  # so much of its time a task may take for the sake of a warm-up
M_ARENA_MAX = -8
OURS = "fused_rl"
LEAN = "fused_rl --kl_every 0"


class Contender:
    """Our run as a row; GRPO's makes two, with the exact KL and without it."""

    def __init__(self, run: Ours, name: str = OURS, note: str = "", **changed):
        self.run, self.name, self.note, self.changed = run, name, note, changed
        self.version = None
        self.passes: list[dict] = []

    def step(self) -> dict[str, float]:
        """One step; CPU seconds of its parts."""
        for option, value in self.changed.items():
            setattr(self.run.config, option, value)
        taken = self.run.step()
        if isinstance(self.run, GRPO):
            self.passes.append(self.run.needed())
        return taken

    def facts(self, ms: dict, counted: slice) -> dict:
        """What its row says beside the times."""
        if not self.passes:
            return {}
        least = {}
        for part in NEEDED:
            least[part] = statistics.median(1e3 * found[part] for found in self.passes[counted])
        over = {part: ms[part] / least[part] for part in NEEDED}
        return {"needed_ms": least, "over_needed": over} | checked(self.run)

    def close(self) -> None:
        """Nothing runs between its steps."""


def checked(run: GRPO) -> dict:
    """Status of ours: the bare passes are those of the step."""
    error = run.passes_differ()
    limit = 5e-2 if run.config.dtype == "bfloat16" else 1e-4
    if error <= limit:
        return {"logprob_error": error}
    return {"logprob_error": error, "status": results.FAILED_CHECK, "reason": f"log-probabilities off by {error:.2g}"}


def ours_of(run: Ours) -> list[Contender]:
    """The rows that are ours."""
    if not isinstance(run, GRPO):
        return [Contender(run)]
    return [
        Contender(run, OURS, "with the exact KL", kl_every=1),
        Contender(run, LEAN, "without it, as TRL", kl_every=0),
    ]


def peers_of(task: Task, run: Ours, folder: Path, wanted: str) -> tuple[list, list[dict]]:
    """TRL's trainers of the job, and a row for each that cannot run, if one is wanted."""
    name = trainer_peers.name_of(task.op)
    if wanted != "all" and name not in wanted.split(","):
        return [], []
    made, missing = [], []
    for bf16_weights in (False, True)[: 1 + task.bf16_weights]:
        place = str(folder / f"trl-{len(made)}")
        try:
            made.append(trainer_peers.of(task.op, run, place, bf16_weights))
        except peers.Unavailable as reason:
            missing.append(results.not_run(name, reason.status, str(reason), task.op, task.name))
        except Exception as error:  # noqa: BLE001 - theirs may fail in any way, and ours goes on
            missing.append(results.not_run(name, *results.failure(error), task.op, task.name))
    return made, missing


def take_turns(contenders: list, seconds: float) -> tuple[dict[str, list], dict[str, tuple]]:
    """Steps of all in turns: LEAST that count, and more while the time lasts; where it is far too short, LEAST in all.

    Returns:
        The steps' parts by name; and how those that failed did, as status and reason.
    """
    steps = {contender.name: [] for contender in contenders}
    failed = {}
    going = list(contenders)
    began = time.process_time()
    for number in range(WARM_UP + MOST):
        spent = time.process_time() - began
        enough = spent > seconds and number >= WARM_UP + LEAST
        too_long = spent > PATIENCE * seconds and number >= LEAST
        if enough or too_long or not going:
            break
        for contender in list(going):
            try:
                steps[contender.name].append(contender.step())
            except Exception as error:  # noqa: BLE001 - what fails is a row, and the others go on
                failed[contender.name] = results.failure(error)
                going.remove(contender)
    return steps, failed


def compared(peer) -> dict:
    """What of the peer's first steps was ours: token ids, and figures that are then equal."""
    pairs = peer.compared()
    limit = 2e-2 if peer.config.dtype == "bfloat16" else 1e-4
    difference = max(abs(ours - theirs) for ours, theirs in pairs)
    row = {"same_ids": peer.same_ids(), "first": pairs, "first_difference": difference}
    if not row["same_ids"]:
        row |= {"status": results.WRONG, "reason": "other token ids than ours"}
    elif not difference <= limit:
        row |= {"status": results.WRONG, "reason": f"{peer.what} off by {difference:.2g}"}
    return row


def row_of(task: Task, contender, steps: list[dict]) -> dict:
    """Medians in ms, their samples, and what was checked."""
    whole = len(steps) > LEAST
    counted = slice(WARM_UP, None) if whole else slice(None)
    taken = {}
    for part in PARTS:
        found = [1e3 * step.get(part, 0.0) for step in steps[counted]]
        if any(found):
            taken[part] = found
    taken["step"] = [1e3 * sum(step.values()) for step in steps[counted]]
    ms = {part: statistics.median(found) for part, found in taken.items()}
    notes = [contender.note, "" if whole else f"{len(steps)} runs, the first too: no time for more, --budget gives it"]
    row = {
        "op": task.op,
        "task": task.name,
        "implementation": contender.name,
        "status": results.OK,
        "note": "; ".join(filter(None, notes)),
        "version": contender.version,
        "ms": ms,
        "samples_ms": taken,
        "steps_per_cpu_second": 1e3 / ms["step"],
    }
    ours = isinstance(contender, Contender)
    return row | (contender.facts(ms, counted) if ours else compared(contender))


def run_task(task: Task, wanted: str, seconds: float) -> list[dict]:
    """The rows of one task; one that cannot be set up here is a row that says why."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            run = task.kind(task.config(folder))
        except InputError as reason:
            return [results.not_run(OURS, results.CANNOT_RUN, str(reason), task.op, task.name)]
        others, rows = peers_of(task, run, folder, wanted)
        contenders = [*ours_of(run), *others]
        steps, failed = take_turns(contenders, seconds)
        timed = []
        for contender in contenders:
            if contender.name in failed:
                row = results.not_run(contender.name, *failed[contender.name], task.op, task.name)
                rows.append(row)
            else:
                timed.append(row_of(task, contender, steps[contender.name]))
            contender.close()
        run.close()
    over_trl(timed)
    return timed + rows


def over_trl(rows: list[dict]) -> None:
    """Note in each row how many of its steps fit in one of TRL's, whose weights are fp32."""
    theirs = [row for row in rows if not results.ours(row) and not row["implementation"].endswith("bf16 weights")]
    for row in rows if theirs else []:
        row["steps_over_trl"] = theirs[0]["ms"]["step"] / row["ms"]["step"]


def show(task: Task, rows: list[dict]) -> None:
    """Print the task's table, and below it what did not run."""
    measured = results.measured(rows)
    if measured:
        titles, lines = results.steps(measured)
        cells = [[row["implementation"], *line] for row, line in zip(measured, lines, strict=True)]
        print(f"\n{task.op}, {task.name}: CPU time of a step")
        print(results.table(["implementation", *titles], cells))
    results.show_missing(rows)
    sys.stdout.flush()


def prepare() -> None:
    """One thread, one arena of memory for all of them, and quiet libraries."""
    with contextlib.suppress(peers.Unavailable):  # its row will say so
        trainer_peers.alone()
    engine.quiet()
    torch.set_num_threads(1)
    if sys.platform.startswith("linux"):  # memory that a thread frees would not be the next one's
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def main(args) -> int:
    """Run the group; 1 where ours is wrong."""
    if args.device != "cpu":
        print("measured in CPU seconds: --device cpu")
        return 0
    prepare()
    print(machine.heading(args.device), flush=True)
    rows = trainer_losses.rows(args.peers)
    trainer_losses.show(rows)
    budget = args.budget or SECONDS
    for task in TASKS + MORE if args.all_shapes else TASKS:
        found = run_task(task, args.peers, task.share * budget)
        show(task, found)
        rows += found
        results.save(args, rows)
    return results.failed(rows)


def command(group: str, words: list[str] | None = None) -> int:
    """The group by its command line."""
    return main(options.arguments(__doc__, group, words))
