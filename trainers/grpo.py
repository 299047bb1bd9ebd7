"""GRPO: sample a group of responses per prompt, score them with verifiers, prefer those above their group's mean.

    fused-rl grpo --config recipes/demo_grpo.yaml
    fused-rl grpo --model Qwen/Qwen2.5-0.5B-Instruct --dataset openai/gsm8k --output_dir runs/gsm8k

The presets (grpo, dr_grpo, bnpo, dapo) are rows of `fused_rl.PRESETS`: they choose clipping, aggregation and KL term.
Left out: an inference server, several turns, tools, dynamic sampling (dapo's refill of groups without a signal).
"""

import contextlib
import math
import time
from dataclasses import dataclass
from typing import Literal

import torch

import fused_rl
from fused_rl.trainers import checkpoint, cli, data, engine, models
from fused_rl.trainers.metrics import Logger
from fused_rl.trainers.rollout import Batch, Rollout, Run, roll_out, rollout_metrics
from fused_rl.trainers.verifiers import answer_of, load_verifier

COLUMNS = {
    "reward": "reward",
    "KL": "objective/kl_exact",
    "entropy": "policy/entropy_avg",
    "tokens/s": "perf/tokens_per_second",
    "held-out": "eval/accuracy_greedy",
}
CURVES = {
    "reward (mean of a step)": ["reward"],
    "held-out accuracy": ["eval/accuracy_greedy", "eval/accuracy_sampled", "eval/pass_at_k"],
    "KL to the reference (nats per response)": ["objective/kl1_avg", "objective/kl_exact"],
    "entropy (nats per token)": ["policy/entropy_avg"],
}


@dataclass
class GRPOConfig(cli.RunConfig):
    """Group-relative policy optimisation of a causal language model on problems whose answers can be verified."""

    prompt_column: str | None = None
    """Text or messages; None takes prompt, messages or question, whichever is there."""
    answer_column: str | None = None
    """Ground truth for the verifiers; None takes ground_truth or answer. Of `... #### 42` the part after the marks."""
    verifiers: str = "math"
    """Comma-separated: math, reasoning_gym, reasoning_gym:<dataset>, module:function. The reward is their sum."""
    prompts_per_step: int = 32
    """Prompts per rollout, over all ranks."""
    group_size: int = 8
    """Responses per prompt."""
    minibatches: int = 2
    """Optimizer updates per pass over a rollout."""
    epochs: int = 1
    """Passes over a rollout."""
    max_new_tokens: int = 256
    """Longer responses are cut; they are scored as they are."""
    temperature: float = 1.0
    """Of sampling, and of every log-probability in the loss."""
    rollout_batch_size: int = 64
    """Responses generated together."""
    preset: str = "grpo"
    """A row of fused_rl.PRESETS."""
    clip_low: float | None = None
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]; None is the preset's."""
    clip_high: float | None = None
    """See clip_low."""
    kl_coef: float = 0.0
    """Weight of the KL to the starting model in the loss; it is measured in any case."""
    kl_estimator: Literal["k1", "k2", "k3", "k4", "rk3", "k1+", "k3+"] = "rk3"
    """Of the KL in the loss; k1 does not hold the policy (its expected gradient is zero)."""
    normalize_advantages: bool | None = None
    """Divide by the group's standard deviation; None: as the preset's paper does (all but dr_grpo)."""
    eval_samples: int = 4
    """Sampled responses per held-out problem: the k of pass@k."""
    show_samples: int = 4
    """Responses shown as a table at each evaluation."""


def arithmetic(config: GRPOConfig, world: int) -> dict[str, object]:
    """How the batch divides; raises on what does not."""
    cli.check_positive(config, "steps", "prompts_per_step", "minibatches", "epochs", "micro_batch_size")
    cli.check_positive(config, "max_new_tokens", "temperature", "rollout_batch_size", "eval_samples")
    if config.preset not in fused_rl.PRESETS:
        raise cli.InputError(f"preset={config.preset!r} is not one of {sorted(fused_rl.PRESETS)}")
    if config.group_size < 2:
        raise cli.InputError(f"group_size={config.group_size}: a response needs others to be compared with; at least 2")
    if config.prompts_per_step % world:
        raise cli.InputError(f"prompts_per_step={config.prompts_per_step} does not divide over {world} processes")
    responses = config.prompts_per_step * config.group_size
    local = responses // world
    if local % config.minibatches:
        raise cli.InputError(f"minibatches={config.minibatches} does not divide the {local} responses of each process")
    minibatch = local // config.minibatches
    return {
        "processes": world,
        "responses per step": f"{responses} = {config.prompts_per_step} prompts x {config.group_size}",
        "responses per process and step": local,
        "responses per process and minibatch": minibatch,
        "micro-batches per process and minibatch": f"{math.ceil(minibatch / config.micro_batch_size)} of at most "
        f"{config.micro_batch_size}",
        "optimizer updates per step": config.minibatches * config.epochs,
        "optimizer updates in the run": config.steps * config.minibatches * config.epochs,
        "responses in the run": config.steps * responses,
    }


@torch.no_grad()
def measure(run: Run, batch: Batch, parts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Log-probabilities of the policy and the reference, entropy and exact KL of `batch`, (B, T - 1), 0 where masked.

    `parts` are the micro-batches of the first pass: the same tensors give the same bits, so its first ratio is 1.
    """
    out = {k: torch.zeros(batch.response_mask.shape, device=run.device) for k in ("old", "ref", "entropy", "kl")}
    temperature = run.config.temperature
    for index in parts:
        part = batch.rows(index)
        policy, logits = run.model(part.input_ids, part.response_mask, temperature, want_logits=True)
        adapters_off = run.model.module.lm.disable_adapter() if run.reference is None else contextlib.nullcontext()
        with adapters_off:
            reference, ref_logits = (run.reference or run.model)(
                part.input_ids, part.response_mask, temperature, want_logits=True
            )
        kl = torch.zeros_like(policy.logprobs)
        kl[part.response_mask] = fused_rl.token_kl(logits, ref_logits, temperature=temperature)
        for name, values in zip(out, (policy.logprobs, reference.logprobs, policy.entropy, kl), strict=True):
            out[name][index, : values.shape[1]] = values
    return out


def loss_options(config: GRPOConfig) -> dict[str, object]:
    """What the config says about the loss, as `fused_rl.policy_loss` names it."""
    clips = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    options = {"preset": config.preset, "kl_coef": config.kl_coef, "kl_estimator": config.kl_estimator}
    return options | {k: v for k, v in clips.items() if v is not None}


def update(run: Run, rollout: Rollout, advantages: torch.Tensor) -> dict[str, float]:
    """All minibatches of all epochs on one rollout; returns metrics averaged over them and summed over ranks."""
    config, batch = run.config, rollout.batch
    count, size = len(rollout.responses), len(rollout.responses) // config.minibatches
    shuffles = [torch.randperm(count).split(size) for _ in range(config.epochs)]
    minibatches = [[part.to(run.device) for part in m.split(config.micro_batch_size)] for s in shuffles for m in s]
    measured = measure(run, batch, [part for m in minibatches[: config.minibatches] for part in m])
    run.model.train()
    history = []
    for parts in minibatches:
        num_tokens = engine.global_sum(sum(batch.response_mask[part].sum() for part in parts)).item()
        sums = []
        for index in parts:
            part = batch.rows(index)
            width = part.response_mask.shape[1]
            policy = run.model(part.input_ids, part.response_mask, config.temperature)
            loss, metrics = fused_rl.policy_loss(
                policy.logprobs,
                measured["old"][index, :width],
                advantages[index],
                part.response_mask,
                num_tokens=num_tokens,
                num_sequences=size * engine.world_size(),
                max_length=config.max_new_tokens,
                ref_logprobs=measured["ref"][index, :width],
                entropy=policy.entropy,
                **loss_options(config),
            )
            run.model.backward(loss * engine.world_size())
            beyond = (policy.logprobs.detach() - measured["old"][index, :width]).double().expm1()  # 0 where masked
            metrics |= {"val/ratio": beyond.sum() / num_tokens, "val/ratio_var": beyond.square().sum() / num_tokens}
            sums.append(torch.stack([m.double() for m in metrics.values()]))
        run.model.step()
        total = engine.global_sum(torch.stack(sums).sum(0))
        history.append(dict(zip(metrics, total.tolist(), strict=True)) | engine.optimizer_metrics(run.model))
        history[-1]["val/ratio_var"] -= history[-1]["val/ratio"] ** 2  # about 0 so far: moments of the ratio less 1
        history[-1]["val/ratio"] += 1
    warn_if_off_policy(config, history[0]["val/ratio"], engine.torch_dtype(config))
    means = {k: sum(h[k] for h in history) / len(history) for k in history[0]}
    sums = engine.global_sum(torch.stack([measured["kl"].sum(), -measured["old"].sum()])) / (
        count * engine.world_size()
    )
    return means | {"lr": history[-1]["lr"], "objective/kl_exact": sums[0].item(), "objective/entropy": sums[1].item()}


def warn_if_off_policy(config: GRPOConfig, ratio: float, dtype: torch.dtype) -> None:
    """The first minibatch is on-policy: its ratio is 1, or log-probabilities are not those of the sampling policy."""
    tolerance = 5e-2 if dtype == torch.bfloat16 else 1e-6
    if not abs(ratio - 1) <= tolerance and engine.rank() == 0:
        print(
            f"warning: the first minibatch's mean ratio is {ratio:.7g}, not 1 within {tolerance:g}: the forward of "
            "the update does not repeat the one before it (dropout? a non-deterministic kernel?), so clipping and "
            "advantages act on the wrong ratios",
            flush=True,
        )


@torch.no_grad()
def evaluate(run: Run, prompts: list[tuple[list[int], dict]]) -> tuple[dict[str, float], list[dict]]:
    """Greedy and sampled accuracy on held-out problems, and a few responses; leaves the random state as it was."""
    config = run.config
    with torch.random.fork_rng():
        torch.manual_seed(config.seed + engine.rank())
        greedy = roll_out(run, prompts, 1, 0.0)
        sampled = roll_out(run, prompts, config.eval_samples, config.temperature)
    measured = measure(run, sampled.batch, list(torch.arange(len(sampled.responses)).split(config.micro_batch_size)))
    right = (sampled.rewards >= len(run.verifiers)).float().view(-1, config.eval_samples)
    count = len(prompts)
    local = [
        (greedy.rewards >= len(run.verifiers)).float().sum() / count,
        right.sum() / right.numel(),
        right.amax(1).sum() / count,
        measured["kl"].sum().cpu() / len(sampled.responses),
        measured["entropy"].sum().cpu(),
        sampled.batch.response_mask.sum().cpu(),
    ]
    totals = engine.global_sum(torch.stack(local))
    names = ("eval/accuracy_greedy", "eval/accuracy_sampled", "eval/pass_at_k", "eval/kl_exact")
    metrics = dict(zip(names, (totals[:4] / engine.world_size()).tolist(), strict=True))
    metrics["eval/entropy"] = (totals[4] / totals[5]).item()
    samples = [
        {
            "prompt": run.tokenizer.decode(prompts[i][0]),
            "response": run.tokenizer.decode(greedy.responses[i]),
            "reward": greedy.rewards[i].item(),
        }
        for i in range(min(config.show_samples, count))
    ]
    return metrics, samples


def prompts_of(config: GRPOConfig, rows: data.Rows, encoder: data.Encoder) -> list[tuple[list[int], dict]]:
    """(prompt ids, row) of every row whose prompt is short enough."""
    prompts = []
    for i, row in enumerate(rows.rows):
        row = {**row, "__where__": rows.where(i)}
        if config.verifiers.startswith(("math", "reasoning_gym")):
            answer_of(row, config.answer_column)  # a row without it must not stop the run hours later
        prompts.append((encoder.prompt(rows, i, config.prompt_column), row))
    kept = [p for p in prompts if len(p[0]) <= config.max_prompt_length]
    if len(kept) < len(prompts) and engine.rank() == 0:
        print(f"{rows.source}: dropped {len(prompts) - len(kept)} of {len(prompts)} prompts over max_prompt_length")
    return kept


def prepare(config: GRPOConfig, device: torch.device) -> tuple[Run, list, list]:
    """Models, data and verifiers: the run, the training prompts, and this rank's held-out prompts."""
    tokenizer = data.load_tokenizer(config.model)
    encoder = data.Encoder(tokenizer, raw_prompt=config.raw_prompt, system_prompt=config.system_prompt)
    prompts, held_out = (prompts_of(config, rows, encoder) for rows in data.load_train_eval(config))
    even = len(held_out) // engine.world_size() * engine.world_size()  # ranks must call `generate` equally often
    lm = models.load_lm(config, device)
    reference = None
    if not config.lora_rank:
        reference = engine.initialize_frozen(models.load_lm(config, device, trainable=False), config)
    stops = data.stop_ids(tokenizer, lm.base.saved_generation_config)
    verifiers = {name: load_verifier(name, config.answer_column) for name in config.verifiers.split(",")}
    updates = config.steps * config.minibatches * config.epochs
    run = Run(config, engine.initialize(lm, config, updates), reference, tokenizer, stops, verifiers, device)
    return run, prompts, held_out[engine.rank() : even : engine.world_size()]


def train_step(run: Run, prompts: list[tuple[list[int], dict]], step: int) -> dict[str, float]:
    """Roll out, score, update; returns the step's metrics."""
    config, began = run.config, time.monotonic()
    rollout = roll_out(run, prompts, config.group_size, config.temperature)
    normalize = config.preset != "dr_grpo" if config.normalize_advantages is None else config.normalize_advantages
    advantages = fused_rl.group_advantages(rollout.rewards, config.group_size, normalize=normalize).to(run.device)
    sampled = time.monotonic()
    metrics = update(run, rollout, advantages)
    ended = time.monotonic()
    metrics |= rollout_metrics(config, rollout, step) | {"time/train": ended - sampled}
    responses = metrics["completions/mean_length"] * config.prompts_per_step * config.group_size
    penalty = -config.kl_coef * metrics["objective/kl1_avg"]
    return metrics | {
        "perf/tokens_per_second": responses / (ended - began),
        "objective/kl_coef": config.kl_coef,
        "objective/non_score_reward": penalty,
        "objective/rlhf_reward": metrics["reward"] + penalty,
    }


def train(config: GRPOConfig) -> str:
    """Run the whole training; returns the folder of the trained model."""
    device = engine.setup(config.seed)
    arithmetic(config, engine.world_size())
    folder = checkpoint.open_run(config)
    run, prompts, held_out = prepare(config, device)
    sampler = data.Sampler(len(prompts), config.prompts_per_step, config.seed)
    start = checkpoint.resume(run.model, folder, sampler) if config.resume else 0
    logger = Logger(config, "grpo", COLUMNS, start)
    saver = checkpoint.Saver(run.model, folder, config, sampler)
    if not start and held_out:
        metrics, samples = evaluate(run, held_out)
        logger.log(0, metrics)
        logger.samples(0, samples)
    stopped = False
    with checkpoint.Interruption() as interruption:
        for step in range(start + 1, config.steps + 1):
            mine = next(sampler)[engine.rank() :: engine.world_size()]
            metrics = train_step(run, [prompts[i] for i in mine], step) | {"time/save": saver.seconds}
            samples = []
            if held_out and (step % config.eval_every == 0 or step == config.steps):
                evaluated, samples = evaluate(run, held_out)
                metrics |= evaluated
            logger.log(step, metrics)
            logger.samples(step, samples)
            stopped = saver.after(step, interruption)
            if stopped:
                break
    logger.close(CURVES)
    if stopped:
        raise KeyboardInterrupt
    models.save_lm(run.model, run.tokenizer, str(folder / "model"))
    return str(folder / "model")


def main(argv: list[str] | None = None) -> None:
    """`fused-rl grpo`."""
    cli.run("grpo", "GRPOConfig", argv)


if __name__ == "__main__":
    main()
