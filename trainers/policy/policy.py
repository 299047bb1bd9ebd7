"""The policy of PPO and GRPO: its forward pass with the loss, its reference, its sampler, and its measurements."""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch

import fused_rl
from fused_rl.objectives.presets import PolicyLossOptions, option_beyond_a_token
from fused_rl.objectives.surrogates import SURROGATES

from ..base import engine, ranks
from ..data.batch import Batch
from ..data.micro_batches import Padding, by_tokens
from ..models import language_model
from ..models.packing import Costs, pack, tokens_by, unpad
from ..rollouts.roll_out import roll_out, sample_rows_of
from ..rollouts.sampling import Sampling, Seeds
from ..rollouts.types import Progress, Prompt, Rollout, Sampler, Scorer
from .options import LossConfig, SamplingRunConfig
from .reference import Reference
from .shared_prompts import in_row_of, shared_tokens

# Responses shown at each evaluation: half from the same held-out rows each time, half from the step's rollout.
SHOWN = 4


def eager_layers(config: SamplingRunConfig) -> contextlib.AbstractContextManager:
    """Return a context that runs layers as they are: sampling calls them with another past for every token."""
    # PyTorch's compiler is imported only where it is used.
    if not config.torch_compile:
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


class PolicyOutput(NamedTuple):
    """The results of one forward pass of a micro-batch of b sequences."""

    loss: torch.Tensor
    """A differentiable scalar."""
    metrics: dict[str, torch.Tensor]
    """The metrics of `fused_rl.policy_loss`, and `drift`, the mean of ratio - 1 to the given old log-probabilities."""
    logprobs: torch.Tensor
    """(b, T - 1) nats, detached."""
    ref_logprobs: torch.Tensor | None = None
    """(b, T - 1) nats, the log-probabilities of the reference if it ran beside this pass."""
    kl: torch.Tensor | None = None
    """(b, T - 1) nats, the exact divergence from that reference."""


Config = TypeVar("Config", bound=SamplingRunConfig, covariant=True)


@dataclass
class Policy(Generic[Config]):
    """A policy in training, with all that is needed to sample from it and to score its samples."""

    config: Config
    """The options of its trainer."""
    model: Any
    """The DeepSpeed engine around a `LanguageModel`."""
    reference: Reference | None
    """None if the policy is not compared with a reference."""
    sampler: Sampler
    sampling: Sampling
    scorers: Sequence[Scorer]
    tokenizer: Any
    device: torch.device
    costs: Costs | None = None
    """The costs of the model by which sequences are packed; None if every response has a row of its own."""
    frozen: bool = False
    """True while only the critic is trained."""
    seeds: Seeds = field(default_factory=Seeds)
    """The seeds of the responses that are trained on."""
    rank_state: Mapping[str, Any] = field(default_factory=dict)
    """Objects that each rank saves in checkpoints for itself, by name."""
    trained_steps: int = 0
    """The number of steps that are done."""
    steps_per_epoch: float = 1.0
    published: int | None = None
    """The step whose weights the next responses are sampled with; None before any were published."""
    padding: Padding = field(default_factory=Padding)
    """Counts the padding in the training passes of a step."""
    rest_seconds: float = 0.0
    """The seconds that the sampler took to rest since weights were last published."""
    sample_rows: list[dict] = field(default_factory=list)
    """Lines of samples.jsonl from this rank's last rollout; empty before the first one."""

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Return the inputs with which model and reference score the sequences of a micro-batch."""
        packed = None
        if self.costs is not None and not self.costs.masked:
            packed = unpad(batch, self.costs)
        elif self.costs is not None and batch.token_counts.any():
            # Prompts are shared where that is cheaper. The lengths are on the CPU, so the device is not waited for.
            in_row = in_row_of(batch, self.costs)
            packed = pack(batch, in_row) if in_row > 1 else None
        # Temperature and kept sets are those of the sampling; with others the first ratio would not be 1.
        softmax = {"temperature": self.config.temperature, "support": batch.support}
        return batch.inputs(packed) | softmax

    def divide(self, batch: Batch, index: torch.Tensor, *, together: int = 1) -> list[torch.Tensor]:
        """Divide sequences into micro-batches, equally many on every rank.

        Micro-batches of a number of sequences consist of neighbours; those of a number of tokens consist of sequences
        of similar lengths.

        Args:
            batch: the sequences.
            index: (n,) int64 on the CPU, the sequences to divide.
            together: so many neighbours in `index` share a prompt and stay in one micro-batch of a number of tokens.

        Returns:
            The CPU indices of each micro-batch.
        """
        max_tokens = self.config.micro_batch_tokens
        if max_tokens is None:
            return list(index.split(self.config.micro_batch_size))
        lengths = (batch.prompt_lengths + batch.response_lengths).tolist()
        tokens_of = tokens_by(lengths, self.costs)
        costs = self.costs
        if together > 1 and costs is not None and (costs.masked or costs.in_blocks):
            tokens_of = shared_tokens(batch, costs)
        units = index.view(-1, together).tolist()
        return [torch.tensor(indices) for indices in by_tokens(units, tokens_of, max_tokens)]

    def rest(self) -> None:
        """Let the sampler rest, as nothing is sampled until new weights are published. All ranks must call this."""
        began = time.monotonic()
        self.sampler.rest()
        self.rest_seconds = time.monotonic() - began

    def publish(self, step: int) -> dict[str, float]:
        """Publish the current weights, which are those after `step`, to the sampler. All ranks must call this.

        Returns:
            The metric `time/publish` in seconds, which includes the time that the sampler took to rest.
        """
        began = time.monotonic()
        self.sampler.publish(step, self.save)
        self.published = self.trained_steps = step
        return {"time/publish": time.monotonic() - began + self.rest_seconds}

    def save(self, folder: Path, *, merged: bool = True) -> None:
        """Write the model in the Hub format, completely or not at all. All ranks must call this.

        With LoRA, `merged` writes the weights with the adapters in them, and otherwise the adapters alone are written.
        """
        language_model.save_lm(self.model, self.tokenizer, folder, merged=merged)

    def mismatch(
        self, rollout: Rollout, old_logprobs: torch.Tensor, options: PolicyLossOptions
    ) -> dict[str, float]:
        """Return metrics of how far the sampler's log-probabilities are from the policy's.

        `old_logprobs` are (B, T - 1) nats, and `options` those of the loss. The dict is empty if the sampler reports
        none.

        Raises:
            InputError: those of a server are too far from the policy's.
        """
        if rollout.rollout_logprobs is None:
            return {}
        from ..rollouts.mismatch import check_bound, mismatch

        # The difference is measured before any correction, which would hide a sampler with other weights.
        metrics = mismatch(rollout, old_logprobs, options)
        if metrics and self.published is not None:
            metrics["rollout/weight_version"] = float(self.published)
        # With `lag` the weights differ by more than rounding, so that only the probe can verify them.
        if self.config.server is not None and not self.config.lag:
            check_bound(metrics, exact=self.model.module.base.dtype == torch.float32)
        return metrics

    def begin_step(self, step: int, prompts_of: Callable[[int], list[Prompt]]) -> None:
        """Begin a step; with `lag`, also start to sample the rollouts of later steps, up to `lag` steps ahead.

        `prompts_of` returns this rank's prompts of a step.
        """
        if self.config.lag:
            # A resumed run draws the same seeds, because their generator is in the checkpoint.
            # A `LaggedSampler`, which is imported only where there is a lag.
            self.published = cast(Any, self.sampler).begin(
                step,
                self.config.total_steps,
                prompts_of,
                self.config.group_size,
                lambda n: replace(self.sampling, seeds=self.seeds.draw(n)),
            )

    def roll_out(
        self, prompts: list[Prompt], sampling: Sampling, copies: int, seeds: Seeds | None = None
    ) -> Rollout:
        """Sample and score responses to this rank's prompts.

        Args:
            prompts: the prompts.
            sampling: temperature, kept sets, length and stop tokens.
            copies: the number of responses to each prompt.
            seeds: those of an evaluation; None uses the seeds of training.
        """
        # An evaluation takes none of training's seeds, because that would change the run.
        if sampling.temperature:
            sampling = replace(sampling, seeds=(seeds or self.seeds).draw(copies * len(prompts)))
        vocab = self.model.module.base.config.get_text_config().vocab_size
        with eager_layers(self.config):
            rollout = roll_out(
                self.sampler,
                self.scorers,
                prompts,
                sampling,
                self.tokenizer,
                self.device,
                copies=copies,
                vocab=vocab,
                progress=Progress(
                    self.trained_steps, self.config.total_steps, self.steps_per_epoch
                ),
            )
        if sampling.temperature and seeds is None:
            count, seed = SHOWN // 2, f"{self.config.seed} {self.published}"
            places = range(len(rollout.samples))
            self.sample_rows = sample_rows_of(
                "training", rollout, places, count, seed, self.tokenizer, self.scorers
            )
        return rollout

    def loss(
        self,
        batch: Batch,
        old_logprobs: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor,
        *,
        on_policy: bool = False,
        with_reference: bool = False,
        **options,
    ) -> PolicyOutput:
        """Run the policy's forward pass and compute its loss.

        If the loss of a token depends on that token alone, its gradient is formed in the forward pass, which saves a
        quarter of the work in the head and keeps no logits. Otherwise the loss is computed from the log-probabilities.

        Args:
            batch: b sequences.
            old_logprobs: (b, T - 1) nats, 0 where the policy was not run.
            advantages: (b,) or (b, T - 1).
            mask: (b, T - 1) bool, True for the tokens that are trained on.
            on_policy: True if the policy has not changed since it sampled. The old log-probabilities are then those of
                this very pass, and the given ones are only compared with them.
            with_reference: True to run the reference beside this pass, for the exact KL and for its log-probabilities,
                which then replace those in `options`.
            **options: further arguments of `fused_rl.policy_loss`, its denominators among them.
        """
        # The forward pass, in the way that the loss allows.
        tokens = (None if on_policy else old_logprobs, advantages, mask)
        loss_options = options["options"]
        is_users = callable(loss_options.surrogate)  # a user's own surrogate may read anything
        is_token_level = option_beyond_a_token(loss_options) is None and not is_users
        inputs = self.inputs(batch)
        self.padding.add(inputs["packed"] or batch)

        if with_reference:
            # The pass itself puts the reference's log-probabilities into this place.
            options["ref_logprobs"] = torch.zeros_like(old_logprobs)
        # The head forms the gradient in the pass, and the loss is computed once more, only for its metrics.
        if options.get("rollout_logprobs") is None and is_token_level:
            token_loss, per_token = fused_rl.policy_token_loss(*tokens, **options)
            per_token = per_token[:-1] if with_reference else per_token
            inputs |= {"token_loss": token_loss, "per_token": per_token}

        # A frozen policy is only measured, so no graph is kept for a backward pass.
        with contextlib.ExitStack() as stack:
            has_graph = torch.is_grad_enabled() and not self.frozen
            stack.enter_context(torch.set_grad_enabled(has_graph))
            if with_reference:
                assert self.reference is not None
                inputs["reference"] = stack.enter_context(self.reference.states_for(inputs))
            scored = self.model(**inputs)
            if with_reference:
                options["ref_logprobs"] = scored.ref_logprobs
            loss, metrics = fused_rl.policy_loss(
                scored.logprobs, *tokens, entropy=scored.entropy, **options
            )
            loss = loss if scored.loss is None else scored.loss

        # How far this pass is from the old log-probabilities, in which 0 means that the policy was not run.
        logprobs = scored.logprobs.detach()
        was_run = mask & (old_logprobs != 0) & old_logprobs.isfinite()
        ratio_minus_1 = torch.expm1((logprobs - old_logprobs).double())
        drift = torch.where(was_run, ratio_minus_1, 0).sum()
        metrics["drift"] = drift / options["num_tokens"]
        return PolicyOutput(loss, metrics, logprobs, scored.ref_logprobs, scored.kl)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a micro-batch's loss, whose denominators are counted over all ranks."""
        if not self.frozen:
            # The engine averages gradients over ranks. As the denominators already count the tokens of all ranks, the
            # gradients must be added up instead.
            self.model.backward(loss * ranks.processes())

    def optimizer_step(self, step: int) -> dict[str, float]:
        """Update the weights, and return the metrics `lr` and `optim/grad_norm`."""
        return (
            {"lr": 0.0, "optim/grad_norm": 0.0}
            if self.frozen
            else engine.optimizer_step(self.model, step)
        )


def with_entropy_threshold(
    options: PolicyLossOptions, entropy: torch.Tensor, mask: torch.Tensor
) -> PolicyLossOptions:
    """Return the options with the share `top_entropy` replaced by a threshold in nats, the same for the whole update.

    `entropy` and `mask` are (b, T - 1). All ranks must call this.
    """
    if options.top_entropy is None:
        return options
    # The quantile is over the whole update (arXiv:2506.01939), because that of a micro-batch would depend on the split.
    # No entropy is below 0, so -1 marks masked tokens.
    local = torch.where(mask, entropy, -1).cpu()  # one copy from the device
    entropies = torch.cat(ranks.gather(local[local >= 0])).sort(descending=True).values
    dropped = math.ceil((1 - options.top_entropy) * (len(entropies) - 1))
    kept = len(entropies) - dropped  # the number that is not below the quantile
    # The threshold lies between the last one that is kept and the next, so that rounding moves neither across it.
    threshold = entropies[kept - 1 : kept + 1].double().mean().item() if dropped > 0 else 0.0
    return replace(options, top_entropy=None, entropy_threshold=threshold)


def needed_passes(
    options: PolicyLossOptions,
    advantages: torch.Tensor,
    trained: torch.Tensor,
    read: torch.Tensor,
    minibatch: list[torch.Tensor],
) -> tuple[list[torch.Tensor], list[bool]]:
    """Return the micro-batches that must run, and which of these have a gradient, the same numbers on every rank.

    A response has a gradient if it is trained on and its advantage is not 0, or if the loss has other terms. Otherwise
    it runs forward only if its log-probabilities are read. At least one micro-batch runs backward, because the
    optimizer needs a gradient, even if it is 0.

    Args:
        options: the options of the loss.
        advantages: (B,) on the device.
        trained, read: (B,) bool on the CPU.
        minibatch: the CPU indices of each micro-batch.
    """
    # A user's own surrogate may have a gradient anywhere, and some read other responses.
    surrogate = SURROGATES.get(str(options.surrogate))
    is_of_advantages = surrogate is not None and not (
        surrogate.beyond_advantages or surrogate.needs_batch
    )
    has_gradient = trained
    if is_of_advantages and not options.kl_coef and not options.entropy_coef:
        has_gradient = trained & (advantages != 0).cpu()
    by_response = torch.stack([has_gradient, has_gradient | read])
    by_micro_batch = torch.stack([by_response[:, rows].any(1) for rows in minibatch], 1)
    # A micro-batch must run on all ranks or on none, because its pass gathers weights or reduces gradients.
    backward, runs = (ranks.global_sum(by_micro_batch) > 0).tolist()
    if not any(backward):
        backward[0] = runs[0] = True
    return (
        [*itertools.compress(minibatch, runs)],
        [*itertools.compress(backward, runs)],
    )


def group_lengths(lengths: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return, for each response, the mean length in tokens of the responses to its prompt, (B,) fp32 from (B,)."""
    return lengths.float().view(-1, group_size).mean(1).repeat_interleave(group_size)


def plan(config: LossConfig, count: int, together: int = 1) -> list[torch.Tensor]:
    """Return the minibatch of each update of a step, as CPU indices of responses.

    Args:
        config: the options; the step has `epochs` x `minibatches` updates.
        count: the number of responses.
        together: so many neighbouring responses stay in one minibatch.
    """
    responses = torch.arange(count).view(-1, together)
    minibatches = []
    for _ in range(config.epochs):
        # Each epoch has a new order, so that the minibatches consist of other responses.
        order = responses[torch.randperm(len(responses))].flatten()
        minibatches += order.split(count // config.minibatches)
    return minibatches
