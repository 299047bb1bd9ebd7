"""The protocol: what the runner asks of an operation at one shape."""

import itertools
import math
from typing import NamedTuple

import fused_rl
from bench import peers, results


class Spec(NamedTuple):
    """A case before its tensors exist."""

    shape: tuple[int, ...]
    dtype: str = "fp32"
    masked: float = 0.0  # fraction of the tokens that the mask drops
    layout: str = "rows"


def own(name: str, call, **more) -> peers.Peer:
    """An implementation of this library."""
    return peers.Peer(name, fused_rl.__version__, call, role="ours", **more)


class Case:
    """One operation at one shape: inputs, implementations, fp64 truth, the bytes that it cannot avoid.

    A subclass says which shapes it has (`specs`), and makes the rest from a spec and a device. Implementations are
    `peers.Peer`s whose `call` takes one input set, `x`, alone.
    """

    op: str
    known: dict  # name -> peer, as in peers.py
    baselines: tuple[str, ...] = ("fused_rl",)  # implementations whose time others' is divided by
    columns: dict[str, str]  # of its tables: title -> name among `results.figures`
    backward_repeats = True  # whether the backward pass can run again on one forward pass

    def __init__(self, spec: Spec, device: str):
        self.spec, self.device = spec, device

    @classmethod
    def specs(cls, args) -> list[Spec]:
        """The cases of a run with these options."""
        raise NotImplementedError

    @classmethod
    def listed(cls, args, layouts=("rows",), masked=(0.0,)) -> list[Spec]:
        """The shapes of --shapes in these ways, or those that a class lists; of the dtypes that are wanted.

        On a CPU a class lists few, so that each implementation has time for several samples.
        """
        if args.shapes:
            ways = itertools.product(args.shapes, masked, args.dtype, layouts)
            return [Spec(shape, dtype, fraction, layout) for shape, fraction, dtype, layout in ways]
        listed = cls.cpu if args.device == "cpu" else cls.gpu
        return [spec for spec in listed if spec.dtype in args.dtype]

    @classmethod
    def weight(cls, spec: Spec) -> float:
        """How much of a group's time it needs, beside its other cases."""
        return math.prod(spec.shape)

    @classmethod
    def warm_ups(cls, specs: list[Spec], device: str) -> list[Spec]:
        """Small cases that import and compile what these need."""
        return []

    def facts(self, peer: peers.Peer) -> dict:
        """What a row of this case begins with."""
        shape, dtype, masked, layout = self.spec
        return {
            "op": self.op,
            "layout": layout,
            "shape": list(shape),
            "dtype": dtype,
            "masked": masked,
        }

    def label(self) -> str:
        """The case in words, where something did not run."""
        shape, dtype, masked, layout = self.spec
        way = f", {layout}" if layout != "rows" else ""
        fraction = f", {masked:.0%} masked" if masked else ""
        return f"{self.op} {results.sizes(shape)} {dtype}{way}{fraction}"

    def title(self, rows: list[dict], copy_bytes_per_s: float) -> str:
        """What stands above its table."""
        moved, text = self.bytes()
        return f"{self.label()}; bytes: {text} = {moved['both'] / 1e9:.3g} GB; copy {copy_bytes_per_s / 1e9:.1f} GB/s"

    def bytes(self) -> tuple[dict, str]:
        """Bytes that each phase must move ("forward", "both", ...), and the count spelled out."""
        raise NotImplementedError

    def returned_bytes(self) -> int:
        """Bytes of results that do not count as extra memory."""
        return 0

    def ours(self) -> list[peers.Peer]:
        """Those that always run and are timed three times at least: ours, and a floor where there is one."""
        raise NotImplementedError

    def adapted(self, peer: peers.Peer):
        """The peer's call as one of `x` alone; raises Unavailable where it has no answer to this case."""
        raise NotImplementedError

    def contenders(self, wanted: str) -> tuple[list[peers.Peer], list[dict]]:
        """Implementations that run, ours first; rows of those that cannot."""
        found = self.ours()
        running, missing = peers.find(self.known, self.device, wanted, op=self.op)
        for peer in running:
            try:
                found.append(peer._replace(call=self.adapted(peer)))
            except peers.Unavailable as reason:
                missing.append(results.not_run(peer.name, reason.status, str(reason), self.op))
        return found, missing

    def inputs(self, peer: peers.Peer) -> list:
        """The input sets that it runs on in turn."""
        return [None]

    def backward_of(self, peer: peers.Peer):
        """(outputs, x) -> gradient of this implementation; None where there is none."""
        return

    def errors(self, peer: peers.Peer, outputs, gradient) -> dict[str, float]:
        """Largest errors against fp64; none where nothing is checked."""
        return {}

    def limits(self, peer: peers.Peer) -> dict[str, tuple[float, str]]:
        """Per error: up to where the answer is right, and the error's unit."""
        return {}
