"""What PPO and GRPO share around the algorithm: prompts, the policy and its reference, and measuring.

The algorithms themselves (`update`, `train_step`) are in their own files, and nothing of them is here.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

import fused_rl
from fused_rl.trainers.base import engine, ranks
from fused_rl.trainers.base.screen import tell
from fused_rl.trainers.data import encode
from fused_rl.trainers.data.batch import Batch
from fused_rl.trainers.data.rows import Rows, load_train_eval, tell_dropped
from fused_rl.trainers.models import language_model
from fused_rl.trainers.models.packing import Costs, Packed, agreed_costs, pack, responses_per_row
from fused_rl.trainers.models.pretrained import check_fits
from fused_rl.trainers.policy.options import PolicyConfig
from fused_rl.trainers.policy.stuck import Stuck
from fused_rl.trainers.rollouts.generate import TransformersSampler
from fused_rl.trainers.rollouts.roll_out import roll_out
from fused_rl.trainers.rollouts.sampling import Sampling, check_correction, check_sampler
from fused_rl.trainers.rollouts.types import Prompt, Rollout, Sampler, Scorer


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
    stuck: Stuck = field(default_factory=Stuck)
    """Tells where the rollouts teach nothing."""

    def inputs(self, part: Batch) -> dict[str, object]:
        """What the model and the reference take to score `part`."""
        scored = {"input_ids": part.input_ids, "mask": part.response_mask, "temperature": self.config.temperature}
        return scored | {"packed": self._packed(part), "support": part.support}

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
        known = {"copies": copies, "vocab": self.model.module.base.config.get_text_config().vocab_size}
        return roll_out(self.sampler, self.scorers, prompts, sampling, self.tokenizer, self.device, **known)


def load_policy(
    config: PolicyConfig,
    tokenizer,
    scorers: Sequence[Scorer],
    device,
    updates: int,
    *,
    extend: Callable[[language_model.LanguageModel], language_model.LanguageModel] = lambda lm: lm,
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
    lm = extend(language_model.load_lm(config.model, config.revision, config, config, device))
    stop_ids = tuple(encode.stop_ids(tokenizer, lm.base.saved_generation_config))
    longest, otherwise = config.max_prompt_length + config.max_new_tokens, "prompts are computed once per response"
    costs = agreed_costs(lm.base, longest, share_prompts, option="share_prompts", otherwise=otherwise)
    reference = None
    if needs_reference and not lm.lora:
        frozen = language_model.load_lm(config.model, config.revision, config, config, device, trainable=False)
        reference = engine.initialize_frozen(frozen, config)
    model = engine.initialize(lm, config, config, updates)
    sampler = TransformersSampler(
        lm.base,
        pad_id=tokenizer.pad_token_id,
        batch_size=config.rollout_batch_size,
        synced_gpus=config.zero_stage == 3,
    )
    filters = {"top_p": config.top_p, "top_k": config.top_k, "min_p": config.min_p}
    sampling = Sampling(config.temperature, config.max_new_tokens, stop_ids, **filters)
    check_sampler(sampler, sampling)
    corrections = ("rollout_correction", "rollout_low", "rollout_high")
    check_correction(sampler, [name for name in corrections if getattr(config, name) is not None])
    return Policy(config, model, reference, sampler, sampling, scorers, tokenizer, device, needs_reference, costs)


def load_prompts(config: PolicyConfig, tokenizer, scorers: Sequence[Scorer]) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts to train on and the held-out ones; every row is checked by every scorer."""
    encoder = encode.Encoder.of(config, tokenizer)
    train, held_out = load_train_eval(config)
    chosen = {"column": config.prompt_column, "max_length": config.max_prompt_length}
    return prompts_of(train, encoder, scorers, **chosen), prompts_of(held_out, encoder, scorers, **chosen)


def prompts_of(
    rows: Rows, encoder: encode.Encoder, scorers: Sequence[Scorer], *, column: str | None, max_length: int
) -> list[Prompt]:
    """A prompt for every row that is short enough; `column` as the option prompt_column."""
    kept = []
    for i, row in enumerate(rows.rows):
        for scorer in scorers:
            with rows.at(i):
                scorer.check(row)  # a row that it cannot score must not stop the run hours later
        ids = encoder.prompt(rows, i, column)
        if len(ids) <= max_length:
            kept.append(Prompt(ids, row, rows.where(i)))
    tell_dropped(rows, len(kept), "longer than max_prompt_length")
    return kept


def check_policy_fits(policy: Policy, prompts: list[Prompt]) -> None:
    """Refuse prompts whose responses would run past the model's positions, and a tokenizer that is not the model's."""
    rows = ((prompt.ids, prompt.where) for prompt in prompts)
    remedy = "max_new_tokens or max_prompt_length"
    check_fits(policy.model.module.base, policy.tokenizer, rows, policy.config.max_new_tokens, remedy)


@dataclass
class Measured:
    """Of a rollout, before it is trained on; each (B, T - 1) fp32 in nats, 0 where masked.

    Where tokens were drawn from kept sets, everything is of the distributions over these.
    """

    old_logprobs: torch.Tensor
    """0 also where the policy was not run."""
    entropy: torch.Tensor
    """0 also where the policy was not run."""
    ref_logprobs: torch.Tensor | None
    """None where no reference is read."""
    kl: torch.Tensor | None
    """Exact, from both models' logits, over what the token was drawn from; None where it was not asked for."""


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
            rows = policy.model(**inputs, want_logits=exact_kl)
            old_logprobs[index, :width], entropy[index, :width] = rows.logprobs, rows.entropy
        if policy.has_reference:
            with _as_reference(policy) as model:
                ref_rows = model(**inputs, want_logits=exact_kl)
            ref_logprobs[index, :width] = ref_rows.logprobs
        if exact_kl:
            for scored in (rows, ref_rows):
                _keep_only(scored.logits, part.support)
            divergence = fused_rl.token_kl(rows.logits, ref_rows.logits, temperature=policy.config.temperature)
            kl[index, :width] = kl.new_zeros(part.response_mask.shape).masked_scatter(part.response_mask, divergence)
    return Measured(old_logprobs, entropy, ref_logprobs if policy.has_reference else None, kl if exact_kl else None)


def _keep_only(logits: torch.Tensor, support: fused_rl.TokenSupport | None) -> None:
    """Set logits (N, V) outside of the kept sets to -inf, in place: a softmax is then one over the sets."""
    if support is None:
        return
    lengths = support.offsets.diff()
    row = torch.repeat_interleave(lengths)
    kept = logits[row, support.ids]
    logits[lengths > 0] = -torch.inf
    logits[row, support.ids] = kept


@contextlib.contextmanager
def _as_reference(policy: Policy):
    """The reference model: the frozen one, or the policy with its adapters off."""
    if policy.reference is not None:
        yield policy.reference
        return
    with policy.model.module.lm.disable_adapter():
        yield policy.model


def tell_if_all_left_out(config: PolicyConfig, stop_rate: float, step: int) -> bool:
    """Whether `mask_truncated` left every response of a step out, over all ranks; says so."""
    if not config.mask_truncated or stop_rate > 0:
        return False
    if ranks.rank() == 0:
        cut = f"every response was cut at max_new_tokens={config.max_new_tokens}"
        tell(f"step {step}: {cut}, and mask_truncated leaves all of them out: nothing is trained")
    return True


def warn_if_off_policy(ratio: float, dtype: torch.dtype) -> None:
    """The first minibatch is on-policy: its ratio is 1, or log-probabilities are not those of the sampling policy."""
    tolerance = 5e-2 if dtype == torch.bfloat16 else 1e-6
    if not abs(ratio - 1) <= tolerance and ranks.rank() == 0:
        tell(
            f"warning: the first minibatch's mean ratio is {ratio:.7g}, not 1 within {tolerance:g}: the forward of "
            "the update does not repeat the one before it (dropout? a non-deterministic kernel?), so clipping and "
            "advantages act on the wrong ratios"
        )
