"""Train with the TRL that is installed, patched and unpatched: `python -m tests.integrations.trl_step`.

Two steps each of GRPO and DPO, since 1.15 also of SFT and distillation, on a model of a few thousand weights, and the
self-test. The last line is JSON; the exit status is 0 if losses and gradients agree, and ours was called for them.
"""

import contextlib
import importlib
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from unittest import mock

import torch

from tests.integrations import trl_runs
from tests.integrations.trl_runs import Cell

# As the integration promises; a difference is relative to the largest element of its tensor.
TOLERANCE = 1e-5
OFF_POLICY = {"num_iterations": 2, "beta": 0.04}
CELLS = [Cell("GRPO", {"temperature": 0.7, **OFF_POLICY}), Cell("DPO")]
# From hidden states, whose functions are ours since 1.15.
OF_HEADS = [Cell("SFT"), Cell("Distillation", {"beta": 0.3, "temperature": 0.7})]


def import_trl() -> None:
    """TRL 1.15 has Triton kernels alone, which the interpreter runs where there is no GPU."""
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    with mock.patch.dict(os.environ, interpreted):
        importlib.import_module("trl.trainer.utils")

        with contextlib.suppress(ImportError):
            importlib.import_module("trl.kernels.chunked_divergence")


@contextlib.contextmanager
def counted():
    """Count the calls of ours by name."""
    from fused_rl.integrations import trl as integration

    calls = Counter()
    with contextlib.ExitStack() as stack:
        for name in ("token_logprobs", "row_entropy", "HeadLogprobs", "HeadDivergence"):
            ours = getattr(integration, name)
            called = ours.apply if isinstance(ours, type) else ours

            def counting(*args, called=called, name=name, **kwargs):
                calls[name] += 1
                return called(*args, **kwargs)

            counting.apply = counting
            stack.enter_context(mock.patch.object(integration, name, counting))
        yield calls


def run(cell, patched):
    """A run of a cell, and how often ours was called."""
    from fused_rl.integrations import trl as integration

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, trl_runs.ENVIRONMENT))
        if patched:
            stack.enter_context(integration.patch(strict=True))
        calls = stack.enter_context(counted())
        return trl_runs.record(trl_runs.build(cell, folder)), calls


def difference(run, reference):
    """The largest of losses, relative where above 1, and of gradients, relative to the largest of their tensor."""
    pairs = zip(run.losses, reference.losses, strict=True)
    largest = max(abs(one - other) / max(1, abs(other)) for one, other in pairs)
    for one, other in zip(run.grads, reference.grads, strict=True):
        for name, tensor in other.items():
            size = tensor.abs().max().item() or 1.0
            largest = max(largest, (one[name] - tensor).abs().max().item() / size)
    return largest


def compare(cell):
    """How far patched and unpatched are apart, and what was called; or an error in a line."""
    try:
        (theirs, _), (ours, calls) = run(cell, False), run(cell, True)
        return {"difference": difference(ours, theirs), "calls": dict(calls)}
    # A release may fail in any way, and the other trainers are of interest still.
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}


def agrees(step):
    return step.get("difference", 1.0) <= TOLERANCE and bool(step["calls"])


def main() -> int:
    """Print the result as a line of JSON, and return the exit status."""
    warnings.simplefilter("ignore")
    import transformers

    import_trl()
    import fused_rl.integrations

    rows = fused_rl.integrations.status("trl")
    cells = CELLS + OF_HEADS * ("trl.kernels.chunked_divergence" in sys.modules)
    steps = {cell.trainer: compare(cell) for cell in cells}
    tested = {row.function: row.self_test for row in rows}
    left = [row.function for row in rows if row.state == "left to the host"]
    result = {
        "host": "trl",
        "release": rows[0].release,
        "transformers": transformers.__version__,
        "self_test": tested,
        "left": left,
        "steps": steps,
        "ok": not left and all(map(agrees, steps.values())),
    }
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
