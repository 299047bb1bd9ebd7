"""verl and OpenRLHF: their functions from logits, and verl's head; memory includes the gradients."""

import torch

from bench.repro.integrations.turns import both, cost, with_gradients
from tests.hosts import cases

ROWS, HIDDEN, VOCAB = 512, 512, 32000


def logits_of(dtype):
    torch.manual_seed(0)
    logits = torch.randn(ROWS, VOCAB).mul_(2).to(dtype).requires_grad_()
    return logits, torch.randint(0, VOCAB, (ROWS,))


def head_of(dtype):
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN).mul_(0.1).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, VOCAB, (ROWS,))


def verl_costs(rounds: int):
    """Its functions are looked up at each call, so that the patch is seen."""
    import verl.utils.torch_functional as functional
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    from fused_rl.integrations import verl as integration

    def from_logits(logits, labels):
        entropy = functional.entropy_from_logits(logits)
        logprobs = functional.logprobs_from_logits(logits, labels, inplace_backward=False)
        (logprobs.float() + entropy.float()).sum().backward()

    def in_chunks(logits, labels):
        entropy = functional.entropy_from_logits_with_chunking(logits)
        logprobs = functional.logprobs_from_logits(logits, labels, inplace_backward=False)
        (logprobs.float() + entropy.float()).sum().backward()

    def from_hidden(hidden, weight, labels):
        logprobs, entropy = FusedLinearForPPO().forward(hidden, weight, labels)
        (logprobs + entropy.float()).sum().backward()

    # What is called, and on what.
    calls = {
        "log-probability and entropy, fp32": (from_logits, logits_of(torch.float32)),
        "log-probability and entropy, bf16": (from_logits, logits_of(torch.bfloat16)),
        "the same, entropy in chunks, bf16": (in_chunks, logits_of(torch.bfloat16)),
        "`FusedLinearForPPO`, fp32": (from_hidden, head_of(torch.float32)),
        "`FusedLinearForPPO`, bf16": (from_hidden, head_of(torch.bfloat16)),
    }
    for what, (function, inputs) in calls.items():
        yield cost(what, both("verl", integration, with_gradients(function, inputs)), rounds)


def openrlhf_costs(rounds: int):
    """OpenRLHF's actor casts its logits to fp32 first, which is in both."""
    from openrlhf.models import utils

    from fused_rl.integrations import openrlhf as integration

    def as_the_actor(logits, labels):
        logits = logits.to(torch.float32)
        found = utils.compute_entropy(logits) + utils.log_probs_from_logits(logits, labels)
        found.sum().backward()

    calls = {
        "log-probability and entropy, fp32": logits_of(torch.float32),
        "the same, bf16 logits cast as the actor casts": logits_of(torch.bfloat16),
    }
    for what, inputs in calls.items():
        yield cost(
            what, both("OpenRLHF", integration, with_gradients(as_the_actor, inputs)), rounds
        )


def verl_errors():
    import verl.utils.torch_functional as module

    from fused_rl.integrations import verl as integration

    return errors("verl", integration, module, "logprobs_from_logits", "entropy_from_logits")


def openrlhf_errors():
    from openrlhf.models import utils

    from fused_rl.integrations import openrlhf as integration

    return errors("OpenRLHF", integration, utils, "log_probs_from_logits", "compute_entropy")


def errors(host, integration, module, logprobs: str, entropy: str):
    """Largest error of log-probability and entropy on the hard cases, by these functions of the host and by ours."""
    for dtype in (torch.float32, torch.bfloat16):
        for case in cases.HARD_CASES:
            logits, labels = cases.hard_logits(case, dtype)
            calls = {
                "logprobs": lambda x=logits, at=labels: getattr(module, logprobs)(x, at),
                "entropy": lambda x=logits: getattr(module, entropy)(x),
            }
            row = {"largest error": f"{case}, {str(dtype).removeprefix('torch.')}"}
            for what, call in calls.items():
                exact, _ = cases.truth(what, logits, labels)
                for name, run in both(host, integration, call).items():
                    row[f"{what}, {name}"] = cases.error(run(), exact)
            yield row
