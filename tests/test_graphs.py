"""On a GPU: every op's forward and backward pass in a captured graph, and under torch.compile."""

import pytest
import torch

import fused_rl
from fused_rl import TokenSupport
from tests.paths import DEVICE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cpu", reason="graphs are captured on a GPU"),
]
N, V, H = 512, 50257, 256
OPS = (
    "token_logprobs",
    "2 targets",
    "support",
    "token_kl",
    "jensen-shannon",
    "linear_token_logprobs",
)


def op(name):
    """The call of an op on its leaves, and the leaves."""
    torch.manual_seed(0)
    logits, targets = (
        torch.randn(N, V, device=DEVICE).bfloat16(),
        torch.randint(V, (N,), device=DEVICE),
    )
    several = torch.stack([targets, (targets + 1) % V], 1)
    other = logits + 0.5
    support = TokenSupport(several.sort().values.flatten(), 2 * torch.arange(N + 1, device=DEVICE))
    if name == "linear_token_logprobs":
        leaves = [torch.randn(rows, H, device=DEVICE).bfloat16() for rows in (N, V)]
        return lambda *leaves: fused_rl.linear_token_logprobs(*leaves, targets)[:2], leaves
    calls = {
        "token_logprobs": lambda x: fused_rl.token_logprobs(x, targets)[:2],
        "2 targets": lambda x: fused_rl.token_logprobs(x, several)[:2],
        "support": lambda x: fused_rl.token_logprobs(x, targets, support=support)[:2],
        "token_kl": lambda x: (fused_rl.token_kl(x, other),),
        "jensen-shannon": lambda x: (fused_rl.token_kl(x, other, direction="jensen-shannon"),),
    }
    return calls[name], [logits]


def step(call, leaves):
    """The outputs' sum, and the gradients."""
    total = sum(output.sum() for output in call(*leaves))
    return [total.detach(), *torch.autograd.grad(total, leaves)]


@pytest.mark.parametrize("name", OPS)
def test_a_captured_step_replays_with_the_bits_of_a_call(name):
    call, leaves = op(name)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    beside = torch.cuda.Stream()
    with torch.cuda.stream(beside):
        step(call, leaves)
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step(call, leaves)
    with torch.no_grad():
        leaves[0].add_(1)
    graph.replay()
    assert all(map(torch.equal, kept, step(call, leaves)))


@pytest.mark.parametrize("name", OPS[::3])
def test_compiled_with_graphs_it_is_the_same(name):
    call, leaves = op(name)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    compiled = torch.compile(call, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        found = [x.clone() for x in step(compiled, leaves)]
    for mine, exact in zip(found, step(call, leaves), strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampled_steps_are_captured_and_draw_what_others_do(temperature, capsys):
    for needed in ("deepspeed", "pydantic"):
        pytest.importorskip(needed)
    from fused_rl.trainers.rollouts.generate import TransformersSampler
    from fused_rl.trainers.rollouts.sampling import Sampling
    from tests.trainers.test_packing import model

    sampler = TransformersSampler(model("Llama").eval().to(DEVICE), pad_id=0, batch_size=16)
    prompts = [[5 + i % 3] * (3 + i % 4) for i in range(16)]
    sampling = Sampling(temperature, 40, (3, 4, 20))
    found = []
    for captures in (True, False):
        sampler.graphs.is_on = captures
        torch.manual_seed(0)
        found.append([response.ids for response in sampler.sample(prompts, sampling)])
        assert sampler.graphs.is_on == captures
    assert found[0] == found[1] and sampler.graphs.unchecked == 0
    assert capsys.readouterr().out == ""
