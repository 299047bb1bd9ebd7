"""Log-probabilities, entropy and KL straight from vocabulary logits, and the RL losses on top."""

from fused_rl.advantages import ADVANTAGES, gae, group_advantages, response_advantages
from fused_rl.estimators import kl_estimate
from fused_rl.judging import judge
from fused_rl.kl import token_kl
from fused_rl.linear import linear_token_logprobs, linear_token_loss
from fused_rl.linear_kl import linear_token_kl
from fused_rl.logprobs import token_logprobs
from fused_rl.losses import (
    entropy_bonus,
    importance_ratio,
    policy_loss,
    policy_token_loss,
    value_loss,
)
from fused_rl.masked import masked_mean, masked_sum, masked_var, whiten
from fused_rl.optim import tf_adam_epsilon
from fused_rl.outputs import LinearTokenLoss, TokenLogprobs
from fused_rl.preferences import preference_loss
from fused_rl.presets import PRESETS, PolicyLossOptions, Preset
from fused_rl.token_support import TokenSupport
from fused_rl.topk import topk_kl
from fused_rl.vocab_parallel import vocab_parallel_token_kl, vocab_parallel_token_logprobs

__version__ = "0.1.0"

__all__ = [
    "ADVANTAGES",
    "PRESETS",
    "LinearTokenLoss",
    "PolicyLossOptions",
    "Preset",
    "TokenLogprobs",
    "TokenSupport",
    "entropy_bonus",
    "gae",
    "group_advantages",
    "importance_ratio",
    "judge",
    "kl_estimate",
    "linear_token_kl",
    "linear_token_logprobs",
    "linear_token_loss",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "policy_loss",
    "policy_token_loss",
    "preference_loss",
    "response_advantages",
    "tf_adam_epsilon",
    "token_kl",
    "token_logprobs",
    "topk_kl",
    "value_loss",
    "vocab_parallel_token_kl",
    "vocab_parallel_token_logprobs",
    "whiten",
]
