"""What a 16-bit head is worth: the largest error of a log-probability and of an entropy, of each way to form logits.

    python bench/repro/head_precision.py            the errors
    python bench/repro/head_precision.py --cost     CPU seconds of the products instead

bf16 hidden states under a bf16 head; every form is compared with fp64 of these same operands. Logits have deviation
sigma. The offset is what all columns of a row have in common, because the head's rows have a direction in common that
the hidden states share: it is in the products, and no softmax depends on it.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
import torch.nn.functional as F

import fused_rl
from bench.machine import heading
from bench.peers import Unavailable, import_peer
from bench.results import table
from fused_rl import tiles

CASES = ((1, 0), (3, 0), (3, 30), (3, 100))  # sigma, offset
SHAPE = (256, 896, 32000)  # rows, hidden units, vocabulary
COSTS = ((512, 896, 32000), (2048, 1024, 32000))
_SHARED = 8.0  # of every hidden state, in the direction that the head's rows share
_FEW = 32
BF16, FP32 = torch.bfloat16, torch.float32


class Operands(NamedTuple):
    """hidden (N, H), weight (V, H), targets (N,)."""

    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor


def operands(shape: tuple[int, int, int], sigma: float, offset: float, device: str = "cpu") -> Operands:
    """bf16 operands whose logits have that deviation about that offset."""
    rows, width, vocab = shape
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator)
    weight = torch.randn(vocab, width, generator=generator) * (sigma / width**0.5)
    if offset:
        hidden[:, 0] = _SHARED
        weight[:, 0] = offset / _SHARED
    targets = torch.randint(vocab, (rows,), generator=generator)
    return Operands(hidden.to(device, BF16), weight.to(device, BF16), targets.to(device))


def truth(given: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy, (N,) fp64, from fp64 products."""
    logits = given.hidden.double() @ given.weight.double().t()
    return fused_rl.token_logprobs(logits, given.targets)[:2]


# ------------------------------------------------------------------ the forms: operands -> log-probabilities, entropies


def _ours(logits_dtype):
    def form(given):
        return fused_rl.linear_token_logprobs(*given, logits_dtype=logits_dtype)[:2]

    return form


def _plain(given):
    """An fp32 head as it is most often written: cast, project, log-softmax."""
    logp = torch.log_softmax(given.hidden.float() @ given.weight.float().t(), -1)
    return logp.gather(1, given.targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def _trl(given):
    function = import_peer("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    utils = import_peer("trl.trainer.utils")
    columns = utils._CHUNKED_LOGPROB_CHUNK_SIZE
    return function.apply(given.hidden, given.weight, None, given.targets, 1.0, columns, None, 1.0, ("entropy",))[:2]


def _trl_fp32(given):
    """As its `cast_lm_head_to_fp32` does it."""
    return _trl(given._replace(hidden=given.hidden.float(), weight=given.weight.float()))


def _liger(given):
    function = import_peer("liger_kernel.ops").LigerFusedLinearScaledCrossEntropyFunction
    loss, entropy = function.apply(*given, 1.0, -100, 1, True)
    return -loss, entropy


def _torch(given):
    function = getattr(F, "linear_cross_entropy", None)
    if function is None:
        raise Unavailable(f"torch {torch.__version__} has none")
    options = torch.nn.LinearCrossEntropyOptions()
    some = list(zip(given.hidden[:_FEW], given.targets[:_FEW], strict=True))  # chunked, it returns sums alone
    return -torch.stack([function(h[None], given.weight, t[None], options=options) for h, t in some]), None


FORMS = {
    "fused_rl, logits_dtype=float32": _ours(FP32),
    "fused_rl, logits_dtype=bfloat16": _ours(BF16),
    "fp32 head, log_softmax": _plain,
    "TRL chunked head": _trl,
    "TRL, cast_lm_head_to_fp32": _trl_fp32,
    "Liger fused linear scaled cross-entropy": _liger,
    "F.linear_cross_entropy, chunked": _torch,
}


def measured(shape: tuple[int, int, int] = SHAPE, device: str = "cpu") -> list[list]:
    """A row for each form: its name, and for each case the largest error of a log-probability and of an entropy."""
    cells = {name: [] for name in FORMS}
    reasons = {}
    for case in CASES:
        given = operands(shape, *case, device)
        right = truth(given)
        for name, form in FORMS.items():
            try:
                found = form(given)
            except Unavailable as unavailable:
                reasons[name] = str(unavailable)
                found = None, None
            for value, exact in zip(found, right, strict=True):
                error = None if value is None else (value.double() - exact[: len(value)]).abs().max()
                cells[name].append(None if error is None else float(f"{error:.1e}"))
    return [[name, *values, reasons.get(name, "")] for name, values in cells.items()]


def costs(shapes: tuple = COSTS, turns: int = 3) -> list[list]:
    """A row for each shape: the least CPU seconds of a 16-bit product, and of fp32 logits as multiples of it."""
    rows = []
    for shape in shapes:
        given = operands(shape, 1, 0)
        rounded, out = (torch.empty(shape[0], shape[2], dtype=dtype) for dtype in (BF16, FP32))
        ways = {
            "bf16": lambda given=given, out=rounded: torch.mm(given.hidden, given.weight.t(), out=out),
            "whole": lambda given=given, out=out: torch.mm(given.hidden.float(), given.weight.float().t(), out=out),
            "ours": lambda given=given, out=out: tiles.product(given.hidden, given.weight, out),
        }
        least = dict.fromkeys(ways, float("inf"))
        for _ in range(turns):  # they take turns
            for name, way in ways.items():
                began = time.process_time()
                way()
                least[name] = min(least[name], time.process_time() - began)
        seconds = list(least.values())
        ratios = [round(s / seconds[0], 2) for s in seconds[1:]]
        rows.append(["x".join(map(str, shape)), *(round(s, 3) for s in seconds), *ratios])
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cost", action="store_true", help="CPU seconds of the products")
    parser.add_argument("--shape", default="x".join(map(str, SHAPE)), help="rows x hidden units x vocabulary")
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(heading(device))
    if args.cost:
        print(table(["shape", "bf16 s", "cast whole s", "ours s", "cast / bf16", "ours / bf16"], costs()))
        return
    columns = [f"{what} {sigma}{f'+{offset}' if offset else ''}" for sigma, offset in CASES for what in ("lp", "H")]
    shape = tuple(map(int, args.shape.split("x")))
    print(table(["form, error in nats at sigma + offset", *columns, "not run"], measured(shape, device)))


if __name__ == "__main__":
    main()
