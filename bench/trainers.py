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
EVERY = 10  # steps between held-out evaluations
WORK = machine.ROOT / "runs" / "bench-trainers"
OURS, LEAN, TRL = "fused_rl", "fused_rl --kl_every 0", trainer_peers.NAME
NOTES = {OURS: "with the exact KL", LEAN: "without it, as TRL", TRL: ""}


class Task(NamedTuple):
    """A model, rows and hyperparameters."""

    name: str
    config: Callable[[Path], GRPOConfig]
    """Makes the files in a folder, and the config that names them."""
    learns: bool
    """Whether held-out accuracy says anything."""


def demo(folder: Path, seed: int = 1) -> GRPOConfig:
    """The demo's task; its warm start is kept in runs/bench-trainers for the next time."""
    from recipes import demo as recipe

    kept = WORK / f"demo-{seed}"
    if not (kept / "sft" / "model" / "config.json").exists():
        recipe.warm_start(kept, str(seed))
    config = recipe.grpo_config(kept, str(seed))
    config.output_dir = str(folder / "ours")
    return config


def word_tokenizer(vocabulary: int):
    """Token i is the word `wi`; pad is 0 and EOS 1."""
    import tokenizers
    import transformers

    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, vocabulary)}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")


def qwen(folder: Path, *, vocabulary=151_936, hidden=896, layers=4, prompt=48, response=8, dtype="bfloat16"):
    """A Llama of Qwen2.5-0.5B's widths and vocabulary, 4 layers of random weights, on random words."""
    import transformers

    transformers.set_seed(1)
    sizes = {"vocab_size": vocabulary, "hidden_size": hidden, "num_hidden_layers": layers}
    sizes |= {"intermediate_size": hidden * 38 // 7, "num_attention_heads": hidden // 64, "num_key_value_heads": 2}
    special = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": True}
    lm = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **special))
    lm.to(getattr(torch, dtype)).save_pretrained(folder / "model")
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
        found.append(sum(word[-1] in "13579" for word in words) / max(1, len(words)))
    return found


TASKS = (Task("demo", demo, True), Task("Qwen2-like head", qwen, False))


class Samples:
    """CPU seconds of each implementation's steps, and the held-out accuracy after some of them."""

    def __init__(self):
        self.of: dict[str, list[dict]] = {}
        self.curves: dict[str, list[list[float]]] = {}

    def add(self, name: str, taken: dict[str, float]) -> None:
        self.of.setdefault(name, []).append(taken)

    def counted(self, name: str) -> list[dict]:
        """The steps after the warm-up."""
        return self.of[name][WARM_UP:]

    def evaluated(self, name: str, step: int, accuracy: float) -> None:
        """Keep the step, the CPU seconds of the steps so far, and the accuracy."""
        names = (OURS, LEAN) if name == OURS else (name,)
        steps = [taken for each in names for taken in self.of.get(each, [])]
        spent = sum(sum(taken.values()) for taken in steps)
        self.curves.setdefault(name, []).append([step, spent, accuracy])


def needed_by(name: str) -> str:
    """What the samples of the bare passes are called."""
    return f"passes of {name}"


def take_turns(ours: Ours, task: Task, folder: Path, wanted: str, budget: float) -> tuple[Samples, list[dict]]:
    """Steps of every implementation in turns, as many as the time allows; and the rows of those that cannot run."""
    samples, ends = Samples(), time.perf_counter() + budget
    learns = task.learns and bool(ours.held_out)

    def turn() -> bool:
        """A step of ours, with the exact KL or without it in turns; whether there is time for more."""
        exact = ours.number % 2 == 0
        ours.config.kl_every = int(exact)
        name = OURS if exact else LEAN
        samples.add(name, ours.step())
        samples.add(needed_by(name), ours.needed())
        if learns and ours.number % EVERY == 0:
            samples.evaluated(OURS, ours.number, ours.accuracy())
        enough = ours.number >= 2 * (WARM_UP + 1)
        return ours.number < ours.config.steps and not (enough and time.perf_counter() > ends)

    def between(taken: dict, lm) -> bool:
        samples.add(TRL, taken)
        if learns and len(samples.of[TRL]) % EVERY == 0:
            samples.evaluated(TRL, len(samples.of[TRL]), ours.accuracy(lm))
        return turn()

    if learns:
        start = ours.accuracy()
        samples.evaluated(OURS, 0, start)
    if wanted not in ("all", TRL):
        while turn():
            pass
        return samples, []
    try:
        if learns:
            samples.evaluated(TRL, 0, start)
        trainer_peers.run_trl(ours, str(folder / "trl"), between)
    except peers.Unavailable as reason:
        missing = results.not_run(TRL, reason.status, str(reason), "grpo", task.name)
        samples.curves.pop(TRL, None)
        while turn():
            pass
        return samples, [missing]
    return samples, []


def rows_of(task: Task, ours: Ours, samples: Samples) -> list[dict]:
    """A row per implementation: medians in ms, their samples, and what they compare to."""
    rows, whole = [], {}
    for name in (OURS, LEAN, TRL):
        if name not in samples.of:
            continue
        taken = samples.counted(name)
        columns = {part: [1e3 * step.get(part, 0.0) for step in taken] for part in PARTS}
        columns["step"] = [1e3 * sum(step.values()) for step in taken]
        ms = {part: statistics.median(found) for part, found in columns.items()}
        whole[name] = ms["step"]
        row = {"op": "grpo", "task": task.name, "implementation": name, "status": results.OK, "note": NOTES[name]}
        row |= {"version": machine.version("trl") if name == TRL else None, "ms": ms, "samples_ms": columns}
        row["steps_per_cpu_second"] = 1e3 / ms["step"]
        if needed_by(name) in samples.of:
            needed = samples.counted(needed_by(name))
            least = {part: statistics.median(1e3 * passes[part] for passes in needed) for part in NEEDED}
            row |= {"needed_ms": least, "over_needed": {part: ms[part] / least[part] for part in NEEDED}}
        if name in samples.curves:
            row["accuracy"] = samples.curves[name]
        rows.append(row)
    for row in rows:
        if TRL in whole:
            row["steps_over_trl"] = whole[TRL] / whole[row["implementation"]]
    for row in rows[:2]:
        row |= checked(ours)
    return rows


def checked(ours: Ours) -> dict:
    """Status of ours: the bare passes are those of the step, and its first ratio was 1."""
    error = ours.passes_differ()
    limit = 5e-2 if ours.config.dtype == "bfloat16" else 1e-4
    if error <= limit:
        return {"logprob_error": error}
    return {"logprob_error": error, "status": results.FAILED_CHECK, "reason": f"log-probabilities off by {error:.2g}"}


def show(task: Task, rows: list[dict]) -> None:
    """Print the task's table, and below it what did not run and how accuracy went."""
    measured = results.measured(rows)
    lines = []
    for row in measured:
        over = row.get("over_needed", {})
        cells = [row["ms"][part] for part in (*PARTS, "step")]
        cells += [over.get(part) for part in NEEDED]
        lines.append([row["implementation"], *cells, row.get("steps_over_trl"), len(row["samples_ms"]["step"])])
    columns = ["implementation", *[f"{part} ms" for part in (*PARTS, "step")], *[f"{part}/needed" for part in NEEDED]]
    print(f"\n{task.name}: CPU time of a GRPO step")
    print(results.table([*columns, "steps/TRL's", "runs"], lines))
    for row in measured:
        if "accuracy" in row:
            points = [f"{step}: {accuracy:.3f}" for step, _, accuracy in row["accuracy"]]
            print(f"  held-out accuracy of {row['implementation']} by steps: {', '.join(points)}")
    for row in results.missing(rows):
        print(f"  not run: {results.name_of(row)}: {row['reason']}")
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
    rows, budget = [], (args.budget or SECONDS) / len(TASKS)
    for task in TASKS:
        found = run_task(task, args.peers, budget)
        show(task, found)
        rows += found
        results.save(args, rows)
    engine.teardown()
    return int(any(row["status"] in results.BROKEN for row in rows if results.ours(row)))


def command(group: str, words: list[str] | None = None) -> int:
    """The group by its command line."""
    return main(options.arguments(__doc__, group, words))
