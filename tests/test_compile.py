"""Every public op under torch.compile: the values and gradients of an eager call, at every number of rows.

An op is one call within the graph, so that `fullgraph=True` works, or it breaks the graph.
"""

import pytest
import torch

import fused_rl
from tests.hostile import OPS, Case, Row, build
from tests.marks import slow

# The second number of rows makes a symbol of it, the third takes the graph of the second.
LENGTHS = (5, 9, 14)
VOCAB, WIDTH = 33, 16
BREAKS_GRAPH = {
    "linear_token_logprobs",
    "linear_token_loss",
    "linear_cross_entropy",
    "linear_token_kl",
    "vocab_parallel_token_logprobs",
    "vocab_parallel_token_kl",
}
# In place is refused: `test_inplace_under_compile_raises`.
FORMS = [name for name in OPS if name != "token_logprobs, inplace"]


def whole_name(form):
    return form.partition(",")[0]


@pytest.fixture(autouse=True)
def _compiler(monkeypatch):
    """The CPU path, and nothing that another test has compiled."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module", autouse=True)
def _one_rank():
    """A group of this process alone, for the ops over split vocabularies."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def normal(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def batch_of(rows, masked=True):
    row = Row("ordinary", "another", "nowhere", "-1e4", "both")
    options = ("contiguous", "per row", None, masked, "jensen-shannon", 2, rows)
    return build(Case((row,) * rows, VOCAB, torch.float32, *options))


def leaves_of(form, batch):
    """Of ops over hidden states the head is the same for every number of rows."""
    rows = len(batch.logits)
    head = normal(VOCAB, WIDTH, seed=1), normal(VOCAB, seed=2)
    leaves = {
        "one": (batch.logits,),
        "two": (batch.logits, batch.ref_logits),
        "head": (normal(rows, WIDTH, seed=3), *head),
        "two_heads": (normal(rows, WIDTH, seed=3), *head, normal(rows, WIDTH, seed=4), *head),
    }[OPS[form].leaves.__name__]
    return [leaf.clone().requires_grad_() for leaf in leaves]


def called(form):
    """(batch, *leaves) -> outputs, the op in the middle of other operations."""
    op = OPS[form].ours
    # tests/hostile.py splits the vocabulary within one process, which no compiler follows
    if form.startswith("vocab_parallel"):
        public = getattr(fused_rl, whole_name(form))
        first = () if "kl" in form else (0,)

        def op(*tensors, **options):
            return public(*tensors, *first, **options)

    def call(batch, *leaves):
        outputs = OPS[form].call(op, batch, *(leaf * 2 for leaf in leaves))
        return [output * 0.5 for output in outputs]

    return call


def step(call, leaves, *arguments):
    """Outputs and gradients, of leaves without any zeros."""
    outputs = call(*arguments)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else [*outputs]
    weights = [torch.linspace(0.5, 1, o.numel()).view(o.shape) for o in outputs]
    total = sum((o * w).sum() for o, w in zip(outputs, weights, strict=True))
    gradients = []
    if total.requires_grad:
        options = {"allow_unused": True, "materialize_grads": True}
        gradients = torch.autograd.grad(total, leaves, **options)
    return [output.detach() for output in outputs], [*gradients]


def assert_same(compiled, eager, **tolerances):
    tolerances = tolerances or {"rtol": 2e-5, "atol": 2e-6}
    torch.testing.assert_close(compiled, eager, **tolerances)


# A compilation takes seconds: the forms that have another code path of their own under it.
FAST = ("linear_token_logprobs", "linear_token_loss", "linear_token_kl", "token_kl")


@pytest.mark.parametrize("backend", ["aot_eager", slow("inductor")])
@pytest.mark.parametrize("dynamic", [None, slow(True)])
@pytest.mark.parametrize("form", [name if name in FAST else slow(name) for name in FORMS])
def test_ops_at_several_lengths(form, dynamic, backend):
    call = called(form)
    fullgraph = whole_name(form) not in BREAKS_GRAPH
    compiled = torch.compile(call, dynamic=dynamic, backend=backend, fullgraph=fullgraph)
    for rows in LENGTHS:
        batch = batch_of(rows)
        leaves = leaves_of(form, batch)
        arguments = leaves, batch, *leaves
        assert_same(step(compiled, *arguments), step(call, *arguments))


@pytest.mark.parametrize("name", sorted(BREAKS_GRAPH))
def test_fullgraph_is_refused_with_the_reason(name):
    compiled = torch.compile(called(name), fullgraph=True, backend="eager")
    batch = batch_of(5)
    with pytest.raises(Exception, match="leave out fullgraph"):
        compiled(batch, *leaves_of(name, batch))
