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
from fused_rl.trainers.packing import Costs, Packed, costs_of, pack, responses_per_row, why_not
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
    """The frozen starting model; None where nothing is measured against it, and with LoRA, where it is the policy
    without its adapters."""
    sampler: Sampler
    sampling: Sampling
    scorers: Sequence[Scorer]
    tokenizer: object
    device: torch.device
    has_reference: bool = True
    """Whether anything is measured against the starting model."""
    costs: Costs | None = None
    """Of the model, by which prompts are shared; None where every response has a prompt of its own."""

    def inputs(self, part: Batch) -> dict[str, object]:
        """What the model and the reference take to score `part`."""
        scored = {"input_ids": part.input_ids, "mask": part.response_mask, "temperature": self.config.temperature}
        return scored | {"packed": self._packed(part)}

    def _packed(self, part: Batch) -> Packed | None:
        """The part with shared prompts, where that is cheaper."""
        if self.costs is None or not part.response_mask.any():
            return None
        copies = int(part.prompts.bincount().max())
        prompt, response = part.prompt_lengths.max().item(), part.response_mask.sum(1).double().mean().item()
        in_row = responses_per_row(self.costs, prompt, response, copies)
        return pack(part, in_row) if in_row > 1 else None

    def roll_out(self, prompts: list[Prompt], sampling: Sampling, copies: int) -> Rollout:
        """`copies` scored responses to each of this rank's prompts."""
        return roll_out(self.sampler, self.scorers, prompts, sampling, self.tokenizer, self.device, copies=copies)


def load_policy(
    config: PolicyConfig,
    tokenizer,
    scorers: Sequence[Scorer],
    device,
    updates: int,
    *,
    extend: Callable[[models.LanguageModel], models.LanguageModel] = lambda lm: lm,
    share_prompts: bool | None = False,
    needs_reference: bool = True,
) -> Policy:
    """The policy in an engine for `updates` optimizer steps, its reference and its sampler.

    Args:
        config, tokenizer, scorers, device: of the run.
        updates: of the whole run.
        extend: adds to the model that is trained what the reference does not need: a value head.
        share_prompts: compute a prompt once for several responses; None where the model can.
        needs_reference: whether anything is measured against the starting model.
    """
    lm = extend(models.load_lm(config, device))
    stop_ids = tuple(data.stop_ids(tokenizer, lm.base.saved_generation_config))
    costs = None if share_prompts is False else _costs(config, lm.base, required=share_prompts is True)
    reference = None
    if needs_reference and not config.lora_rank:
        reference = engine.initialize_frozen(models.load_lm(config, device, trainable=False), config)
    model = engine.initialize(lm, config, config, updates)
    sampler = TransformersSampler(
        model,
        pad_id=tokenizer.pad_token_id,
        batch_size=config.rollout_batch_size,
        synced_gpus=config.zero_stage == 3,
    )
    sampling = Sampling(config.temperature, config.max_new_tokens, stop_ids)
    return Policy(config, model, reference, sampler, sampling, scorers, tokenizer, device, needs_reference, costs)


def _costs(config: PolicyConfig, lm, *, required: bool) -> Costs | None:
    """The costs by which prompts are shared; None, and a line that says why, where the model cannot."""
    reason = why_not(lm, config.max_prompt_length + config.max_new_tokens)
    if reason is None:
        return costs_of(lm)
    if required:
        raise InputError(f"share_prompts: {reason}; drop --share_prompts")
    if engine.rank() == 0:
        print(f"prompts are computed once per response: {reason}", flush=True)
    return None


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
    """0 also where the policy was not run."""
    entropy: torch.Tensor
    """0 also where the policy was not run."""
    ref_logprobs: torch.Tensor | None
    """None where no reference is read."""
    kl: torch.Tensor | None
    """Exact, from both models' logits; None where it was not asked for."""


@torch.no_grad()
def measure(
    policy: Policy, batch: Batch, parts: list[torch.Tensor], *, exact_kl: bool = True, skipped: int = 0
) -> Measured:
    """Score `batch` with the policy and the reference.

    Args:
        policy: the policy.
        batch: B sequences.
        parts: indices of the micro-batches of the first pass.
        exact_kl: also from the logits of both.
        skipped: so many of the first parts the policy is run on for the exact KL alone.
    """
    shape, device = batch.response_mask.shape, policy.device
    old_logprobs, entropy, ref_logprobs, kl = (torch.zeros(shape, device=device) for _ in range(4))
    for number, index in enumerate(parts):
        part = batch.rows(index)
        inputs, width = policy.inputs(part), part.response_mask.shape[1]
        if exact_kl or number >= skipped:
            rows, logits = _scored(policy.model, inputs, want_logits=exact_kl)
            old_logprobs[index, :width], entropy[index, :width] = rows.logprobs, rows.entropy
        if policy.has_reference:
            with _as_reference(policy) as model:
                ref_rows, ref_logits = _scored(model, inputs, want_logits=exact_kl)
            ref_logprobs[index, :width] = ref_rows.logprobs
        if exact_kl:
            divergence = fused_rl.token_kl(logits, ref_logits, temperature=policy.config.temperature)
            kl[index, :width] = kl.new_zeros(part.response_mask.shape).masked_scatter(part.response_mask, divergence)
    return Measured(old_logprobs, entropy, ref_logprobs if policy.has_reference else None, kl if exact_kl else None)


def _scored(model, inputs: dict[str, object], *, want_logits: bool):
    """The rows of `inputs`, and their logits if they are wanted."""
    found = model(**inputs, want_logits=want_logits)
    return found if want_logits else (found, None)


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
    measured = measure(policy, sampled.batch, list(parts), exact_kl=policy.has_reference)

    # Over all ranks: problems and tokens are counted, and everything else is divided by them.
    right = sampled.solved.view(-1, k)[:count]
    sums = {
        "eval/accuracy_greedy": greedy.solved[:count].sum(),
        "eval/accuracy_sampled": right.sum() / k,
        "eval/pass_at_k": right.any(1).sum(),
        "eval/score": sampled.rewards[: count * k].sum() / k,
    }
    if measured.kl is not None:
        sums["eval/kl_exact"] = measured.kl[: count * k].sum().cpu() / k
    sums["eval/entropy"] = measured.entropy[: count * k].sum().cpu()
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
