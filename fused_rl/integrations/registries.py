"""Our presets in trainers that find a loss by name or by path; only the signatures differ.

- verl: `register("verl")`, then `policy_loss.loss_mode=fused_dapo` and `algorithm.adv_estimator=fused_leave-one-out`.
- SkyRL: `register("skyrl")`, then `policy_loss_type="fused_dapo"` and `advantage_estimator="fused_opo"`.
- prime-rl: `import_path = "fused_rl.integrations.registries.prime_dapo"`.
- slime, miles: `--custom-loss-function-path fused_rl.integrations.registries.slime_dapo`, or `miles_dapo`.

Ratio, surrogate and clipping are the preset's; the aggregation is the host's, by its own option.
"""

from functools import partial
from importlib import import_module

import torch
from packaging.version import Version
from torch import Tensor

from fused_rl.objectives.advantages import ADVANTAGES, response_advantages
from fused_rl.objectives.losses import policy_loss
from fused_rl.objectives.presets import PRESETS

_SKYRL = "skyrl.backends.skyrl_train.utils.ppo_utils"
_REPORTED = ("approx_kl", "clipfrac", "entropy")


def register(host: str) -> None:
    """Add `fused_<name>` to the losses and advantage estimators of verl or skyrl: every preset and advantage.

    gdpo is left out, and scalerl in verl: their functions do not get single rewards, and verl's losses no groups.
    """
    module, loss, estimator, left_out = _REGISTRIES[host]
    trainer = import_module(module)
    for name in PRESETS.keys() - left_out:
        trainer.register_policy_loss(f"fused_{name}")(partial(loss, name))
    # gae needs a critic's values, and gdpo single rewards: an estimator gets neither.
    for name in ADVANTAGES:
        if name not in ("gae", "gdpo"):
            getattr(trainer, estimator)(f"fused_{name}")(partial(_estimated, name))


def _verl(
    preset,
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode,
    config,
    rollout_is_weights=None,
):
    host = import_module("verl.trainer.ppo.core_algos")
    # verl's own losses of these kinds are means over sequences, whatever the option says; gspo was one before 0.9.1.
    fixed = ["sapo", "gmpo"]
    if Version(import_module("verl").__version__) < Version("0.9.1"):
        fixed.append("gspo")
    mode = "seq-mean-token-mean" if preset in fixed else loss_agg_mode

    def reduce(losses):
        return host.agg_loss(losses, response_mask, mode, **config.global_batch_info)

    weights = _token_weights(reduce, log_prob)
    if rollout_is_weights is not None:
        weights = weights * rollout_is_weights
    tokens = log_prob, old_log_prob, advantages, response_mask.bool()
    loss, reported = _weighted(preset, tokens, weights)
    return loss, {f"actor/{name}": value.item() for name, value in reported.items()}


def _skyrl(
    preset, log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None
):
    # SkyRL's correction scales a loss that it is given: of ones it returns the weights.
    ones = torch.ones_like(log_probs)
    correction_inputs = (
        old_log_probs,
        rollout_logprobs,
        ones if loss_mask is None else loss_mask,
        config.off_policy_correction,
    )
    weights, mask, metrics = import_module(_SKYRL).apply_off_policy_correction(
        ones, *correction_inputs
    )
    loss, reported = _weighted(preset, (log_probs, old_log_probs, advantages, mask.bool()), weights)
    return loss, metrics | {name: value.item() for name, value in reported.items()}


def _prime(preset, inputs, **changes):
    # prime-rl's tensors are (T,); ours have a batch dimension in front.
    tokens = inputs.trainer_logprobs, inputs.inference_logprobs, inputs.advantages, inputs.loss_mask
    weights = torch.ones_like(tokens[0]) if inputs.loss_weights is None else inputs.loss_weights
    loss, metrics = _weighted(preset, (each[None] for each in tokens), weights[None], **changes)
    return import_module("prime_rl.trainer.rl.loss").LossOutputs(loss=loss, metrics=metrics)


def _megatron(module, more, preset, args, batch, logits, sum_of_sample_mean):
    """slime's and miles' loss of a micro-batch: log-probabilities and the reduction over samples are the host's."""
    host = import_module(module)
    lists = {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}
    scored = host.get_log_probs_and_entropy(
        logits, args=args, with_entropy=True, **lists, **more(host, args, batch)
    )
    # Some releases return the results as the second of a pair.
    scored = scored[1] if isinstance(scored, tuple) else scored
    logprobs, entropy = (torch.cat(scored[name]) for name in ("log_probs", "entropy"))
    old = batch["rollout_log_probs"] if args.use_rollout_logprobs else batch.get("log_probs")
    weights = _token_weights(sum_of_sample_mean, logprobs)
    # The tokens of all responses stand in one row, where ids say which response is whose.
    lengths = torch.tensor(batch["response_lengths"], dtype=torch.int64, device="cpu")
    ids = torch.arange(len(lengths), device="cpu").repeat_interleave(lengths)
    loss_options = {
        "entropy": entropy,
        "entropy_coef": args.entropy_coef,
        "sequence_ids": ids.to(logits.device),
    }
    if args.use_tis:
        loss_options |= {
            "rollout_logprobs": torch.cat(batch["rollout_log_probs"]),
            "rollout_high": args.tis_clip,
        }
    if args.use_kl_loss:
        kind = {"low_var_kl": "k3"}.get(args.kl_loss_type, args.kl_loss_type)
        loss_options |= {
            "ref_logprobs": torch.cat(batch["ref_log_probs"]),
            "kl_coef": args.kl_loss_coef,
            "kl_estimator": kind,
        }
    loss_options = {
        name: value[None] if isinstance(value, Tensor) else value
        for name, value in loss_options.items()
    }
    # Without old log-probabilities the policy itself has sampled, and the ratio is 1.
    old = torch.cat(old) if old else logprobs.detach()
    tokens = logprobs, old, torch.cat(batch["advantages"]), torch.cat(batch["loss_masks"]).bool()
    loss, metrics = _weighted(
        preset, (each[None] for each in tokens), weights[None], **loss_options
    )
    return loss, metrics | {"loss": loss.detach()}


def _token_weights(reduce, logprobs):
    """Return what a host's reduction multiplies each token's loss by, which is its gradient."""
    ones = torch.ones_like(logprobs, requires_grad=True)
    return torch.autograd.grad(reduce(ones), ones)[0]


def _weighted(preset, tokens, weights, **options):
    """The sum of losses times weights, (B, T): as prompt-mean divides each token, by a length of its own."""
    shares = {"loss_agg": "prompt-mean", "num_sequences": 1, "group_lengths": 1 / weights.detach()}
    loss, metrics = policy_loss(*tokens, preset=preset, **shares, **options)
    return loss, {name: metrics[name] for name in _REPORTED if name in metrics}


def _estimated(advantage, token_level_rewards, response_mask, index, **_):
    """verl's and SkyRL's estimator: rewards and mask (B, T), group names (B,) -> advantages and returns, (B, T)."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(index))}
    groups = torch.tensor(
        [numbers[name] for name in index], dtype=torch.int64, device=response_mask.device
    )
    # The hosts may shuffle a batch, and `response_advantages` takes groups of neighbours.
    order, sizes = groups.argsort(stable=True), groups.bincount()
    if (sizes != sizes[0]).any():
        raise ValueError(
            f"fused_{advantage} needs groups of one size, got {sizes.min()} to {sizes.max()} responses"
        )
    rewards, lengths = token_level_rewards.sum(1)[order], response_mask.sum(1)[order]
    advantages = response_advantages(rewards, advantage, group_size=int(sizes[0]), lengths=lengths)
    # Back in the host's order, and on every token that counts.
    spread = torch.empty_like(advantages).index_copy(0, order, advantages)[:, None] * response_mask
    return spread, spread


_REGISTRIES = {
    "verl": ("verl.trainer.ppo.core_algos", _verl, "register_adv_est", {"scalerl"}),
    "skyrl": (_SKYRL, _skyrl, "register_advantage_estimator", set()),
}
_SLIME = (
    "slime.backends.megatron_utils.loss",
    lambda host, *arguments: host.get_rollout_top_p_logprob_kwargs(*arguments),
)
_MILES = (
    "miles.backends.training_utils.loss_hub.losses",
    lambda _, args, batch: {"max_seq_lens": batch.get("max_seq_lens")},
)
_BY_PATH = {
    "prime": _prime,
    "slime": partial(_megatron, *_SLIME),
    "miles": partial(_megatron, *_MILES),
}


def __getattr__(name: str):
    """Return the loss that a path names: <host>_<preset>."""
    # A host imports a loss by its path, so there is no place to register one.
    host, _, preset = name.partition("_")
    if host in _BY_PATH and preset in PRESETS:
        return partial(_BY_PATH[host], preset)
    raise AttributeError(
        f"no loss {name}; a name is {' or '.join(_BY_PATH)}, _ and one of {', '.join(PRESETS)}"
    )
