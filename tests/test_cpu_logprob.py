"""The two paths of `fused_rl.cpu.logprob`: rows.c, and eager PyTorch for machines without a compiler."""

import logging
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fused_rl import token_logprobs
from fused_rl.cpu import compiled, logprob, native
from tests.hostile import OPS
from tests.logits import (
    random_rows,
    run,
)
from tests.test_hostile import WHOLE, check


@pytest.fixture(params=["rows.c", "eager"])
def path(request, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    if request.param == "eager":
        monkeypatch.setattr(native, "takes", lambda *matrices: False)
    elif not compiled.has_compiler():
        pytest.skip("no C++ compiler")
    return request.param


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    "name", ["token_logprobs", "token_logprobs, K targets", "token_logprobs, support", "token_kl"]
)
def test_hostile_rows(name):
    """Both paths; one of them is what tests/test_hostile.py has at length."""
    for case in WHOLE:
        check(OPS[name], case)
    check(OPS[name], WHOLE[0]._replace(vocab=2100, direction="jensen-shannon"))


@pytest.mark.usefixtures("path")
def test_a_rising_maximum_keeps_the_digits_of_what_was_before():
    """Each block's maximum lies far above the last one's: what stands so far becomes small, and must not be rounded."""
    logits = torch.full((1, 1536), -math.inf)
    logits[0, [0, 600, 1100]] = torch.tensor([0.0, 3.0, 27.0])
    rest = logprob.logprob_fwd(logits, torch.tensor([1100]), None, 1.0, None).rest.item()
    assert rest == pytest.approx(math.exp(-27) + math.exp(-24), rel=2e-7)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 8), (torch.float16, 11)])
def test_a_gradient_between_two_numbers_of_its_dtype_is_the_even_one(dtype, bits):
    """Of 256 equal logits each has 1 / 256 of the upstream gradient, whose digits are all ties."""
    upstream = 1 + torch.arange(1, 2**bits, 2) / 2**bits
    logits, targets = (
        torch.zeros(len(upstream), 256, dtype=dtype),
        torch.zeros(len(upstream)).long(),
    )
    _, gradient = run(token_logprobs, logits, targets, {"logprobs": upstream})
    assert torch.equal(gradient[:, 1], (-upstream / 256).to(dtype))


def test_the_compiled_file_is_kept_and_made_once(monkeypatch, tmp_path):
    if not compiled.has_compiler():
        pytest.skip("no C++ compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build = native._library.__wrapped__
    assert build() is not None
    (made,) = (tmp_path / "fused_rl").iterdir()
    before = made.stat().st_mtime_ns
    monkeypatch.setattr(native.subprocess, "run", lambda *a, **k: pytest.fail("compiled again"))
    assert build() is not None
    assert made.stat().st_mtime_ns == before


def test_a_compiler_that_fails_says_so_and_leaves_the_eager_path(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    with caplog.at_level(logging.WARNING, "fused_rl.cpu"):
        assert native._library.__wrapped__() is None
    assert "eager, false -x c" in caplog.text
    assert not list((tmp_path / "fused_rl").iterdir())


def test_a_folder_that_cannot_be_written_is_replaced(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert native._folder().is_dir()


def test_whoever_watches_operators_sees_ours(monkeypatch):
    """The plain function is for eager calls alone: a mode that counts or traces must find one opaque operator."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    seen = []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function.name())
            return function(*args, **(kwargs or {}))

    logits, targets = random_rows(3, 40, torch.float32, "cpu")
    logits.requires_grad_()
    with Watched():
        token_logprobs(logits, targets).logprobs.sum().backward()
    watched = logits.grad
    assert {"fused_rl::token_logprobs", "fused_rl::token_logprobs_backward"} <= set(seen)
    logits.grad = None
    token_logprobs(logits, targets).logprobs.sum().backward()
    assert torch.equal(watched, logits.grad)
