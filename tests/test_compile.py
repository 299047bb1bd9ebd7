"""Every public op under torch.compile: the values and gradients of an eager call, at every number of rows.

An op is a part of the graph, so that `fullgraph=True` works, or it breaks the graph: `BREAKS_GRAPH`, of which
docs/numerics.md has the table.
"""

from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import fused_rl
from tests import hostile_tokens
from tests.hostile import OPS, Case, Row, build
from tests.marks import slow
from tests.test_hostile import OTHERS

NUMERICS = Path(__file__).parents[1] / "docs" / "numerics.md"
# The second number of rows makes a symbol of it, the third takes the graph of the second.
LENGTHS = (5, 9, 14)
VOCAB, WIDTH = 33, 16
# Forms that are always eager: they choose tiles by the rows that count, or reduce over ranks.
BREAKS_GRAPH = (
    "linear_token_logprobs",
    "linear_token_loss",
    "linear_cross_entropy",
    "linear_token_kl",
    "vocab_parallel_token_logprobs",
    "vocab_parallel_token_kl",
)
# In place is refused: `test_inplace_under_compile_raises`.
FORMS = [name for name in OPS if "inplace" not in name]
# Of functions with several forms one.
CHOSEN = ("kl_estimate, k3", "importance_ratio, sequence", "policy_loss, gspo")
CHOSEN += ("policy_token_loss, cispo",)
TOKENS = [name for name in hostile_tokens.FUNCTIONS if "," not in name or name in CHOSEN]


def whole_name(form):
    return form.partition(",")[0]


def breaks_graph(form):
    return whole_name(form) in BREAKS_GRAPH


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
    if torch.distributed.is_initialized():  # what trained in this process before leaves its group
        yield
        return
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def normal(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def batch_of(rows):
    row = Row("ordinary", "another", "nowhere", "-1e4", "both")
    options = ("contiguous", "per row", None, 0.3, "jensen-shannon", 2, rows)
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


# A compilation takes seconds: ops with a code path of their own under it in every way, other forms in one each.
WAYS = [(None, "aot_eager"), (True, "inductor"), (None, "inductor"), (True, "aot_eager")]
EVERY_WAY = ("linear_token_loss", "linear_token_kl", "token_kl")
CELLS = [(form, *WAYS[0]) for form in EVERY_WAY]
CELLS += [slow(form, *way) for form in EVERY_WAY for way in WAYS[1:3]]
CELLS += [
    slow(form, *WAYS[i % len(WAYS)])
    for i, form in enumerate(FORMS)
    if form not in EVERY_WAY and not ("," in form and breaks_graph(form))
]


@pytest.mark.parametrize(("form", "dynamic", "backend"), CELLS)
def test_ops_at_several_lengths(form, dynamic, backend):
    call = called(form)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(
        call, dynamic=dynamic, backend=counter, fullgraph=not breaks_graph(form)
    )
    for rows in LENGTHS:
        batch = batch_of(rows)
        leaves = leaves_of(form, batch)
        arguments = leaves, batch, *leaves
        assert_same(step(compiled, *arguments), step(call, *arguments))
    # One graph of the first length, and one of all others.
    assert counter.frame_count <= 2 or breaks_graph(form)


@pytest.mark.parametrize("form", BREAKS_GRAPH)
def test_fullgraph_is_refused_with_the_reason(form):
    compiled = torch.compile(called(form), fullgraph=True, backend="eager")
    batch = batch_of(5)
    with pytest.raises(Exception, match="leave out fullgraph"):
        compiled(batch, *leaves_of(form, batch))


@pytest.mark.parametrize("backend", ["aot_eager", slow("inductor")])
def test_a_backward_pass_under_autocast_of_a_forward_pass_without(backend):
    hidden, weight = normal(64, 128, seed=0), normal(300, 128, seed=1)
    targets = torch.arange(64)

    def loss_of(hidden, weight):
        return fused_rl.linear_token_logprobs(hidden, weight, targets).logprobs.sum()

    gradients = []
    for function in (loss_of, torch.compile(loss_of, backend=backend)):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        loss = function(*leaves)
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
        gradients.append([x.grad for x in leaves])
    torch.testing.assert_close(gradients[1], gradients[0])


def test_the_page_says_which_calls_break_the_graph():
    page = NUMERICS.read_text()
    section = page.split("### Under torch.compile\n")[1].split("\n## ")[0]
    functions = set(fused_rl.__all__) - OTHERS
    rows = {
        "works": ", ".join(f"`{name}`" for name in sorted(functions - {*BREAKS_GRAPH})),
        "breaks the graph": ", ".join(f"`{name}`" for name in sorted(BREAKS_GRAPH)),
    }
    lines = [f"| {result} | {calls} |" for result, calls in rows.items()]
    assert "\n".join(lines) in section, "\n".join(["expected:", *lines])
