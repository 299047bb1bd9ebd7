"""Layers that are compiled one by one: a graph for all lengths, none for sampling, and the bits of an eager run.

The graphs are run by PyTorch's own operators; what its compiler makes of them rounds otherwise.
"""

import pytest
import torch

from fused_rl.trainers.base.text import InputError
from tests import digests
from tests.trainers import tiny


@pytest.fixture
def graphs(monkeypatch):
    """The numbers of graphs and of breaks since the test began."""
    from torch._dynamo.utils import counters

    compile_layer = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda self, **options: compile_layer(self, **options, backend="eager"),
    )
    torch._dynamo.reset()
    counters.clear()
    yield lambda: (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))
    torch._dynamo.reset()


CHECKPOINTS = {"gradient_checkpointing": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more", "most"),
    [
        # Rows in which prompts are shared have a mask, the others none; adapters have another forward.
        ("grpo-zero2", CHECKPOINTS, 12),
        ("grpo-lora", {}, 12),
        ("ppo-zero0", {}, 12),
        ("sft-packed", CHECKPOINTS, 6),
    ],
)
def test_a_run_has_few_graphs_and_the_bits_of_an_eager_one(name, more, most, tmp_path, graphs):
    digests.make_files(tmp_path)
    command, options, _ = digests.CASES[name]
    found = []
    for compiles in (False, True):
        output_dir = tmp_path / "runs" / str(compiles)
        given = options | more | {"torch_compile": compiles}
        digests.train(0, 1, command, digests.words_of(command, given, tmp_path, output_dir))
        found.append(digests.digest(output_dir))
    assert list(digests.differences(*found, exact=True, tolerance=0.0)) == []
    number, breaks = graphs()
    assert 0 < number <= most and breaks == 0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"zero_stage": 3}, "needs whole layers"),
        ({"sequence_parallel": 2}, "needs whole layers"),
        (CHECKPOINTS | {"checkpoint_activations_on": "cpu"}, "cannot follow tensors"),
    ],
)
def test_layers_that_are_not_whole_on_a_device_are_not_compiled(options, problem):
    with pytest.raises(InputError, match=f"torch_compile=True {problem}"):
        tiny.config_of("sft", torch_compile=True, **options).check()
