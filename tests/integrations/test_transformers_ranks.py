"""A patched model on two ranks under ZeRO 3, FSDP2 and torch.compile, beside the model's own on one process."""

import os

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from fused_rl.integrations.transformers import UnformedLogits, patch
from tests.distributed import run_distributed, zero_engine
from tests.integrations import tiny_models

pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cpu")]

ROWS = tiny_models.rows(4)
COUNT = sum(int((row["labels"][1:] != -100).sum()) for row in ROWS)  # each rank's rows have another


def batch_of(rows):
    return {**tiny_models.collate(rows), "num_items_in_batch": COUNT}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


def step(model, loss, optimizer):
    loss.backward()
    optimizer.step()
    return {name: weight.detach() for name, weight in model.named_parameters()}


def zero3(model, loss_of):
    import deepspeed

    engine = zero_engine(model, sgd(model), 3)
    assert model.lm_head.weight.numel() == 0  # else nothing is sharded, and nothing tested
    engine.backward(loss_of(engine))
    engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def fsdp2(model, loss_of):
    fully_shard(model.model.layers[0])
    if not model.config.tie_word_embeddings:
        # A group of its own: where the loss is made, the weight is a shard again.
        fully_shard(model.lm_head)
    fully_shard(model)
    optimizer = sgd(model)  # before the forward, which leaves whole weights in the root
    return {
        name: weight.full_tensor()
        for name, weight in step(model, loss_of(model), optimizer).items()
    }


def compiled(model, loss_of):
    os.environ.pop("TORCHDYNAMO_DISABLE")
    model.compile()
    # As Trainer has it; kept, because it averages in the backward.
    options = {"find_unused_parameters": True}
    averaged = torch.nn.parallel.DistributedDataParallel(model, **options)
    loss = loss_of(averaged)
    # The whole backbone, without and with gradients.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    return step(model, loss, sgd(model))


def on_ranks(rank, world, way, name):
    model, batch, seen = tiny_models.model(name), batch_of(ROWS[rank::world]), []
    patch(model)

    def loss_of(wrapped):
        with torch.no_grad():
            seen.append(wrapped(**batch).logits.float().numpy())
        outputs = wrapped(**batch)
        assert isinstance(outputs.logits, UnformedLogits)
        seen.append(outputs.loss.item())
        return outputs.loss * world  # whose gradients are averaged over ranks

    return {key: weight.numpy() for key, weight in way(model, loss_of).items()}, *seen


# Compiled, the tied head is the harder one.
WAYS = [(way, name) for way in (zero3, fsdp2) for name in ("qwen2", "qwen2-tied")]
WAYS.append((compiled, "qwen2-tied"))


@pytest.mark.parametrize(("way", "name"), WAYS)
def test_two_ranks_train_as_one_process_does(way, name):
    model = tiny_models.model(name)
    logits = [model(**batch_of(ROWS[rank::2])).logits.detach() for rank in range(2)]
    loss = model(**batch_of(ROWS)).loss
    expected = step(model, loss, sgd(model))
    ranks = run_distributed(on_ranks, 2, way, name, timeout=500)
    assert sum(part for _, _, part in ranks) == pytest.approx(loss.item(), rel=1e-6)
    for rank, (weights, formed, _) in enumerate(ranks):
        torch.testing.assert_close(torch.as_tensor(formed), logits[rank])
        for key, weight in expected.items():
            torch.testing.assert_close(torch.as_tensor(weights[key]), weight, rtol=0, atol=3e-6)
