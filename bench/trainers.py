"""A training step beside TRL's, in CPU seconds: rollout, score, measure, update; and what each costs beyond the model.

    python -m bench trainers --device cpu
    python -m bench trainers --device cpu --peers none --budget 60

Two tasks: the demo's (a small Llama, three-number sums), and a Qwen2 with the head of a large vocabulary and random
weights. In one process and on one thread, a step of TRL's trainer, a step of ours and the bare passes of ours take
turns. Needed are the forward and backward passes of the model on the tokens of the step, as our trainer lays them out,
the head at the tokens that count included, without anything around them.
"""

import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from bench import machine, options, peers, results, trainer_peers
from bench.trainer_steps import NEEDED, PARTS, Ours
from fused_rl.trainers.base import engine
from fused_rl.trainers.base.files import write_rows
from fused_rl.trainers.grpo import GRPOConfig
from fused_rl.trainers.options.config import InputError

SECONDS = 240  # of both tasks together, unless --budget says otherwise; a first demo takes 80 more to warm up
WARM_UP = 1  # step of each that is not counted: it touches memory for the first time
WORK = machine.ROOT / "runs" / "bench-trainers"
OURS = "fused_rl"
LEAN = "fused_rl --kl_every 0"
TRL = trainer_peers.NAME
NOTES = {OURS: "with the exact KL", LEAN: "without it, as TRL", TRL: ""}


class Task(NamedTuple):
    """A model, rows and hyperparameters."""

    name: str
    config: Callable[[Path], GRPOConfig]
    """Makes the files in a folder, and the config that names them."""


def demo(folder: Path, seed: int = 1) -> GRPOConfig:
    """The demo's task; its warm start is kept in runs/bench-trainers for the next time."""
    from recipes import demo as recipe

    kept = WORK / f"demo-{seed}"
    if not (kept / "sft" / "model" / "config.json").exists():
        recipe.warm_start(kept, seed)
    config = recipe.grpo_config(kept, seed)
    config.output_dir = str(folder / "ours")
    return config


def word_tokenizer(vocabulary: int):
    """Token i is the word `wi`; pad is 0 and EOS 1."""
    import tokenizers
    import transformers

    words = {f"w{i}": i for i in range(2, vocabulary)}
    words |= {"<pad>": 0, "<eos>": 1}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")


def qwen(
    folder: Path,
    *,
    vocabulary=151_936,
    hidden=896,
    layers=4,
    prompt=48,
    response=8,
    dtype="bfloat16",
):
    """A Llama of Qwen2.5-0.5B's widths and vocabulary, 4 layers of random weights, on random words."""
    import transformers

    transformers.set_seed(1)
    shape = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 38 // 7,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    lm = transformers.LlamaForCausalLM(shape).to(getattr(torch, dtype))
    lm.save_pretrained(folder / "model")
    word_tokenizer(vocabulary).save_pretrained(folder / "model")
    ids = torch.randint(2, vocabulary, (64, prompt)).tolist()
    rows = [{"question": " ".join(f"w{i}" for i in row)} for row in ids]
    write_rows(folder / "rows.jsonl", rows)
    return GRPOConfig(
        model=str(folder / "model"),
        dataset=str(folder / "rows.jsonl"),
        output_dir=str(folder / "ours"),
        verifiers="bench.trainers:odd_words",
        steps=100,
        prompts_per_step=2,
        group_size=8,
        minibatches=1,  # the optimizer's time is that of all its weights, whatever the batch
        micro_batch_size=16,
        rollout_batch_size=16,
        max_new_tokens=response,
        kl_coef=0.001,
        lr=1e-6,
        dtype=dtype,
        zero_stage=1 if dtype == "bfloat16" else 0,
        eval_size=0,
    )


def odd_words(responses: list[str], rows: list[dict]) -> list[float]:
    """A score that differs between random responses: the share of words that end in an odd digit."""
    found = []
    for response in responses:
        words = response.split()
        odd = sum(word[-1] in "13579" for word in words)
        found.append(odd / max(1, len(words)))
    return found


TASKS = (Task("demo", demo), Task("Qwen2-like head", qwen))


class Samples:
    """CPU seconds of each implementation's steps, and of the bare passes of ours."""

    def __init__(self):
        self.steps: dict[str, list[dict]] = {}
        self.passes: dict[str, list[dict]] = {}

    def turn(self, ours: Ours) -> None:
        """A step of ours, with the exact KL or without it in turns, and its passes."""
        exact = ours.number % 2 == 0
        ours.config.kl_every = int(exact)
        name = OURS if exact else LEAN
        self.steps.setdefault(name, []).append(ours.step())
        self.passes.setdefault(name, []).append(ours.needed())


def take_turns(
    ours: Ours,
    task: Task,
    folder: Path,
    wanted: str,
    budget: float,
) -> tuple[Samples, list[dict]]:
    """Steps of every implementation in turns, as many as the time allows; and the rows of those that cannot run."""
    samples, missing = Samples(), []
    ends = time.perf_counter() + budget

    def go_on() -> bool:
        enough = ours.number >= 2 * (WARM_UP + 1)
        return ours.number < ours.config.steps and not (enough and time.perf_counter() > ends)

    def between(taken: dict, lm) -> bool:
        samples.steps.setdefault(TRL, []).append(taken)
        samples.turn(ours)
        return go_on()

    # In TRL's trainer, between its steps; alone where it is not here or not wanted.
    if wanted in ("all", TRL):
        try:
            trainer_peers.run_trl(ours, str(folder / "trl"), between)
            return samples, missing
        except peers.Unavailable as reason:
            row = results.not_run(TRL, reason.status, str(reason), "grpo", task.name)
            missing.append(row)
    samples.turn(ours)
    while go_on():
        samples.turn(ours)
    return samples, missing


def rows_of(task: Task, ours: Ours, samples: Samples) -> list[dict]:
    """A row per implementation: medians in ms, their samples, and what they compare to."""
    rows = []
    for name, steps in samples.steps.items():
        counted = steps[WARM_UP:]
        taken = {}
        for part in PARTS:
            taken[part] = [1e3 * step.get(part, 0.0) for step in counted]
        taken["step"] = [1e3 * sum(step.values()) for step in counted]
        ms = {part: statistics.median(found) for part, found in taken.items()}
        row = {
            "op": "grpo",
            "task": task.name,
            "implementation": name,
            "status": results.OK,
            "note": NOTES[name],
            "version": machine.version("trl") if name == TRL else None,
            "ms": ms,
            "samples_ms": taken,
            "steps_per_cpu_second": 1e3 / ms["step"],
        }
        if name in samples.passes:
            passes = samples.passes[name][WARM_UP:]
            least = {}
            for part in NEEDED:
                least[part] = statistics.median(1e3 * found[part] for found in passes)
            row["needed_ms"] = least
            row["over_needed"] = {part: ms[part] / least[part] for part in NEEDED}
            row |= checked(ours)
        rows.append(row)

    # Ours first, and what TRL's takes over what each takes.
    rows.sort(key=lambda row: list(NOTES).index(row["implementation"]))
    if TRL in samples.steps:
        for row in rows:
            row["steps_over_trl"] = rows[-1]["ms"]["step"] / row["ms"]["step"]
    return rows


def checked(ours: Ours) -> dict:
    """Status of ours: the bare passes are those of the step, and its first ratio was 1."""
    error = ours.passes_differ()
    limit = 5e-2 if ours.config.dtype == "bfloat16" else 1e-4
    if error <= limit:
        return {"logprob_error": error}
    return {"logprob_error": error, "status": results.FAILED_CHECK, "reason": f"log-probabilities off by {error:.2g}"}


def show(task: Task, rows: list[dict]) -> None:
    """Print the task's table, and below it what did not run."""
    measured = results.measured(rows)
    if measured:
        titles, lines = results.steps(measured)
        cells = [[row["implementation"], *line] for row, line in zip(measured, lines, strict=True)]
        print(f"\n{task.name}: CPU time of a GRPO step")
        print(results.table(["implementation", *titles], cells))
    results.show_missing(rows)
    sys.stdout.flush()


def run_task(task: Task, wanted: str, budget: float) -> list[dict]:
    """The rows of one task; one that cannot be set up here is a row that says why."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            ours = Ours(task.config(Path(folder)))
        except InputError as reason:
            return [results.not_run(OURS, results.CANNOT_RUN, str(reason), "grpo", task.name)]
        samples, missing = take_turns(ours, task, Path(folder), wanted, budget)
        return rows_of(task, ours, samples) + missing


def main(args) -> int:
    """Run the group; 1 where ours is wrong."""
    if args.device != "cpu":
        print("measured in CPU seconds: --device cpu")
        return 0
    with contextlib.suppress(peers.Unavailable):  # its row will say so
        trainer_peers.alone()
    engine.quiet()
    torch.set_num_threads(1)
    print(machine.heading(args.device), flush=True)
    rows = []
    budget = (args.budget or SECONDS) / len(TASKS)
    for task in TASKS:
        found = run_task(task, args.peers, budget)
        show(task, found)
        rows += found
        results.save(args, rows)
    engine.teardown()
    return results.failed(rows)


def command(group: str, words: list[str] | None = None) -> int:
    """The group by its command line."""
    return main(options.arguments(__doc__, group, words))
