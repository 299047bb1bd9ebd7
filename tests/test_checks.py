"""What is passed in place of a tensor is told in one short line, with the tensor that it holds."""

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

import fused_rl

LOGITS = torch.zeros(2, 3, 50)
TARGETS = torch.zeros(2, 3, dtype=torch.int64)
HIDDEN, HEAD = torch.zeros(2, 3, 4), torch.nn.Linear(4, 50)
PER_TOKEN, MASK = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
GIVEN = {
    "CausalLMOutputWithPast, whose .logits is a tensor": CausalLMOutputWithPast(logits=LOGITS),
    "TokenLogprobs, whose .logprobs is a tensor": fused_rl.token_logprobs(LOGITS, TARGETS),
    "Linear, whose .weight is a tensor": HEAD,
    "dict {'logits': tensor": {"logits": LOGITS},
    r"list \[\[\[0.0": LOGITS.tolist(),
    r"ndarray array\(\[\[\[0": LOGITS.numpy(),
    "NoneType None": None,
}
CALLS = {
    "token_logprobs": lambda x: fused_rl.token_logprobs(x, TARGETS),
    "targets": lambda x: fused_rl.token_logprobs(LOGITS, x),
    "token_kl": lambda x: fused_rl.token_kl(x, LOGITS),
    "ref_logits": lambda x: fused_rl.token_kl(LOGITS, x),
    "hidden": lambda x: fused_rl.linear_token_logprobs(x, HEAD.weight, TARGETS),
    "weight": lambda x: fused_rl.linear_token_logprobs(HIDDEN, x, TARGETS),
    "policy_loss": lambda x: fused_rl.policy_loss(x, None, PER_TOKEN, MASK),
    "kl_estimate": lambda x: fused_rl.kl_estimate(x, PER_TOKEN),
    "ref_logprobs": lambda x: fused_rl.kl_estimate(PER_TOKEN, x),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("came", GIVEN)
def test_what_is_no_tensor_is_one_short_line(call, came):
    with pytest.raises(ValueError, match=f"must be .*tensor.*, got {came}") as refused:
        CALLS[call](GIVEN[came])
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 200
