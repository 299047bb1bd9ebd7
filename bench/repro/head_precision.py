"""What a 16-bit head is worth: the largest error of a log-probability and of an entropy, of each way to form logits.

    python -m bench.repro.head_precision            the errors
    python -m bench.repro.head_precision --cost     CPU seconds of the products instead

bf16 hidden states under a bf16 head; every form is compared with fp64 of these same operands. Logits have deviation
sigma. The offset is what all columns of a row have in common, because the head's rows have a direction in common that
the hidden states share: it is in the products, and no softmax depends on it.
"""

import argparse
from typing import NamedTuple

import torch
import torch.nn.functional as F

import fused_rl
from bench import peers, plain, timing
from bench.machine import heading
from bench.results import sizes, table_of
from fused_rl.ops import tiles

# sigma, offset
CASES = ((1, 0), (3, 0), (3, 30), (3, 100))
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


def operands(
    shape: tuple[int, int, int], sigma: float, offset: float, device: str = "cpu"
) -> Operands:
    """bf16 operands whose logits have that deviation about that offset."""
    rows, width, vocab = shape
    generator = plain.seeded(0)
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


# The forms: operands -> log-probabilities, entropies.


def _ours(logits_dtype):
    def form(given):
        return fused_rl.linear_token_logprobs(*given, logits_dtype=logits_dtype)[:2]

    return form


def _liger(given):
    function = peers.import_peer("liger_kernel.ops").LigerFusedLinearScaledCrossEntropyFunction
    loss, entropy = function.apply(*given, 1.0, -100, 1, True)
    return -loss, entropy


def _torch(given):
    options = torch.nn.LinearCrossEntropyOptions()
    losses = []
    for i in range(min(_FEW, len(given.targets))):  # chunked, it returns sums alone
        row = slice(i, i + 1)
        losses.append(
            F.linear_cross_entropy(
                given.hidden[row], given.weight, given.targets[row], options=options
            )
        )
    return -torch.stack(losses), None


FORMS = {
    "fused_rl, logits_dtype=float32": _ours(FP32),
    "fused_rl, logits_dtype=bfloat16": _ours(BF16),
    "fp32 head, log_softmax": lambda given: peers.plain_exact(*given),
    "TRL chunked head": lambda given: peers.trl_chunks()(*given),
    "TRL, cast_lm_head_to_fp32": lambda given: peers.trl_exact("cpu")(*given),
    "Liger fused linear scaled cross-entropy": _liger,
    "F.linear_cross_entropy, chunked": _torch,
}


def measured(shape: tuple[int, int, int] = SHAPE, device: str = "cpu") -> list[dict]:
    """A row for each form: its name, and for each case the largest error of a log-probability and of an entropy."""
    rows = {name: {"form": name} for name in FORMS}
    for sigma, offset in CASES:
        given = operands(shape, sigma, offset, device)
        right = truth(given)
        at = f"{sigma}+{offset}" if offset else str(sigma)
        for name, row in rows.items():
            try:
                found = FORMS[name](given)
            except (peers.Unavailable, AttributeError) as unavailable:
                row["not run"] = str(unavailable)
                found = None, None
            for what, value, exact in zip(("lp", "H"), found, right, strict=True):
                cell = None
                if value is not None:
                    cell = plain.largest(value, exact[: len(value)])
                row[f"{what} {at}"] = cell
    for row in rows.values():
        row["not run"] = row.pop("not run", "")
    return list(rows.values())


def costs(shapes: tuple = COSTS, rounds: int = 3) -> list[dict]:
    """A row for each shape: the CPU seconds of a 16-bit product, and of fp32 logits as multiples of it."""
    rows = []
    for shape in shapes:
        hidden, weight, _ = operands(shape, 1, 0)
        rounded = torch.empty(shape[0], shape[2], dtype=BF16)
        out = torch.empty_like(rounded, dtype=FP32)
        ways = {
            "bf16": lambda a=hidden, b=weight, out=rounded: torch.mm(a, b.t(), out=out),
            "cast whole": lambda a=hidden, b=weight, out=out: torch.mm(
                a.float(), b.float().t(), out=out
            ),
            "ours": lambda a=hidden, b=weight, out=out: tiles.product(a, b, out),
        }
        row = {"shape": sizes(shape, "x")}
        seconds = timing.cpu_seconds(ways, rounds)
        for name, taken in seconds.items():
            row[f"{name} s"] = taken
        for name in ("cast whole", "ours"):
            row[f"{name} / bf16"] = seconds[name] / seconds["bf16"]
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cost", action="store_true", help="CPU seconds of the products")
    args = parser.parse_args()
    print(heading("cpu"))
    if args.cost:
        print(table_of(costs()))
    else:
        print("largest error in nats at sigma + offset\n")
        print(table_of(measured()))


if __name__ == "__main__":
    main()
