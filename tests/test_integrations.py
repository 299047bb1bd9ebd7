"""`fused_rl.integrations` inside the trainers of others."""

import pytest

from tests.integrations import trl_runs
from tests.integrations.trl_runs import Cell
from tests.marks import slow

# TRL's trainers: whole runs, patched against unpatched

FP32 = 1e-5  # what the integration promises
# The second step's ratios are not 1, and the reference has a say.
OFF_POLICY = {
    "num_iterations": 2,
    "beta": 0.04,
}

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
    Cell("GRPO", {"top_entropy_quantile": 0.3, "entropy_coef": 0.1, **OFF_POLICY}),
    Cell("GRPO", {"cast_lm_head_to_fp32": True, **OFF_POLICY}),
    # The entropy has a gradient.
    Cell("GRPO", {"entropy_coef": 0.1, "num_iterations": 2}, lora=True),
    Cell("RLOO", {"temperature": 0.7}),
    Cell("DPO", lora=True),  # the reference is the model without its adapter
    Cell("DPO", {"precompute_ref_log_probs": True}),
    Cell(
        "DPO",
        {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
        model="granite",
    ),
    Cell("KTO", {"loss_type": "apo_zero_unpaired"}, model="qwen2-tied"),
    Cell("SFT", {"loss_type": "dft"}),
    Cell("SFT", {"label_smoothing_factor": 0.1}, model="cohere"),
    Cell("SFT", {"gradient_checkpointing": True}, lora=True),
    Cell("Distillation", {"beta": 0.0}),
    Cell("Distillation", {"beta": 1.0, "temperature": 0.7}, model="phi"),
]
# The optional outputs that a trainer reads: all of them must come from here.
OUTPUTS = {
    "GRPO": {"log_probs", "entropy"},
    "RLOO": {"log_probs", "entropy"},
    "DPO": {"log_probs", "entropy", "mean_logits", "is_top1"},
    "KTO": {"log_probs", "entropy", "mean_logits"},
    "SFT": {"log_probs", "entropy", "is_top1"},
    "Distillation": {"divergence"},
}


def check_cell(cell, folder, **how):
    """A patched run equals the unpatched one, and had all its primitives from here."""
    theirs = trl_runs.train(cell, "host", folder, **how)
    ours = trl_runs.train(cell, "ours", folder, **how)
    assert OUTPUTS[cell.trainer] <= ours.served.keys()
    assert ours.served == theirs.host and not ours.host, "TRL's own primitive was called"
    trl_runs.assert_equal(ours, theirs, FP32)


@pytest.fixture
def trl():
    return pytest.importorskip("trl")


@pytest.mark.parametrize("cell", [*FAST_CELLS, *map(slow, CELLS)], ids=str)
def test_trl_run(cell, trl, tmp_path):
    check_cell(cell, tmp_path)
