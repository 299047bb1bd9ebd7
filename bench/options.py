"""The command line that every group understands."""

import argparse

import torch

from bench import peers

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def parser(description: str) -> argparse.ArgumentParser:
    """The options of a group; it ignores those that mean nothing to it."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda"
    )
    made.add_argument("--dtype", default="bf16,fp32", help="comma-separated: bf16, fp16, fp32")
    made.add_argument(
        "--shapes", default=None, help="comma-separated, rows x vocabulary: 1024x32000,256x151936"
    )
    made.add_argument("--peers", default="all", help="all, none, or comma-separated names")
    made.add_argument(
        "--budget", type=float, default=None, help="seconds for a group: more cases, less for each"
    )
    made.add_argument(
        "--out", default=None, help="folder for the JSON result (default: none is written)"
    )
    return made


def checked(made: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.Namespace:
    """The arguments with dtypes and shapes as lists; ends with a message where one means nothing."""
    args.dtype = args.dtype.split(",")
    _expect_known(made, "--dtype", args.dtype, list(DTYPES), f"expected one of {', '.join(DTYPES)}")
    if args.device != "cpu" and not torch.cuda.is_available():
        made.error(f"--device {args.device}: torch sees no such device here")
    if args.budget is not None and not args.budget > 0:
        made.error("--budget: expected seconds above 0")
    names = list(peers.LOGPROBS | peers.TOPK | peers.KL | peers.LINEAR | peers.EXACT)
    expected = f"expected all, none or some of {', '.join(names)}"
    _expect_known(made, "--peers", args.peers.split(","), ["all", "none", *names], expected)
    if args.shapes:
        args.shapes = _sizes(made, args.shapes)
    return args


def _expect_known(made, option: str, given: list[str], known: list[str], expected: str):
    unknown = [word for word in given if word not in known]
    if unknown:
        made.error(f"{option} {unknown[0]}: {expected}")


def _sizes(made, text: str) -> list[tuple[int, ...]]:
    """Shapes such as 1024x32000, comma-separated."""
    try:
        shapes = []
        for shape in text.split(","):
            shapes.append(tuple(map(int, shape.split("x"))))
    except ValueError:
        made.error(f"--shapes {text}: expected sizes such as 1024x32000, comma-separated")
    if min(map(min, shapes)) < 1:
        made.error("--shapes: sizes start at 1")
    return shapes


def arguments(description: str, group: str, words: list[str] | None = None) -> argparse.Namespace:
    """Those of one group, from these words or from the command line."""
    made = parser(description)
    args = checked(made, made.parse_args(words))
    args.group = group
    return args
