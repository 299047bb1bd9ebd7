"""What PPO and GRPO share around the algorithm: prompts, the policy and its reference, measuring, held-out evaluation.

The algorithms themselves (`update`, `train_step`) are in their own files, and nothing of them is here.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch

import fused_rl
from fused_rl.presets import PolicyLossOptions
from fused_rl.trainers import data, engine, models
from fused_rl.trainers.config import (
    Finite,
    InputError,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFraction,
    PositiveInt,
    RunConfig,
    load_function,
)
from fused_rl.trainers.data import Batch
from fused_rl.trainers.generate import TransformersSampler
from fused_rl.trainers.metrics import phase
from fused_rl.trainers.rollout import Prompt, Rollout, Sampler, Sampling, Scorer, roll_out


@dataclass(kw_only=True)
class PolicyConfig(RunConfig):
    """Rollouts and the policy loss. An option of the loss that is None is the preset's."""

    prompt_column: str | None = None
    """Text or messages; None takes prompt, messages or question, whichever is there."""
    answer_column: str | None = None
    """Ground truth for the verifiers; None takes ground_truth or answer. Of `... #### 42` the part after the marks."""
    verifiers: str = "math"
    """Comma-separated: math, reasoning_gym, reasoning_gym:<dataset>, module:function, reward_model:<folder>. The reward
    is the sum of their scores, each times its weight (0.2*module:function). math and reasoning_gym say which answers
    are right; functions do (from a score of 1 on) where no other does, or where they are given a threshold
    (module:function>=0.5); reward models do with a threshold alone."""
    prompts_per_step: PositiveInt = 32
    """Prompts per rollout, over all ranks."""
    minibatches: PositiveInt = 2
    """Optimizer updates per pass over a rollout."""
    epochs: PositiveInt = 1
    """Passes over a rollout."""
    max_new_tokens: PositiveInt = 256
    """Longer responses are cut; they are scored as they are."""
    mask_truncated: bool = False
    """Leave responses that were cut out of the loss."""
    temperature: Positive = 1.0
    """Of sampling, and of every log-probability in the loss."""
    rollout_batch_size: PositiveInt = 64
    """Responses generated together."""
    preset: str = "grpo"
    """A row of fused_rl.PRESETS: it chooses ratio, surrogate, clipping, aggregation and advantages."""
    ratio_level: Literal["token", "sequence", "sequence-sum"] | None = None
    """Whose probability ratio a token gets: its own, its sequence's geometric mean, or its sequence's product."""
    surrogate: str | None = None
    """clip, cispo, sapo, vespo, geo-mean, policy-gradient, or a function of yours, module:function (docs/losses.md)."""
    loss_agg: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] | None = (
        None
    )
    """How the losses of tokens become one number; the norm is max_new_tokens."""
    clip_low: NonNegative | None = None
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: NonNegativeFloat | None = None
    """See clip_low; inf is no upper bound."""
    skip_impossible: bool | None = None
    """Leave out tokens that a policy gives no probability (-inf), which make the loss NaN."""
    delta: Positive | None = None
    """Bound on the ratio where the advantage is negative, above 1 + clip_high (dual clip)."""
    sapo_temperature_pos: Positive | None = None
    """Of SAPO's gate where the advantage is positive."""
    sapo_temperature_neg: Positive | None = None
    """Of SAPO's gate elsewhere."""
    vespo_k_pos: NonNegative | None = None
    """VESPO's power of the ratio where the advantage is 0 or more."""
    vespo_lambda_pos: NonNegative | None = None
    """VESPO's rate there."""
    vespo_k_neg: NonNegative | None = None
    """VESPO's power of the ratio where the advantage is negative."""
    vespo_lambda_neg: NonNegative | None = None
    """VESPO's rate there."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL to the starting model in the loss; it is measured in any case."""
    kl_estimator: Literal["k1", "k2", "k3", "k4", "rk3", "k1+", "k3+"] = "rk3"
    """Of the KL in the loss; k1 does not hold the policy (its expected gradient is zero)."""
    entropy_coef: Finite = 0.0
    """Weight of the entropy bonus in the loss."""
    rollout_correction: Literal["token-truncate", "token-mask", "sequence-truncate", "sequence-mask"] | None = None
    """How the ratio of trainer to sampler weights the surrogate, where the sampler tells its log-probabilities."""
    rollout_low: NonNegative | None = None
    """Lower bound of that weight."""
    rollout_high: NonNegativeFloat | None = None
    """Upper bound of that weight."""
    off_policy_threshold: NonNegative | None = None
    """Drop the surrogate of sequences of negative advantage that drifted by more nats per token."""
    top_entropy: PositiveFraction | None = None
    """Keep the surrogate of this fraction of a micro-batch's tokens only, those of highest entropy."""
    entropy_threshold: NonNegative | None = None
    """The same by a fixed threshold in nats, which does not depend on the micro-batch."""
    eval_samples: PositiveInt = 4
    """Sampled responses per held-out problem: the k of pass@k."""
    show_samples: PositiveInt = 4
    """Responses shown as a table at each evaluation."""


def loss_options(config: PolicyConfig) -> dict[str, object]:
    """What the config says about the loss, as `fused_rl.policy_loss` names it, checked."""
    given = {f.name: getattr(config, f.name) for f in fields(PolicyLossOptions)}
    given = {name: value for name, value in given.items() if value is not None}
    if ":" in given.get("surrogate", ""):
        given["surrogate"] = load_function(given["surrogate"], "surrogate")
    try:
        PolicyLossOptions(**{**fused_rl.PRESETS[config.preset].options, **given})
    except ValueError as error:
        raise InputError(str(error)) from error
    return {"preset": config.preset, **given}


@dataclass
class Policy:
    """A policy in training, with all that sampling from it and judging its samples needs."""

    config: PolicyConfig
    model: object
    """The DeepSpeed engine around a `LanguageModel`."""
    reference: object | None
    """The frozen starting model; None with LoRA, where it is the policy without its adapters."""
    sampler: Sampler
    sampling: Sampling
    scorers: Sequence[Scorer]
    tokenizer: object
    device: torch.device

    def roll_out(self, prompts: list[Prompt], sampling: Sampling, copies: int) -> Rollout:
        """`copies` scored responses to each of this rank's prompts."""
        return roll_out(self.sampler, self.scorers, prompts, sampling, self.tokenizer, self.device, copies=copies)


def load_policy(
    config: PolicyConfig,
    tokenizer,
    scorers: Sequence[Scorer],
    device,
    updates: int,
    extend: Callable[[models.LanguageModel], models.LanguageModel] = lambda lm: lm,
) -> Policy:
    """The policy in an engine for `updates` optimizer steps, its reference and its sampler.

    `extend` adds to the model that is trained what the reference does not need: a value head.
    """
    lm = extend(models.load_lm(config, device))
    stop_ids = tuple(data.stop_ids(tokenizer, lm.base.saved_generation_config))
    reference = None
    if not config.lora_rank:
        reference = engine.initialize_frozen(models.load_lm(config, device, trainable=False), config)
    model = engine.initialize(lm, config, config, updates)
    sampler = TransformersSampler(
        model,
        pad_id=tokenizer.pad_token_id,
        batch_size=config.rollout_batch_size,
        synced_gpus=config.zero_stage == 3,
    )
    sampling = Sampling(config.temperature, config.max_new_tokens, stop_ids)
    return Policy(config, model, reference, sampler, sampling, scorers, tokenizer, device)


def load_prompts(config: PolicyConfig, tokenizer, scorers: Sequence[Scorer]) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts to train on and the held-out ones; every row is checked by every scorer."""
    encoder = data.Encoder(tokenizer, raw_prompt=config.raw_prompt, system_prompt=config.system_prompt)
    train, held_out = data.load_train_eval(config)
    return prompts_of(config, train, encoder, scorers), prompts_of(config, held_out, encoder, scorers)


def prompts_of(config: PolicyConfig, rows: data.Rows, encoder: data.Encoder, scorers: Sequence[Scorer]) -> list[Prompt]:
    """A prompt for every row that is short enough."""
    kept = []
    for i, row in enumerate(rows.rows):
        row = {**row, "__where__": rows.where(i)}
        for scorer in scorers:
            scorer.check(row)  # a row that it cannot score must not stop the run hours later
        ids = encoder.prompt(rows, i, config.prompt_column)
        if len(ids) <= config.max_prompt_length:
            kept.append(Prompt(ids, row))
    data.tell_dropped(rows, len(kept), "longer than max_prompt_length")
    return kept


def check_policy_fits(policy: Policy, prompts: list[Prompt]) -> None:
    """Refuse prompts whose responses would run past the model's positions, and a tokenizer that is not the model's."""
    rows = ((prompt.ids, prompt.row["__where__"]) for prompt in prompts)
    remedy = "max_new_tokens or max_prompt_length"
    models.check_fits(policy.model.module.base, policy.tokenizer, rows, policy.config.max_new_tokens, remedy)


@dataclass
class HeldOut:
    """This rank's share of the held-out prompts."""

    prompts: list[Prompt]
    """Equally many on every rank, because they must call `generate` equally often."""
    count: int
    """How many of them are this rank's own; those after them only fill the share up, and are not counted."""


def share_of_rank(prompts: list[Prompt]) -> HeldOut:
    """Every prompt is one rank's own; a share that is one short is filled up with the first prompt."""
    mine = prompts[engine.rank() :: engine.world_size()]
    size = -(-len(prompts) // engine.world_size())
    return HeldOut(mine + prompts[:1] * (size - len(mine)), len(mine))


@dataclass
class Measured:
    """Of a rollout, before it is trained on; each (B, T - 1) fp32 in nats, 0 where masked."""

    old_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor
    entropy: torch.Tensor
    kl: torch.Tensor
    """Exact, from both models' logits."""


@torch.no_grad()
def measure(policy: Policy, batch: Batch, parts: list[torch.Tensor]) -> Measured:
    """Score `batch` with the policy and the reference.

    Args:
        policy: the policy.
        batch: B sequences.
        parts: indices of the micro-batches of the first pass: the same tensors give the same bits, so the ratio of the
            first update is 1.
    """
    measured = Measured(*(torch.zeros(batch.response_mask.shape, device=policy.device) for _ in range(4)))
    temperature = policy.config.temperature
    for index in parts:
        part = batch.rows(index)
        inputs = (part.input_ids, part.response_mask, temperature)
        rows, logits = policy.model(*inputs, want_logits=True)
        with _as_reference(policy) as reference:
            ref_rows, ref_logits = reference(*inputs, want_logits=True)
        kl = torch.zeros_like(rows.logprobs)
        kl[part.response_mask] = fused_rl.token_kl(logits, ref_logits, temperature=temperature)

        width = part.response_mask.shape[1]
        measured.old_logprobs[index, :width] = rows.logprobs
        measured.ref_logprobs[index, :width] = ref_rows.logprobs
        measured.entropy[index, :width] = rows.entropy
        measured.kl[index, :width] = kl
    return measured


@contextlib.contextmanager
def _as_reference(policy: Policy):
    """The reference model: the frozen one, or the policy with its adapters off."""
    if policy.reference is not None:
        yield policy.reference
        return
    with policy.model.module.lm.disable_adapter():
        yield policy.model


@phase("evaluated on held-out rows")
@torch.no_grad()
def evaluate(policy: Policy, held_out: HeldOut) -> tuple[dict[str, float], list[dict]]:
    """Greedy and sampled accuracy on held-out problems, and a few responses; leaves the random state as it was."""
    config, k, count = policy.config, policy.config.eval_samples, held_out.count
    greedy_sampling = Sampling(0.0, policy.sampling.max_new_tokens, policy.sampling.stop_ids)
    with torch.random.fork_rng():
        torch.manual_seed(config.seed + engine.rank())
        greedy = policy.roll_out(held_out.prompts, greedy_sampling, 1)
        sampled = policy.roll_out(held_out.prompts, policy.sampling, k)
    parts = torch.arange(len(sampled.samples)).split(config.micro_batch_size)
    measured = measure(policy, sampled.batch, list(parts))

    # Over all ranks: problems and tokens are counted, and everything else is divided by them.
    right = sampled.solved.view(-1, k)[:count]
    sums = {
        "eval/accuracy_greedy": greedy.solved[:count].sum(),
        "eval/accuracy_sampled": right.sum() / k,
        "eval/pass_at_k": right.any(1).sum(),
        "eval/score": sampled.rewards[: count * k].sum() / k,
        "eval/kl_exact": measured.kl[: count * k].sum().cpu() / k,
        "eval/entropy": measured.entropy[: count * k].sum().cpu(),
    }
    tokens = sampled.batch.response_mask[: count * k].sum().cpu()
    counts = {"problems": torch.tensor(count), "tokens": tokens}
    local = torch.stack([value.double() for value in (*sums.values(), *counts.values())])
    *totals, problems, tokens = engine.global_sum(local).tolist()
    metrics = {name: total / problems for name, total in zip(sums, totals, strict=True)}
    metrics["eval/entropy"] = totals[-1] / max(tokens, 1)
    for key, struck in greedy.incidents.items():
        metrics[f"eval/{key}"] = struck + sampled.incidents[key]
    return metrics, _shown(policy, greedy)


def _shown(policy: Policy, rollout: Rollout) -> list[dict]:
    """A few responses as they are shown to the user, special tokens included."""
    decode, shown = policy.tokenizer.decode, []
    for sample, reward in zip(rollout.samples, rollout.rewards.tolist(), strict=True):
        row = {"prompt": decode(sample.prompt_ids), "response": decode(sample.response.ids), "reward": reward}
        shown.append(row)
    return shown[: policy.config.show_samples]


def warn_if_off_policy(ratio: float, dtype: torch.dtype) -> None:
    """The first minibatch is on-policy: its ratio is 1, or log-probabilities are not those of the sampling policy."""
    tolerance = 5e-2 if dtype == torch.bfloat16 else 1e-6
    if not abs(ratio - 1) <= tolerance and engine.rank() == 0:
        print(
            f"warning: the first minibatch's mean ratio is {ratio:.7g}, not 1 within {tolerance:g}: the forward of "
            "the update does not repeat the one before it (dropout? a non-deterministic kernel?), so clipping and "
            "advantages act on the wrong ratios",
            flush=True,
        )
