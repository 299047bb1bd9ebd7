"""`fused_rl.integrations` inside the trainers of TRL: whole runs, patched against unpatched."""

import pytest

from tests.integrations import trl_step
from tests.integrations.trl_runs import Cell
from tests.marks import slow

# The second step's ratios are not 1, and the reference has a say.
OFF_POLICY = {"num_iterations": 2, "beta": 0.04}

# One cell of each of these primitives' users stays in the fast suite; the other trainers read no more than these.
FAST_CELLS = [
    Cell("GRPO", {"temperature": 0.7, "entropy_coef": 0.1, **OFF_POLICY}, model="gemma2"),
    Cell("DPO", {"use_weighting": True}),  # reads log_sum_sq_probs
    Cell("Distillation", {"beta": 0.5}, model="gemma2"),
]
# What a trainer computes from the primitives' outputs is its own: an option has a cell where it asks for another
# output, or for another gradient of one, and a head where its product is another.
CELLS = [
    Cell("GRPO", {"loss_type": "dapo", **OFF_POLICY}, model="phi"),
    Cell("GRPO", {"cast_lm_head_to_fp32": True, **OFF_POLICY}),
    # The entropy has a gradient.
    Cell("GRPO", {"entropy_coef": 0.1, "num_iterations": 2}, lora=True),
    Cell("RLOO", {"temperature": 0.7}),
    Cell("DPO", {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.8, 1.0]}, model="granite"),
    Cell("KTO", {"loss_type": "apo_zero_unpaired"}, model="qwen2-tied"),
    Cell("SFT", {"label_smoothing_factor": 0.1}, model="cohere"),
    Cell("SFT", {"gradient_checkpointing": True}, lora=True),
    Cell("Distillation", {"beta": 0.0}),
    Cell("Distillation", {"beta": 1.0, "temperature": 0.7}, model="phi"),
]


@pytest.mark.parametrize("cell", [*FAST_CELLS, *map(slow, CELLS)], ids=str)
def test_trl_run(cell):
    pytest.importorskip("trl")
    trl_step.import_trl()
    (theirs, _), (ours, calls) = (trl_step.run(cell, patched) for patched in (False, True))
    assert calls and trl_step.difference(ours, theirs) <= trl_step.TOLERANCE
    close = {"rel": trl_step.TOLERANCE, "abs": trl_step.TOLERANCE, "nan_ok": True}
    for mine, other in zip(ours.metrics, theirs.metrics, strict=True):
        assert mine == pytest.approx(other, **close)
