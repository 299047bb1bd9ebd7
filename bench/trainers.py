"""A training step of ours beside TRL's, in CPU seconds of one thread: GRPO, SFT and the reward model, three seeds.

    python -m bench --group trainers --device cpu

Seed by seed ours trains first, then TRL's, from the same weights on the rows that ours took; then TRL's with our
functions patched in. Each has a process of its own, so that none holds the memory of another. A row says if the losses
of the first two steps differ, or in GRPO, whose first loss is 0, the starting model's mean log-probability of TRL's
first responses.

`needed` is a lower bound for a phase of GRPO, of the model alone on a step's micro-batches: `rollout` needs the passes
that sample the step's responses token by token, `measure` the forward passes of policy and reference without the exact
KL, `update` a forward and a backward pass with the fused head and -log p as the loss, and the passes of the reference
beside it. Tables have medians of time/need.
"""

import contextlib
import io
import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

import fused_rl.integrations.trl
from bench import machine, peers, results
from bench.repro import ppo_step
from fused_rl.recipes import demo, demo_reward
from fused_rl.trainers import grpo, reward, sft
from fused_rl.trainers.base import engine
from fused_rl.trainers.base.files import write_rows
from fused_rl.trainers.data import encode
from fused_rl.trainers.data.batch import make_batch, pad
from fused_rl.trainers.models.language_model import load_lm
from fused_rl.trainers.models.reward_model import RewardModel
from fused_rl.trainers.policy.policy import Policy
from fused_rl.trainers.rollouts.generate import TransformersSampler
from fused_rl.trainers.rollouts.types import Response, Sample
from fused_rl.trainers.run.parse import parse
from fused_rl.trainers.scorers.load import load_scorers

OURS, LEAN = "fused_rl", "fused_rl --kl_every 0"
WORK = machine.ROOT / "runs" / "bench-trainers"
# The folder that `make test-real` converts, where it is another one.
REAL_MODEL = "FUSED_RL_REAL_MODEL"


def seconds() -> float:
    """CPU seconds of this thread; on a GPU, whose work it awaits, those of the wall."""
    if not torch.cuda.is_available():
        return time.thread_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def timed(taken: Counter, name: str, function: Callable) -> Callable:
    """Return `function`, whose CPU seconds are added to taken[name]."""

    def run(*args, **kwargs):
        began = seconds()
        found = function(*args, **kwargs)
        taken[name] += seconds() - began
        return found

    return run


@dataclass
class Run:
    """What a training did, for another trainer to do the same, and what it took."""

    op: str
    config: object
    rows: list = field(default_factory=list)  # in the order in which they were trained on
    steps: list[dict] = field(default_factory=list)  # CPU seconds of each step's parts
    # CPU seconds that the phases of each step need at least.
    needed: list[dict] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    policy: object = None  # of GRPO, as long as its process keeps it


MODULES = {"sft": sft, "reward": reward, "grpo": grpo}
LOSSES = {"sft": "train/loss", "reward": "train/rm/loss", "grpo": "loss/policy_avg"}
TRAINERS = {"sft": "SFTTrainer", "reward": "RewardTrainer", "grpo": "GRPOTrainer"}


def run_ours(
    op: str, config, *, needs: bool = False, watch: Callable = lambda run, model: None
) -> Run:
    """Train with ours; `needs`: measure what phases need; `watch` is called before the first step and after each."""
    run, module, taken, last = Run(op, config), MODULES[op], Counter(), {}
    train_step, measure, micro_batches = module.train_step, grpo.measure, sft.micro_batches
    rolled_out = timed(taken, "score", Policy.roll_out)

    def noted_step(model, rows, *args, **kwargs):
        if op != "sft":  # whose rows come as micro-batches
            taken.clear()
            last["rows"] = rows
        run.rows += last["rows"]
        run.policy = model
        if not run.steps:
            watch(run, model)
        metrics = timed(taken, "update", train_step)(model, rows, *args, **kwargs)
        run.losses.append(metrics[LOSSES[op]])

        # A part without those inside it.
        taken["update"] -= taken["score"] + taken["measure"] + taken["optimizer"]
        taken["score"] -= taken["rollout"]
        run.steps.append({part: spent for part, spent in taken.items() if spent})
        taken.clear()
        if needs:
            run.needed.append(needed(model, last))
        watch(run, model)
        return metrics

    def noted_measure(policy, batch, parts, *, exact_kl=True, skipped=0):
        last.update(parts=parts, skipped=skipped, exact_kl=exact_kl)
        return measure(policy, batch, parts, exact_kl=exact_kl, skipped=skipped)

    def noted_rollout(*args, **kwargs):
        last["rollout"] = rolled_out(*args, **kwargs)
        return last["rollout"]

    def noted_micro_batches(rows, *args):
        last["rows"] = rows
        return timed(taken, "update", micro_batches)(rows, *args)

    patches = [
        (module, "train_step", noted_step),
        (sft, "micro_batches", noted_micro_batches),
        (Policy, "roll_out", noted_rollout),
        (TransformersSampler, "sample", timed(taken, "rollout", TransformersSampler.sample)),
        (grpo, "measure", timed(taken, "measure", noted_measure)),
        (engine, "optimizer_step", timed(taken, "optimizer", engine.optimizer_step)),
    ]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.ExitStack() as stack:
        for owner, name, function in patches:
            stack.enter_context(mock.patch.object(owner, name, function))
        module.train(config)
    return run


def needed(policy: Policy, last: dict) -> dict[str, float]:
    """CPU seconds that the phases of the last step need at least: see above."""
    lm = policy.model.module.eval()
    prompts = [sample.prompt_ids for sample in last["rollout"].samples]
    responses = [sample.response.ids for sample in last["rollout"].samples]
    found = Counter()
    decode_passes(
        timed(found, "rollout", lm.base), prompts, responses, policy.tokenizer.pad_token_id
    )

    # Forward passes: of the policy where the step ran it, and of the reference, which with the exact KL stands beside
    # the update's pass of what is trained on first.
    inputs = [policy.inputs(last["rollout"].batch.rows(part)) for part in last["parts"]]
    with torch.no_grad():
        for given in inputs[last["skipped"] :]:
            timed(found, "measure", lm)(**given)
        for number, given in enumerate(inputs):
            is_beside = last["exact_kl"] and number < last["skipped"]
            timed(found, "update" if is_beside else "measure", policy.reference.model)(**given)
    lm.train()
    weights = [weight for weight in lm.parameters() if weight.requires_grad]
    began = seconds()
    for given in inputs:
        scored = lm(**given, token_loss=lambda logprobs, _: -logprobs)
        torch.autograd.grad(scored.loss, weights)
    found["update"] += seconds() - began
    return found


@torch.no_grad()
def decode_passes(
    lm, prompts: list[list[int]], responses: list[list[int]], pad_id: int, check=None
) -> None:
    """Run the passes that sample these responses: each distinct prompt once, then token by token.

    Equal prompts are neighbours. `check` is called with the (B, V) logits, (B,) token ids, rows and position of a pass.
    """
    distinct, copies = zip(
        *((prompt, len(list(same))) for prompt, same in itertools.groupby(prompts)), strict=True
    )
    ids = pad(distinct, pad_id, left=True)
    mask = pad([[1] * len(prompt) for prompt in distinct], 0, left=True)
    position = (mask.cumsum(1) - 1).clamp(min=0)
    copies = torch.repeat_interleave(torch.tensor(copies))

    # The prompts, each once; then each response goes on by itself.
    output = lm(
        input_ids=ids, attention_mask=mask, position_ids=position, use_cache=True, logits_to_keep=1
    )
    cache = output.past_key_values
    cache.batch_select_indices(copies)
    logits = output.logits[copies, -1]
    mask = mask[copies]
    lengths = torch.tensor(list(map(len, responses)))
    tokens = pad(responses, pad_id)
    rows = torch.arange(len(responses))

    # A token of each at a time, without those that have ended.
    for step in range(1, tokens.shape[1] + 1):
        if check is not None:
            check(logits, tokens[rows, step - 1], rows, step)
        going = (lengths[rows] > step).nonzero()[:, 0]
        if not len(going):
            break
        if len(going) < len(rows):
            cache.batch_select_indices(going)
            mask, rows = mask[going], rows[going]
        fed = {
            "input_ids": tokens[rows, step - 1][:, None],
            "position_ids": mask.sum(1, keepdim=True),
        }
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        output = lm(**fed, attention_mask=mask, past_key_values=cache, use_cache=True)
        logits = output.logits[:, -1]


def trl_options(op: str, config) -> dict[str, object]:
    """Return our config in TRL's words; where ours is bf16, TRL trains bf16 weights, which is its fastest way."""
    low = config.dtype == "bfloat16"
    same = (
        "warmup_steps",
        "weight_decay",
        "adam_beta2",
        "max_grad_norm",
        "gradient_checkpointing",
        "seed",
    )
    common = {name: getattr(config, name) for name in same} | {
        "learning_rate": config.lr,
        "lr_scheduler_type": config.lr_schedule,
        "bf16": low,
        "model_init_kwargs": {"dtype": "bfloat16"} if low else None,
        "use_cpu": not torch.cuda.is_available(),
        "accelerator_config": {"use_configured_state": True},  # of `prepare`
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    if op == "reward":
        common["center_rewards_coefficient"] = config.centering or None
    if op != "grpo":
        own = {
            "max_steps": config.steps,
            "per_device_train_batch_size": config.batch_size,
            "max_length": None,
        }
        return common | own
    of_update = config.prompts_per_step * config.group_size // config.minibatches
    parts = max(1, of_update // config.micro_batch_size)
    return common | {
        "max_steps": config.steps * config.minibatches,
        "per_device_train_batch_size": of_update // parts,
        "gradient_accumulation_steps": parts,
        "steps_per_generation": config.minibatches * parts,
        "num_iterations": config.epochs,
        "num_generations": config.group_size,
        "max_completion_length": config.max_new_tokens,
        "temperature": config.temperature,
        "beta": config.kl_coef,
        "loss_type": "grpo",
        "shuffle_dataset": False,
    }


def trl_columns(run: Run) -> dict[str, list]:
    """Return the dataset of TRL's trainer: the rows that ours took, as token ids, or as prompts."""
    if run.op == "sft":
        labels = [[-100] * len(row.prompt) + row.completion for row in run.rows]
        return {"input_ids": [row.prompt + row.completion for row in run.rows], "labels": labels}
    if run.op == "reward":
        rejected = [sum(pair.rejected, []) for pair in run.rows]
        return {"chosen_ids": [sum(pair.chosen, []) for pair in run.rows], "rejected_ids": rejected}
    texts = [prompt.row[run.config.prompt_column or "question"] for prompt in run.rows]
    return {"prompt": texts, "number": list(range(len(texts)))}


def reward_function(run: Run, tokenizer) -> Callable:
    """Return our scorers as TRL calls a reward function."""
    scorers = load_scorers(run.config)
    stop_ids = encode.saved_stop_ids(run.config.model, None, tokenizer)

    def reward_of(prompts, completions, completion_ids, number, **_):
        samples = []
        for text, ids, i in zip(completions, completion_ids, number, strict=True):
            prompt = run.rows[i]
            finish = "stop" if ids[-1] in stop_ids else "length"
            samples.append(Sample(prompt.row, prompt.ids, Response(ids, finish), text))
        columns = [scorer(samples) for scorer in scorers]
        return [sum(scores) for scores in zip(*columns, strict=True)]

    return reward_of


def run_trl(ours: Run, folder: Path, watch: Callable = lambda run, model: None) -> Run:
    """Train with TRL what `ours` has trained; `watch` as above; raises peers.Unavailable if TRL is not installed."""
    trl = peers.import_peer("trl")
    import accelerate
    import datasets
    import transformers

    accelerate.state.AcceleratorState._shared_state = {}  # it would keep the precision of the last trainer
    run = Run(ours.op, ours.config, policy=ours.policy)
    updates = run.config.minibatches if run.op == "grpo" else 1  # steps of TRL's to one of ours

    class Clock(transformers.TrainerCallback):
        def on_train_begin(self, *_, model, **__):
            watch(run, model)
            self.began = seconds()

        def on_step_end(self, _, state, control, *, model, **__):
            if state.global_step % updates == 0:
                run.steps.append({"step": seconds() - self.began})
                self.on_train_begin(model=model)

    name = TRAINERS[run.op]
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.config.model, padding_side="left")
    trainer = getattr(trl, name)(
        model=run.config.model,
        args=getattr(trl, name.replace("Trainer", "Config"))(
            str(folder), **trl_options(run.op, run.config)
        ),
        train_dataset=datasets.Dataset.from_dict(trl_columns(ours)),
        processing_class=tokenizer,
        callbacks=[Clock()],
        **({"reward_funcs": reward_function(ours, tokenizer)} if run.op == "grpo" else {}),
    )
    trainer.remove_callback(transformers.PrinterCallback)

    # What it makes of the first rows.
    method = "_get_per_token_logps_and_entropies" if run.op == "grpo" else "compute_loss"
    original = getattr(trainer, method)

    def noted(*args, **kwargs):
        found = original(*args, **kwargs)
        if len(run.losses) < 2:
            run.losses.append((args[1:4], found[0].detach()) if run.op == "grpo" else found.item())
        return found

    setattr(trainer, method, noted)
    trainer.train()
    return run


@torch.no_grad()
def compared(ours: Run, theirs: Run) -> dict:
    """Return by how much TRL's first figures differ from ours, with a status where that is too much."""
    if ours.op == "grpo":  # the first loss is 0, whatever the log-probabilities are
        (ids, mask, length), logprobs = theirs.losses[0]
        mask = mask.bool()
        prompts = [
            row[on].tolist() for row, on in zip(ids[:, :-length], mask[:, :-length], strict=True)
        ]
        responses = [
            row[on].tolist() for row, on in zip(ids[:, -length:], mask[:, -length:], strict=True)
        ]
        batch = make_batch(prompts, responses, 0, "cpu")
        start = load_lm(ours.config, torch.device("cpu"), trainable=False)
        given = batch.inputs(None) | {"temperature": ours.config.temperature}
        mine = start.score(**given).logprobs[batch.response_mask]
        what, pairs = (
            "mean log-probability",
            [(mine.mean(), logprobs[mask[:, -length:]].float().mean())],
        )
    else:
        what, pairs = "loss", zip(ours.losses, theirs.losses, strict=False)
    difference = torch.tensor([abs(float(mine - other)) for mine, other in pairs]).max().item()
    if difference <= (2e-2 if ours.config.dtype == "bfloat16" else 1e-4):
        return {"status": results.OK, "difference": difference}
    return {
        "status": results.WRONG,
        "reason": f"{what} off by {difference:.2g}",
        "difference": difference,
    }


def demo_grpo(folder: Path, seed: int):
    """Return the recipe of `make demo` after its warm start, which is kept for the next time."""
    return demo.grpo_config(ppo_step.warm_start(WORK / f"demo-{seed}", seed), seed)


def demo_sft(folder: Path, seed: int):
    """Return the recipe of the demo's warm start."""
    demo.prepare(folder, seed)
    return demo.sft_config(folder, seed)


def demo_rewards(folder: Path, seed: int):
    """Return the recipe of the reward demo, with a head from which both trainers start."""
    demo_reward.prepare(folder, seed)
    headed = RewardModel.from_pretrained(folder / "init")
    headed.classifier.config.pad_token_id = 0
    headed.save_pretrained(folder / "headed")
    encode.load_tokenizer(str(folder / "init")).save_pretrained(folder / "headed")
    paths = {"model": folder / "headed", "dataset": folder / "data" / "train.jsonl"}
    paths |= {"eval_dataset": folder / "data" / "eval.jsonl", "output_dir": folder}
    config = parse(reward.RewardConfig, demo.arguments("demo_reward.yaml", seed, paths))
    return config.replace(normalize_pairs=0)  # TRL does not normalise scores


def large_grpo(folder: Path, seed: int, vocabulary=151_936, hidden_size=896, dtype="bfloat16"):
    """Return GRPO of two random layers, Qwen2.5-0.5B's width and vocabulary, on prompts of random words."""
    heads = {
        "num_attention_heads": hidden_size // 32,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": 2,
    }
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": hidden_size,
        "max_position_embeddings": 64,
        **heads,
    }
    model = WORK / f"large-{vocabulary}"
    if not (model / "tokenizer.json").exists():
        save_model(model, sizes, words=vocabulary)
    ids = torch.randint(
        2, vocabulary, (64, 48), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    return grpo_of_questions(
        folder,
        seed,
        model,
        [" ".join(f"w{i}" for i in row) for row in ids],
        verifiers="bench.trainers:odd_words",
        prompts_per_step=1,
        micro_batch_size=8,
        max_new_tokens=8,
        kl_coef=0.001,
        dtype=dtype,
        zero_stage=1 if dtype == "bfloat16" else 0,
    )


QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Explain in a few sentences why the sky is blue.",
    "Write a short story about a dog that learns to swim.",
    "How do I make a cup of tea?",
)


def real_grpo(folder: Path, seed: int):
    """Return GRPO of SmolLM2-135M-Instruct, 4 prompts of 4 responses of up to 64 tokens in fp32."""
    model = Path(os.environ.get(REAL_MODEL, machine.ROOT / ".venv-real" / "model"))
    if not model.is_dir():
        raise peers.Unavailable(f"no model in {model}: make test-real, or set {REAL_MODEL}")
    return grpo_of_questions(
        folder,
        seed,
        model,
        [QUESTIONS[(seed + i) % len(QUESTIONS)] for i in range(64)],
        raw_prompt=True,  # as TRL takes a text
        verifiers="bench.trainers:odd_letters",
        prompts_per_step=4,
        group_size=4,
        micro_batch_size=16,
        max_new_tokens=64,
        kl_coef=0.04,
        dtype="float32",
    )


def grpo_of_questions(folder: Path, seed: int, model: Path, questions: list[str], **options):
    """Return GRPO of a model on these questions, one update a step, without held-out rows."""
    rows = [{"question": question} for question in questions]
    return grpo.GRPOConfig(
        model=str(model),
        dataset=write_rows(folder / "rows.jsonl", rows),
        output_dir=str(folder),
        seed=seed,
        minibatches=1,
        eval_size=0,
        **options,
    )


def odd_letters(response: str, row: dict) -> float:
    """Return the share of characters with odd codes, so that no group has equal rewards."""
    return sum(ord(letter) % 2 for letter in response) / max(1, len(response))


def save_model(folder: Path, sizes: dict, words: int) -> None:
    """Write a Llama of these sizes with random weights, and a tokenizer of the words w2, w3, …"""
    import tokenizers
    import transformers

    known = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, words)}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="<pad>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.set_seed(1)
    special = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **special)).save_pretrained(
        folder
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>"
    )
    fast.save_pretrained(folder)


def odd_words(response: str, row: dict) -> float:
    """Return the share of words that end in an odd digit, which differs between random responses."""
    words = response.split()
    return sum(word[-1] in "13579" for word in words) / max(1, len(words))


class Task(NamedTuple):
    """What is trained."""

    make: Callable  # a config and its files for a seed
    steps: int  # the first touches memory: it does not count
    gigabytes: float  # that must be free


TASKS = {
    ("grpo", "demo"): Task(demo_grpo, 8, 2),
    ("sft", "demo"): Task(demo_sft, 8, 2),
    ("reward", "demo"): Task(demo_rewards, 8, 2),
    ("grpo", "large head"): Task(large_grpo, 3, 10),
    ("grpo", "real model"): Task(real_grpo, 3, 10),
}


def process() -> ProcessPoolExecutor:
    """Return a process that begins with the first call that it is given."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=prepare)


def alone(function: Callable, *args, **kwargs) -> Run:
    """Train in a process of its own, which ends then: an engine's memory would stay in it."""
    with process() as one:
        return one.submit(function, *args, **kwargs).result()


def run_without_engine(*args, **kwargs) -> Run:
    """Train with ours for another process."""
    run = run_ours(*args, **kwargs)
    run.policy = None
    return run


def run_patched(ours: Run, folder: Path) -> Run:
    """Train with TRL and our functions in it."""
    with fused_rl.integrations.trl.patch():
        return run_trl(ours, folder)


def run_task(
    op: str, name: str, task: Task, seeds: list[int], wanted: str = "all"
) -> Iterator[list[dict]]:
    """Yield the rows of every trainer with those of what did not run, after each seed."""
    if machine.free_bytes() < 1e9 * task.gigabytes:
        reason = f"needs {task.gigabytes} GB of memory, of which {machine.free_bytes() / 1e9:.1f} are free"
        yield [results.not_run(OURS, results.CANNOT_RUN, reason, op, name)]
        return
    kinds = {OURS: {"kl_every": 1}, LEAN: {"kl_every": 0}} if op == "grpo" else {OURS: {}}
    peer = f"TRL {TRAINERS[op]}"
    theirs = {peer: run_trl, f"{peer}, patched": run_patched}
    runs, missing, checks = {}, {}, []
    with process() as beside, tempfile.TemporaryDirectory() as place:
        for seed in seeds:
            folder = Path(place) / str(seed)
            folder.mkdir()
            try:
                config = beside.submit(task.make, folder, seed).result()
            except peers.Unavailable as reason:
                yield [results.not_run(OURS, reason.status, str(reason), op, name)]
                return
            config = config.replace(steps=task.steps, warmup_steps=0)
            # The last of ours is what TRL's trainers repeat.
            ours, order = None, [*kinds] + ([] if wanted == "none" else [*theirs])
            for implementation in order:
                if implementation in missing:
                    continue
                given = folder / implementation
                try:
                    if implementation in kinds:
                        changed = config.replace(**kinds[implementation], output_dir=str(given))
                        needs = op == "grpo"
                        found = ours = alone(run_without_engine, op, changed, needs=needs)
                    elif ours is not None:
                        found = alone(theirs[implementation], ours, given)
                        if implementation == peer:
                            checks.append(beside.submit(compared, ours, found).result())
                    else:
                        continue
                except peers.Unavailable as reason:
                    failure = reason.status, str(reason)
                except BrokenProcessPool:
                    failure = results.OUT_OF_MEMORY, "its process was killed"
                else:
                    runs.setdefault(implementation, []).append(found)
                    continue
                missing[implementation] = results.not_run(implementation, *failure, op, name)
            rows = []
            for implementation, found in runs.items():
                row = {"op": op, "task": name, "implementation": implementation}
                row["status"] = results.OK
                if implementation == peer:
                    row |= max(checks, key=lambda check: check["status"] == results.WRONG)
                rows.append(row | figures(found, runs.get(peer, [])))
            yield rows + [*missing.values()]


def figures(found: list[Run], theirs: list[Run]) -> dict:
    """Return medians in ms over the steps of all seeds, and how many fit into a step of TRL's, seed by seed."""
    counted = list(itertools.chain.from_iterable(run.steps[1:] for run in found))
    samples = {part: [1e3 * step[part] for step in counted] for part in counted[0]}
    samples["step"] = [1e3 * sum(step.values()) for step in counted]
    ms = {part: statistics.median(values) for part, values in samples.items()}
    over = [
        median_step(other) / median_step(mine) for mine, other in zip(found, theirs, strict=False)
    ]
    row = {"ms": ms, "samples_ms": samples, "steps_over_trl": over}
    if found[0].needed:
        bare = list(itertools.chain.from_iterable(run.needed[1:] for run in found))
        row["needed_ms"], row["over_needed"] = {}, {}
        for part in bare[0]:
            row["needed_ms"][part] = 1e3 * statistics.median(step[part] for step in bare)
            pairs = zip(counted, bare, strict=True)
            row["over_needed"][part] = statistics.median(
                step[part] / least[part] for step, least in pairs
            )
    return row


def median_step(run: Run) -> float:
    """CPU seconds of a step."""
    return statistics.median(sum(step.values()) for step in run.steps[1:])


def prepare() -> None:
    """Let TRL know of no other process: it would wrap its model for several where a process group exists."""
    with contextlib.suppress(peers.Unavailable):  # its row says so
        peers.import_peer("accelerate").PartialState(cpu=not torch.cuda.is_available())
    engine.silence_libraries()
    torch.set_num_threads(1)


def command(args) -> int:
    """Measure every task on the CPU, and print; 1 where ours fails."""
    rows = []
    prepare()
    print(machine.heading("cpu"), flush=True)
    for (op, name), task in TASKS.items():
        task = task._replace(steps=args.steps or task.steps)
        for found in run_task(op, name, task, args.seeds, args.peers):
            results.save(args, rows + found)  # what was measured stays, whatever comes
        measured = results.measured(found)
        if measured:
            print(f"\n{op}, {name}: CPU time of a step\n{results.table(*results.steps(measured))}")
        results.show_missing(found)
        rows += found
    return results.failed(rows)
