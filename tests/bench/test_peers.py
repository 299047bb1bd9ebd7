"""Peers are called as their packages ask, and what is missing is said."""

import sys
from types import SimpleNamespace

import pytest
import torch

from bench import peers, results, run
from bench.cases.case import Spec
from bench.cases.linear import LinearCase
from tests.bench.cases import checked, one_case


def test_a_peer_that_cannot_run_is_listed_with_the_reason(monkeypatch):
    imported = [name for name in sys.modules if name.partition(".")[0] == "trl"]
    for name in {"trl", *imported}:
        monkeypatch.setitem(sys.modules, name, None)  # as where it is not installed
    monkeypatch.setattr(peers.importlib, "import_module", importing_nothing(peers.importlib.import_module))
    running, missing = peers.find(peers.LOGPROBS, "cpu", op="token_logprobs")
    assert "plain torch" in [p.name for p in running]
    found = {row["implementation"]: (row["op"], row["status"], row["reason"]) for row in missing}
    assert found["Liger GRPO loss"] == ("token_logprobs", "cannot run", "its Triton kernels need a GPU")
    assert "TRL" in found
    op, status, reason = found["verl"]
    assert (op, status) == ("token_logprobs", "not installed")
    assert "make test-integrations" in reason, "how to have it"


def importing_nothing(import_module):
    def wrapped(name, package=None):
        if name.startswith("verl"):
            raise ModuleNotFoundError("No module named 'verl'", name="verl")
        return import_module(name, package)

    return wrapped


def test_a_peer_of_whole_sequences_takes_no_rows(monkeypatch):
    seen = []
    peer = peers.Peer(
        "whole", "0", lambda logits, targets, mask: seen.append((logits.shape, targets.shape)), whole=True
    )
    shifted = one_case(layout="shift", shape=(2, 4, 500))
    shifted.adapted(peer)(shifted.logits[0])
    assert seen == [((2, 4, 500), (2, 3))]
    case = one_case()
    monkeypatch.setattr(peers, "find", lambda *_, **__: ([peer], []))
    found, (missing,) = case.contenders("all")
    assert peer.name not in [other.name for other in found]
    assert (missing["status"], missing["reason"]) == ("cannot run", "takes whole (B, T, V) logits alone")


def _cross_entropy(logits, targets, ignore_index=-100):
    return torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none", ignore_index=ignore_index)


def _flash(logits, labels, precomputed_lse=None, label_smoothing=0.0, logit_scale=1.0, lse_square_scale=0.0,
           ignore_index=-100, inplace_backward=False, process_group=None):  # fmt: skip
    assert logits.dim() == 2
    return _cross_entropy(logits, labels, ignore_index), torch.zeros(len(labels))


def _quack(x, target, lse_partial=None, weight=None, ignore_index=-100, reduction="mean", inplace_backward=False):
    assert (x.dim(), target.dim(), reduction) == (2, 1, "none")
    return _cross_entropy(x, target, ignore_index)


def _verl_logprobs(logits, labels, inplace_backward=True):
    assert not inplace_backward, "it would overwrite logits that the entropy's gradient needs"
    return torch.log_softmax(logits.float(), -1).gather(-1, labels[..., None])[..., 0]


def _verl_entropy(logits):
    return torch.distributions.Categorical(logits=logits.float()).entropy()


def _cce(e, c, targets, ignore_index=-100, softcap=None, reduction="mean", shift=False, filter_eps="high", impl="cce"):
    assert (reduction, impl) == ("none", "cce")
    return _cross_entropy(e @ c.t(), targets, ignore_index)


def _verl_head(hidden, weight, labels, temperature=1.0, reduction="none", dist_process_group=None):
    logits = hidden @ weight.t()
    return -_cross_entropy(logits, labels), _verl_entropy(logits)


def _quack_head(x, weight, target, chunk_size=4096, ignore_index=-100, reduction="mean", tuned=True):
    return torch.nn.functional.cross_entropy(x @ weight.t(), target, ignore_index=ignore_index, reduction=reduction)


def _stand_in(monkeypatch, module, **functions):
    """A module of this name with these functions: their packages' signatures, as released, with plain arithmetic."""
    parts = module.split(".")
    for i in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), SimpleNamespace(**functions))


@pytest.mark.parametrize(
    ("name", "module", "functions"),
    [
        ("flash-attn cross-entropy", "flash_attn.ops.triton.cross_entropy", {"cross_entropy_loss": _flash}),
        ("quack cross-entropy", "quack.cross_entropy", {"cross_entropy": _quack}),
        ("verl", "verl.utils.torch_functional",
         {"logprobs_from_logits": _verl_logprobs, "entropy_from_logits": _verl_entropy}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("layout", ["rows", "shift"])
def test_peers_that_need_a_gpu_are_called_as_their_packages_ask(name, module, functions, layout, monkeypatch):
    _stand_in(monkeypatch, module, **functions)
    case = one_case(layout=layout, shape=(2, 4, 500) if layout == "shift" else (6, 500), fraction=0.5)
    (peer,), _ = peers.find(peers.LOGPROBS, "cuda", name)
    errors = checked(case, peer._replace(call=case.adapted(peer)))
    assert errors["logprob"] < 1e-5
    assert errors["gradient"] < 2**-7  # bf16 logits


@pytest.mark.parametrize(
    ("name", "module", "functions"),
    [
        ("cut-cross-entropy", "cut_cross_entropy", {"linear_cross_entropy": _cce}),
        ("verl Triton head", "verl.utils.kernel.linear_cross_entropy", {"linear_cross_entropy": _verl_head}),
        ("verl torch head", "verl.utils.experimental.torch_functional", {"FusedLinearForPPO": lambda: _verl_head}),
        ("quack chunked head", "quack.linear_cross_entropy", {"chunked_linear_cross_entropy": _quack_head}),
    ],
)
def test_heads_that_are_not_here_are_called_as_their_packages_ask(name, module, functions, monkeypatch):
    _stand_in(monkeypatch, module, **functions)
    (peer,), _ = peers.find(peers.LINEAR, "cuda", name)
    case = LinearCase(Spec((256, 16, 300), "fp32"), "cpu")
    peer = peer._replace(call=case.adapted(peer))
    assert run.judged(case, peer, checked(case, peer)) == {"status": results.OK}
