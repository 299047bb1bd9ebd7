"""token_logprobs on the CPU path: in chunks, in C where there is a compiler, in huge pages, without copies."""

import logging

import pytest
import torch

from fused_rl import token_logprobs
from fused_rl.cpu import compiled
from fused_rl.cpu import logprob as cpu
from tests.logits import (
    VIEWS,
    random_rows,
    run,
    upstream_of,
)


@pytest.mark.parametrize("name", [name for name in VIEWS if name != "columns apart"])
def test_strided_rows_are_not_copied(monkeypatch, name):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    logits, targets = random_rows(8, 600, torch.float32, "cpu")
    logits = VIEWS[name](logits.view(2, 4, 600))
    seen, forward, backward = [], cpu.logprob_fwd, cpu.logprob_bwd
    monkeypatch.setattr(cpu, "logprob_fwd", lambda x, *a: seen.append(x) or forward(x, *a))
    monkeypatch.setattr(
        cpu, "logprob_bwd", lambda *a, out: seen.append(a[3]) or backward(*a, out=out)
    )
    run(token_logprobs, logits, targets.view(2, 4)[:, :3], upstream_of((2, 3), "cpu"))
    assert {x.untyped_storage().data_ptr() for x in seen} == {logits.untyped_storage().data_ptr()}


def test_bits_do_not_depend_on_chunks_or_threads(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    logits, targets = random_rows(40, 40000, torch.float32, "cpu")
    upstream = upstream_of(targets.shape, "cpu")
    expected = run(token_logprobs, logits, targets, upstream)
    threads = torch.get_num_threads()
    try:
        for chunk, count in ((1, 1), (1 << 17, 2), (1 << 20, 2)):
            monkeypatch.setattr(compiled, "CHUNK", chunk)
            torch.set_num_threads(count)
            outputs, gradient = run(token_logprobs, logits, targets, upstream)
            assert all(map(torch.equal, outputs, expected[0]))
            assert torch.equal(gradient, expected[1])
    finally:
        torch.set_num_threads(threads)


def test_without_a_compiler_large_inputs_stay_eager(monkeypatch, caplog):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("CXX", "no-such-compiler")
    compiled.has_compiler.cache_clear()
    logits, targets = random_rows(10, 2000, torch.bfloat16, "cpu")
    with caplog.at_level(logging.INFO, "fused_rl.cpu"):
        for _ in range(2):
            token_logprobs(logits, targets)
    compiled.has_compiler.cache_clear()
    assert [r.message for r in caplog.records] == [
        "large logits on the CPU: eager: no C++ compiler 'no-such-compiler'"
    ]
