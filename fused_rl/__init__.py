"""Log-probabilities, entropy and KL straight from vocabulary logits, and the RL losses on top."""

from fused_rl.base.masked import masked_mean, masked_sum, masked_var, whiten
from fused_rl.base.outputs import LinearTokenLoss, SampledTokens, TokenLogprobs
from fused_rl.judging import judge
from fused_rl.objectives.advantages import ADVANTAGES, gae, group_advantages, response_advantages
from fused_rl.objectives.estimators import kl_estimate
from fused_rl.objectives.losses import (
    entropy_bonus,
    importance_ratio,
    policy_loss,
    policy_token_loss,
    value_loss,
)
from fused_rl.objectives.preferences import (
    kl_baseline,
    preference_loss,
    unpaired_preference_loss,
)
from fused_rl.objectives.presets import PRESETS, PolicyLossOptions, Preset
from fused_rl.ops.kl import token_kl
from fused_rl.ops.linear import linear_token_logprobs, linear_token_loss
from fused_rl.ops.linear_cross_entropy import linear_cross_entropy
from fused_rl.ops.linear_kl import linear_token_kl
from fused_rl.ops.logprobs import token_logprobs
from fused_rl.ops.sampling import sample_token
from fused_rl.ops.token_support import TokenSupport
from fused_rl.ops.topk import topk_kl
from fused_rl.ops.vocab_parallel import vocab_parallel_token_kl, vocab_parallel_token_logprobs
from fused_rl.optim import tf_adam_epsilon

__version__ = "0.1.0"

__all__ = [
    "ADVANTAGES",
    "PRESETS",
    "LinearTokenLoss",
    "PolicyLossOptions",
    "Preset",
    "SampledTokens",
    "TokenLogprobs",
    "TokenSupport",
    "entropy_bonus",
    "gae",
    "group_advantages",
    "importance_ratio",
    "judge",
    "kl_baseline",
    "kl_estimate",
    "linear_cross_entropy",
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
    "sample_token",
    "tf_adam_epsilon",
    "token_kl",
    "token_logprobs",
    "topk_kl",
    "unpaired_preference_loss",
    "value_loss",
    "vocab_parallel_token_kl",
    "vocab_parallel_token_logprobs",
    "whiten",
]
