"""Kept sets in several processes: sharded weights, a sharded vocabulary."""

import itertools
import os

import pytest
import torch

import fused_rl
from fused_rl import TokenSupport, reference
from tests.distributed import ragged_batches, run_distributed, zero_engine
from tests.kept_sets import OPTIONS, outputs_and_gradient, random_logits, some_rows, upstream_of
from tests.marks import slow
from tests.one_process import in_one_process


class Head(torch.nn.Module):
    """A layer and the head, with the op in the forward of the module that is sharded."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(131, 16)
        self.layer = torch.nn.Linear(16, 16)
        self.head = torch.nn.Linear(16, 131)

    def forward(self, module, tokens, advantages):
        hidden = self.layer(self.embed(tokens[:, :-1])).tanh()
        targets = tokens[:, 1:]
        near = (targets[..., None] + 17 * torch.arange(4)) % 131
        lists = [row[: len(row) if i % 3 else 0] for i, row in enumerate(near.flatten(0, 1).tolist())]
        options = {
            "bias": self.head.bias,
            "mask": targets % 3 > 0,
            "support": TokenSupport.from_lists(lists),
        }
        logprobs, entropy, _ = module.linear_token_logprobs(hidden, self.head.weight, targets, **options)
        return -(logprobs * advantages + 0.1 * entropy.square()).sum()


BATCHES = ragged_batches([(12, 9), (5, 8)])


def trained(model, optimizer, mine, module, world, backward):
    for _ in range(2):
        optimizer.zero_grad()
        for batch in mine:
            backward(model(module, *batch) / 20 * world)
        optimizer.step()


def sharded_training(rank, world):
    import deepspeed
    from torch.distributed.fsdp import fully_shard

    os.environ["TRITON_INTERPRET"] = "0"
    model = Head()
    fully_shard(model.head)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trained(model, optimizer, BATCHES[rank], fused_rl, world, lambda loss: loss.backward())
    by_fsdp = {name: p.full_tensor().detach().numpy() for name, p in model.named_parameters()}

    model = Head()
    engine = zero_engine(model, torch.optim.SGD(model.parameters(), lr=0.5), 3)
    assert engine.module.head.weight.numel() == 0
    for _ in range(2):
        for batch in BATCHES[rank]:
            engine.backward(engine(fused_rl, *batch) / 20 * world)
        engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        by_zero = {name: p.detach().clone().numpy() for name, p in engine.module.named_parameters()}
    return by_fsdp, by_zero


@pytest.mark.usefixtures("cpu")
@pytest.mark.slow
def test_fsdp_and_zero_3():
    """Two processes train as one does on the whole batch with the reference."""
    model = Head()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    everything = [*itertools.chain(*BATCHES)]
    trained(model, optimizer, everything, reference, 1, lambda loss: loss.backward())
    for of_rank in run_distributed(sharded_training, 2):
        for found in of_rank:
            for name, p in model.named_parameters():
                torch.testing.assert_close(torch.from_numpy(found[name]), p.detach(), rtol=0, atol=3e-6, msg=name)


def by_hand(logits, targets, lists, *, temperature=1.0, softcap=None, mask=None):
    """Position t scores the target of t + 1 among its own kept ids: (3, B, T - 1) logprobs, entropy, lse."""
    rows = []
    for b, t in itertools.product(range(targets.shape[0]), range(targets.shape[1] - 1)):
        kept = lists[b * targets.shape[1] + t + 1]
        z = logits[b, t] if softcap is None else softcap * torch.tanh(logits[b, t] / softcap)
        z = z / (temperature[b, t] if isinstance(temperature, torch.Tensor) else temperature)
        of_kept = z[kept] if len(kept) else z
        lse = of_kept.logsumexp(-1)
        lp = of_kept - lse
        row = torch.stack([z[targets[b, t + 1]] - lse, -(lp.exp() * lp).sum(), lse])
        rows.append(row if mask is None or mask[b, t] else 0 * row)
    return torch.stack(rows, 1).view(3, targets.shape[0], -1)


PLACED = {
    "plain": {},
    "temperature, softcap": {"temperature": 0.7, "softcap": 6.0},
    "per row, mask": {"temperature": torch.linspace(0.5, 2, 9).view(3, 3), "mask": torch.arange(9).view(3, 3) % 4 != 2},
}


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("options", PLACED.values(), ids=PLACED)
@pytest.mark.parametrize("bounds", [[0, 603], [0, 200, 603], [0, 7, 200, 603], [0, 1, 2, 350, 603]], ids=len)
def test_shift_of_kept_sets_of_a_split_vocabulary(bounds, options):
    """1 to 4 ranks, some without any id of a set: values and gradients, the last position's exactly 0."""
    lists, targets = some_rows()
    targets, support = targets.view(3, 4), TokenSupport.from_lists(lists)
    logits = random_logits(12).view(3, 4, -1)
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    op = in_one_process(fused_rl.vocab_parallel_token_logprobs, bounds)
    found = torch.stack([*op(leaf, targets, shift=True, support=support, **options)])
    wanted = by_hand(exact, targets, lists, **options)
    torch.testing.assert_close(found.double(), wanted, rtol=3e-6, atol=3e-6)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    (gradient,) = torch.autograd.grad(found, leaf, upstream)
    torch.testing.assert_close(
        gradient.double(), torch.autograd.grad(wanted, exact, upstream.double())[0], rtol=3e-6, atol=3e-6
    )
    assert (gradient[:, -1] == 0).all()
    with pytest.raises(ValueError, match="support has 9 rows, the targets .3, 4. have 12; with shift=True it has"):
        op(leaf, targets, shift=True, support=support.select(torch.arange(9)), **options)


def check_shards(rank, world, interpret):
    """Vocabulary split unevenly: values and gradients of the reference, errors on every rank."""
    os.environ["TRITON_INTERPRET"] = interpret
    vocab, starts = 703, [0, 200, 703]
    lists, targets = some_rows(vocab=vocab, longest=300)
    lists[4] = torch.arange(690, 703)  # nothing of it on the first rank
    targets[4] = 699
    support = TokenSupport.from_lists(lists)
    logits = random_logits(len(lists), vocab)
    logits[3] += 1000.0
    logits[6, lists[6][:60]] = -torch.inf
    logits[6, targets[6]] = 0.0
    columns = slice(starts[rank], starts[rank + 1])
    upstream = upstream_of(targets)
    for options in list(OPTIONS.values())[1 if interpret == "1" else 0 :]:
        exact = outputs_and_gradient(reference, logits.double(), targets, upstream, support=support, **options)
        leaf = logits[:, columns].clone().requires_grad_()
        out = fused_rl.vocab_parallel_token_logprobs(leaf, targets, columns.start, support=support, **options)
        found = [*out, *torch.autograd.grad(out, leaf, upstream)]
        for a, b in zip(found, [*exact[:3], exact[3][:, columns]], strict=True):
            torch.testing.assert_close(a.double(), b, rtol=3e-6, atol=3e-6)
    assert found[0][0] == 0
    assert found[1][0] == 0
    assert not found[3][0].isnan().any()
    with pytest.raises(ValueError, match="is not in its kept set"):
        fused_rl.vocab_parallel_token_logprobs(leaf, targets + 1, columns.start, support=support)
    beyond = TokenSupport.from_lists([[1, 703], [1]])
    with pytest.raises(ValueError, match="of the 2 kept ids of row 0 the ranks hold 1; check vocab_start"):
        fused_rl.vocab_parallel_token_logprobs(leaf[:2], torch.ones(2).long(), columns.start, support=beyond)
    return True


@pytest.mark.parametrize("interpret", ["0", slow("1")])
def test_vocabulary_shards(interpret):
    assert run_distributed(check_shards, 2, interpret, timeout=240) == [True] * 2
