"""The memory that a step takes at its most: what is there before it, and what its operators allocate and free."""

import contextlib
import gc
import importlib

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fused_rl.trainers import cli
from fused_rl.trainers.run.loop import Run
from tests.trainers import figures


def storages() -> dict[int, int]:
    """Return {address: bytes} of all tensors that Python holds, but for fake ones."""
    gc.collect()
    found_at = {}
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor) and found.layout == torch.strided:
            for tensor in (found, found.grad):
                if tensor is not None and tensor.is_leaf:
                    storage = tensor.untyped_storage()
                    # some fake ones have no address, others 0
                    with contextlib.suppress(RuntimeError):
                        found_at[storage.data_ptr()] = storage.nbytes()
    found_at.pop(0, None)
    return found_at


def peak_of(config) -> int:
    """Train for two steps, and return the most bytes of tensors in the second, when the optimizer has its state."""
    log = Run.log
    left = storages()  # by other tests of this process
    steps = 0
    before = most = 0
    recorded = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def logged(run, *metrics):
        nonlocal steps, before, most
        log(run, *metrics)
        steps += 1
        if steps == 1:
            before = sum(size for _, size in storages().items() - left.items())
            recorded.start()
        elif steps == 2:
            recorded.stop()
            events = recorded.profiler.kineto_results.events()
            changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
            total = 0
            for _, change in sorted(changes, key=lambda change: change[0]):
                total += change
                most = max(most, total)

    module = importlib.import_module(cli.TRAINERS[config.command].module)
    with pytest.MonkeyPatch.context() as patch, figures.drawn():
        patch.setattr(Run, "log", logged)
        module.train(config)
    return before + most
