"""Shards of a sequence, as accelerate's context parallelism and DeepSpeed's sequence parallelism make them: the losses
and gradients of a patched model on each add up to those of the whole.

The model has no layer of attention, which those split in ways of their own, so what is split here is the loss.
"""

import types

import pytest
import torch

from fused_rl.integrations.transformers import UnformedLogits, causal_lm_loss, patch
from tests.distributed import run_distributed
from tests.integrations import tiny_models
from tests.integrations.test_transformers import PRECISIONS

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("cpu")

LENGTH = 16
IGNORED = -100


def model_of(dtype):
    config = tiny_models.config("llama")
    config.num_hidden_layers = 0
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config).to(dtype)


def batch_of(seed=0):
    """Two sequences; no label counts in the last half, whose shards have none."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, tiny_models.VOCABULARY, (2, LENGTH), generator=generator)
    labels = ids.clone()
    labels[0, :3] = IGNORED
    labels[:, LENGTH // 2 :] = IGNORED
    positions = torch.arange(LENGTH).expand(2, -1)
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def shifted(labels):
    return torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:].contiguous()


def autocast_of(precision):
    dtype = PRECISIONS[precision][1]
    return torch.autocast("cpu", dtype or torch.bfloat16, dtype is not None)


def gradients_of(model, loss):
    return [d.double() for d in torch.autograd.grad(loss, [*model.parameters()])]


def exact(seed=0):
    """Loss and gradients in fp64 of stock transformers on the whole batch."""
    model = model_of(torch.float64)
    loss = model(**batch_of(seed)).loss
    return loss.detach(), gradients_of(model, loss)


def assert_close(found, want, precision):
    """The error of a gradient as a part of its norm, of weights that are rounded once."""
    allowed = 1e-5 if precision == "fp32" else 2e-2
    for ours, truth in zip(found, want, strict=True):
        assert (torch.as_tensor(ours) - truth).norm() <= allowed * truth.norm()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("patched", [False, True])
def test_shards_add_up(precision, number, patched):
    """With the count of the whole batch, as Trainer passes it: a tensor of fp32."""
    model = model_of(PRECISIONS[precision][0])
    batch = batch_of()
    labels = batch.pop("labels")
    count = (shifted(labels) != IGNORED).sum() / 1
    total, gradients = 0.0, [0.0] * len([*model.parameters()])
    for part in torch.arange(LENGTH).chunk(number):
        shard = {name: values[:, part] for name, values in batch.items()}
        shift_labels = shifted(labels)[:, part]
        with autocast_of(precision):
            if patched:
                # the labels of a shard are there, and not what counts
                with patch(model):
                    loss = model(
                        **shard,
                        labels=labels[:, part],
                        shift_labels=shift_labels,
                        num_items_in_batch=count,
                    ).loss
            else:
                loss = causal_lm_loss(model(**shard), None, count, shift_labels=shift_labels)
        total = total + loss.detach()
        gradients = [a + b for a, b in zip(gradients, gradients_of(model, loss), strict=True)]
    wanted, truth = exact()
    assert_close([total, *gradients], [wanted, *truth], precision)


def of_deepspeed(rank, world, model):
    """What DeepSpeed's data loader and Trainer make of one batch: each rank has a shard, and a mean over its labels."""
    import deepspeed
    import deepspeed.ops
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter
    from deepspeed.utils import groups
    from transformers.integrations.deepspeed import deepspeed_sp_compute_loss

    deepspeed.ops.__compatible_ops__ = {}  # nothing is compiled for collectives in shared memory
    deepspeed.init_distributed("gloo")
    group = torch.distributed.group.WORLD
    groups._get_sequence_parallel_group = lambda: group
    loader = UlyssesSPDataLoaderAdapter([batch_of()], rank, group, world, torch.device("cpu"))
    shard = next(loader)
    assert shard["input_ids"].shape == (2, LENGTH // world)
    options = types.SimpleNamespace(sp_backend="deepspeed", sp_size=world, sp_enabled=True)
    loss, outputs = deepspeed_sp_compute_loss(None, model, shard, True, options)
    return loss, outputs


def of_accelerate(rank, world, model):
    """What accelerate's context and Trainer make of it: buffers become shards, the count is over processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    batch = batch_of()
    batch["shift_labels"] = shifted(batch["labels"])
    batch["position_ids"] = batch["position_ids"].clone()
    # every rank counts the whole batch, and Trainer divides the sum by the size of the mesh
    count = (batch["shift_labels"] != IGNORED).sum() * world / world
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))["cp"]
    buffers = [*batch.values()]
    options = {"buffer_seq_dims": [1] * len(buffers), "no_restore_buffers": {*buffers}}
    with context_parallel(mesh, buffers=buffers, **options):
        assert batch["input_ids"].shape == (2, LENGTH // world)
        outputs = model(**batch, num_items_in_batch=count)
        return outputs.loss * world, outputs


def on_ranks(rank, world, way):
    results = {}
    for precision, (dtype, _) in PRECISIONS.items():
        model = model_of(dtype)
        patch(model)
        with autocast_of(precision):
            loss, outputs = way(rank, world, model)
        assert isinstance(outputs.logits, UnformedLogits)
        gradients = gradients_of(model, loss)
        results[precision] = [x.detach().double().numpy() for x in (loss, *gradients)]
    return results


@pytest.mark.slow
@pytest.mark.parametrize("way", [of_deepspeed, of_accelerate])
def test_two_ranks_have_the_gradients_of_the_whole(way):
    """Averaged over ranks, as data parallelism does; no label counts on one of DeepSpeed's."""
    ranks = run_distributed(on_ranks, 2, way, timeout=200)
    loss, gradients = exact()
    for precision in PRECISIONS:
        found = zip(*(results[precision] for results in ranks), strict=True)
        means = [sum(of_rank) / len(ranks) for of_rank in found]
        assert_close(means, [loss, *gradients], precision)
