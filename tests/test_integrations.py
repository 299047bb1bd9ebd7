"""`fused_rl.integrations` inside the trainers of others."""

import os
import subprocess
import sys

import pytest
import torch

from tests.integrations import trl_ranks, trl_runs
from tests.integrations.trl_runs import Cell
from tests.marks import slow

# TRL's trainers: whole runs, patched against unpatched

FP32 = 1e-5  # what the integration promises
OFF_POLICY = {"num_iterations": 2, "beta": 0.04}  # the second step's ratios are not 1, and the reference has a say

# One cell of each of these primitives' users stays in the fast suite; the other trainers read no more than these.
FAST_CELLS = [
    Cell("GRPO", {"temperature": 0.7, "entropy_coef": 0.1, **OFF_POLICY}, model="gemma2"),
    Cell("DPO", {"use_weighting": True}),  # reads log_sum_sq_probs
    Cell("Distillation", {"beta": 0.5}, model="gemma2"),
]
# What a trainer computes from the primitives' outputs is its own: an option has a cell where it asks for another
# output, or for another gradient of one, and a head where its product is another.
CELLS = [
    Cell("GRPO", {"loss_type": "dapo", **OFF_POLICY}, model="bias"),
    Cell("GRPO", {"top_entropy_quantile": 0.3, "entropy_coef": 0.1, **OFF_POLICY}),
    Cell("GRPO", {"cast_lm_head_to_fp32": True, **OFF_POLICY}),
    Cell("GRPO", {"entropy_coef": 0.1, "num_iterations": 2}, lora=True),  # the entropy has a gradient
    Cell("RLOO", {"temperature": 0.7}),
    Cell("DPO", lora=True),  # the reference is the model without its adapter
    Cell("DPO", {"precompute_ref_log_probs": True}),
    Cell("DPO", {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}, model="granite"),
    Cell("KTO", {"loss_type": "apo_zero_unpaired"}, model="tied"),
    Cell("SFT", {"loss_type": "dft"}),
    Cell("SFT", {"label_smoothing_factor": 0.1}, model="cohere"),
    Cell("SFT", {"gradient_checkpointing": True}, lora=True),
    Cell("Distillation", {"beta": 0.0, "temperature": 0.7}, model="tied"),
    Cell("Distillation", {"beta": 1.0, "temperature": 0.7}, model="bias"),
]
ACCUMULATED = [
    Cell("KTO"),
    Cell("GRPO", {"loss_type": "dapo", "entropy_coef": 0.1, **OFF_POLICY}, model="tied"),
    Cell("RLOO"),
    Cell("DPO", {"use_weighting": True}),
    Cell("SFT"),
    Cell("Distillation", {"beta": 0.5}),
]
# Exponentials and squares of whole responses' log-probabilities: TRL's own fp32 gradients are off by more than 1e-5.
FP64 = {"dtype": torch.float64}
ILL_CONDITIONED = [
    (Cell("DPO", {"loss_type": ["sppo_hard"]}), FP64),
    # TRL has no fp64 for it: the head alone is exact
    (Cell("DPO", {"f_divergence_type": "alpha_divergence"}), {}),
]
BF16 = {"dtype": torch.bfloat16}
AUTOCAST = {"bf16": True}
LOW_PRECISION = [
    (Cell("Distillation", {"beta": 0.5}), BF16),
    (Cell("GRPO", {"beta": 0.1, "entropy_coef": 0.1}), AUTOCAST),
    (Cell("DPO", {"use_weighting": True}), BF16),
    (Cell("KTO"), AUTOCAST),
    (Cell("SFT", {"loss_type": "dft"}, model="gemma2"), BF16),
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
    differences = trl_runs.differences(ours, theirs)
    assert max(differences.values()) <= FP32, differences


@pytest.fixture
def trl():
    return pytest.importorskip("trl")


@pytest.mark.parametrize("cell", [*FAST_CELLS, *map(slow, CELLS)], ids=str)
def test_trl_run(cell, trl, tmp_path):
    check_cell(cell, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("cell", ACCUMULATED, ids=str)
def test_trl_run_with_gradient_accumulation(cell, trl, tmp_path):
    check_cell(cell, tmp_path, gradient_accumulation_steps=2)


@pytest.mark.slow
@pytest.mark.parametrize(("cell", "exactly"), ILL_CONDITIONED, ids=str)
def test_trl_run_is_as_near_to_fp64_as_trl(cell, exactly, trl, tmp_path):
    """At most four times as far from the run in fp64 as TRL's own in fp32, or 1e-5.

    Both are one draw of rounding errors, another on each CPU: of one cell an EPYC's are alike, a Xeon's 2.2 apart.
    """
    exact = trl_runs.train(cell, "exact", tmp_path, **exactly)
    theirs, ours = (trl_runs.train(cell, primitive, tmp_path) for primitive in ("host", "ours"))
    assert ours.served == theirs.host and not ours.host, "TRL's own primitive was called"
    allowed = trl_runs.differences(theirs, exact)
    found = trl_runs.differences(ours, exact)
    assert all(found[kind] <= max(FP32, 4 * allowed[kind]) for kind in found), (found, allowed)


def test_trl_reward_is_untouched(trl, tmp_path):
    """A reward model has no vocabulary: patched and unpatched runs are the same to the last bit."""
    cell = Cell("Reward")
    theirs, ours = (trl_runs.train(cell, primitive, tmp_path) for primitive in ("host", "ours"))
    assert max(trl_runs.differences(ours, theirs).values()) == 0
    assert not ours.served
    assert not ours.host


def worse(ours, theirs, *, ignored=()):
    """Errors that exceed TRL's: by a tenth, the rounding of the rest of the model, and by what fp32 leaves."""
    return {k: (e, theirs[k]) for k, e in ours.items() if k not in ignored and not e <= 1.1 * theirs[k] + 2e-6}


@pytest.mark.slow  # of heads alone: test_head_in_bf16, test_divergence
@pytest.mark.parametrize(("cell", "how"), LOW_PRECISION, ids=str)
def test_trl_run_in_bf16(cell, how, trl, tmp_path):
    """In bf16, tokens and gradients are as near to an exact head's, and loss and metrics to an fp64 run's, as TRL's."""
    how = {"max_steps": 1, "scripted": True, **how}
    exact, theirs, ours = (trl_runs.train(cell, primitive, tmp_path, **how) for primitive in ("exact", "host", "ours"))
    assert ours.served == theirs.host
    assert not ours.host
    assert not worse(trl_runs.token_errors(ours, exact), trl_runs.token_errors(theirs, exact))
    # Of an exact head on the same bf16 hidden states.
    gradients = ({"gradients": trl_runs.errors(run, exact)["gradients"]} for run in (ours, theirs))
    assert not worse(*gradients)
    # Of the whole run in fp64; the mean logits of both are as good as the hidden states, whose errors cancel by chance.
    exact = trl_runs.train(cell, "exact", tmp_path, **{**how, "bf16": False, "dtype": torch.float64})
    ignored = {"logits/chosen", "logits/rejected"}
    assert not worse(trl_runs.errors(ours, exact), trl_runs.errors(theirs, exact), ignored=ignored)


def ranks(run, primitive, folder):
    """What rank 0 of two saw."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "tests.integrations.trl_ranks", run, primitive, str(folder)]
    environment = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    saved = torch.load(folder / f"{primitive}.pt", weights_only=False)
    return trl_runs.Run(**saved)


@pytest.mark.slow
@pytest.mark.parametrize("run", trl_ranks.RUNS)
def test_trl_on_two_processes(run, trl, tmp_path):
    """DDP, and ZeRO-3, which gathers the head around the primitive: where parameters end shows their gradients."""
    theirs, ours = (ranks(run, primitive, tmp_path) for primitive in ("host", "ours"))
    assert ours.served
    assert ours.served == theirs.host
    assert not ours.host
    assert max(trl_runs.differences(ours, theirs).values()) <= FP32


RESUMED = [Cell("SFT"), Cell("GRPO", OFF_POLICY)]
SAVING = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "optim_args": "momentum=0.9"}


def interrupted(cell, primitive, folder):
    """The checkpoint that a run leaves which dies after two of its four steps."""
    with pytest.raises(trl_runs.Interrupted):
        trl_runs.train(cell, primitive, folder, interrupted=True, **SAVING)
    return str(folder / "checkpoint-2")


def resumed(cell, primitive, folder, checkpoint):
    return trl_runs.train(cell, primitive, folder, checkpoint=checkpoint, **SAVING)


@pytest.mark.slow
@pytest.mark.parametrize("cell", RESUMED, ids=str)
def test_trl_saves_and_resumes_as_before(cell, trl, tmp_path):
    """Patched as unpatched: a resumed run is the uninterrupted one, and either reads the other's checkpoints."""
    folders = {primitive: tmp_path / primitive for primitive in ("host", "ours")}
    whole = {primitive: trl_runs.train(cell, primitive, tmp_path / "whole", **SAVING) for primitive in folders}
    left = {primitive: interrupted(cell, primitive, folder) for primitive, folder in folders.items()}
    for primitive in folders:
        ends = {writer: resumed(cell, primitive, tmp_path / "rest", left[writer]) for writer in folders}
        own = ends[primitive]
        other = ends["host" if primitive == "ours" else "ours"]
        assert moved(own, whole[primitive]) == 0, "resuming is not exact"
        assert moved(other, own) <= FP32
    assert moved(whole["ours"], whole["host"]) <= FP32


def moved(run, reference):
    return max(trl_runs.of_tensors(run.parameters, reference.parameters).values())
