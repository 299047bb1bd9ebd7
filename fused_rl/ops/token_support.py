"""Kept sets: which ids a truncated sampler (top-p, top-k, min-p, banned tokens) left each row to choose from.

Sets are recorded where sampling happens, not computed again from probabilities: ties and the order of filters differ.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from fused_rl.base.checks import INTEGERS, check_plain, described, values_are_checked
from fused_rl.kernels.states import RowSupport


@dataclasses.dataclass(frozen=True, eq=False)
class TokenSupport:
    """Kept sets: row i keeps `ids[offsets[i]:offsets[i + 1]]`, or the whole vocabulary if that range is empty.

    The rows are those of `targets.flatten()`. With `torch.compile`, build it outside of the compiled function, because
    values are not checked inside.

    Args:
        ids: (M,) integers, the ids of all rows one after the other; within a row in any order, and none twice.
        offsets: (N + 1,) int64 from 0 to M, not decreasing.

    Raises:
        ValueError: another shape or dtype; on CPU, or with FUSED_RL_CHECKED=1 in the environment, offsets that
            decrease or do not span the ids, a negative id, an id twice in a row. The message names the row.
    """

    ids: Tensor
    offsets: Tensor

    def __post_init__(self):
        _check_form(self.ids, self.offsets)
        if values_are_checked(self.ids.device) and not torch.compiler.is_compiling():
            _check_values(self.ids, self.offsets)

    @classmethod
    def from_lists(cls, lists: Iterable[Sequence[int] | None]) -> "TokenSupport":
        """Sets of N rows, on the CPU; an empty list or None keeps the whole vocabulary.

        Raises:
            ValueError: as TokenSupport.
        """
        rows = [_row_of_ids(i, row) for i, row in enumerate(lists)]
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64, device="cpu")
        ids = torch.cat(rows) if rows else lengths.new_empty(0)
        return cls(ids, _offsets(lengths))

    @classmethod
    def from_scores(cls, scores: Tensor | Sequence[Tensor]) -> "TokenSupport":
        """The finite entries of scores that a sampler's filters have processed.

        Args:
            scores: (..., V), with -inf at the filtered entries; or T tensors (B, V), one per step, as transformers'
                `generate(output_scores=True)` returns them, for targets (B, T).

        Returns:
            The sets of all rows, with ascending ids; a row without a filtered entry has an empty range, which means the
            whole vocabulary.

        Raises:
            ValueError: a shape or dtype that does not fit; a row without any finite entry.
        """
        steps = [scores] if isinstance(scores, Tensor) else list(scores)
        if isinstance(scores, Tensor) and scores.dim() and scores.shape[-1]:
            steps = [scores.reshape(-1, scores.shape[-1])]
        _check_scores(steps)
        kept = [step != -torch.inf for step in steps]
        counts = torch.stack([step.sum(-1) for step in kept], 1)  # (B, T)
        empty = counts == 0
        if bool(empty.any()):
            row, t = empty.nonzero()[0].tolist()
            step = f" at step {t}" if len(steps) > 1 else ""
            raise ValueError(
                f"row {row} of scores{step} has no finite entry: nothing is kept there"
            )

        # step by step as they came, then in the order of the targets
        keeps_all = counts == steps[0].shape[-1]
        filtered = ~keeps_all
        ids_of_steps = []
        for t, step in enumerate(kept):
            listed = step & filtered[:, t, None]
            ids_of_steps.append(listed.nonzero()[:, 1])
        lengths = torch.where(keeps_all, 0, counts)
        offsets = _offsets(lengths.t().reshape(-1))
        by_step = cls(torch.cat(ids_of_steps), offsets)
        if len(steps) == 1:
            return by_step
        order = torch.arange(lengths.numel(), device=lengths.device)
        by_target = order.view(len(steps), -1).t()
        return by_step.select(by_target.reshape(-1))

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.offsets) - 1

    def select(self, rows: Tensor) -> "TokenSupport":
        """The sets of some rows: (n,) indices, or a bool mask (N,)."""
        rows = rows.to(self.ids.device)
        begin = self.offsets[:-1][rows]
        end = self.offsets[1:][rows]
        offsets = _offsets(end - begin)
        # where an id stands: its place in the new ids, moved as its row is
        shift = torch.repeat_interleave(begin - offsets[:-1], end - begin)
        places = shift + torch.arange(len(shift), device=shift.device)
        return TokenSupport(self.ids[places], offsets)

    @classmethod
    def cat(cls, parts: Iterable["TokenSupport"]) -> "TokenSupport":
        """The rows of several supports on one device, one after the other."""
        parts = list(parts)
        if not parts:
            return cls.from_lists([])
        ids = torch.cat([support.ids for support in parts])
        lengths = torch.cat([support.offsets.diff() for support in parts])
        return _of_valid(ids, _offsets(lengths))

    def split(self, sizes: Sequence[int]) -> list["TokenSupport"]:
        """Split the rows into parts of these sizes; each part has memory of its own, so it can be sent or kept alone.

        Raises:
            ValueError: sizes that do not add up to the number of rows.
        """
        bounds = list(accumulate(sizes, initial=0))
        if bounds[-1] != len(self) or min(sizes, default=0) < 0:
            raise ValueError(
                f"sizes must be 0 or more and add up to the {len(self)} rows, got a sum of {bounds[-1]}"
            )
        # one wait for the device for all parts
        places = self.offsets.new_tensor(bounds)
        id_bounds = self.offsets[places].tolist()
        supports = []
        for (begin, end), (first, last) in zip(pairwise(bounds), pairwise(id_bounds), strict=True):
            offsets = self.offsets[begin : end + 1] - first
            supports.append(_of_valid(self.ids[first:last].clone(), offsets))
        return supports

    def spread(self, mask: Tensor) -> "TokenSupport":
        """The sets at the True places of a mask (...), in its order, and empty ranges elsewhere: one row per place of
        the mask.

        Raises:
            ValueError: a mask that is not bool, or with another number of True places than there are rows.
        """
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or int(mask.sum()) != len(self):
            raise ValueError(
                f"mask must be bool with {len(self)} True places, one for each row, got {described(mask)}"
            )
        lengths = torch.zeros(mask.numel(), dtype=torch.int64, device=mask.device)
        lengths[mask.flatten()] = self.offsets.diff()
        return _of_valid(self.ids, _offsets(lengths))

    def to(self, device: torch.device | str) -> "TokenSupport":
        """The same sets on a device."""
        device = torch.device(device)
        if self.ids.device == device:
            return self
        return TokenSupport(self.ids.to(device), self.offsets.to(device))

    def of_rows(
        self, shape: Sequence[int], device: torch.device, shift: bool = False
    ) -> RowSupport:
        """begin and end as targets of this shape (...) see them; with `shift` as the logits (B, T) that score them.

        Raises:
            ValueError: another number of rows, another device.
        """
        rows = torch.Size(shape).numel()
        if len(self) != rows:
            hint = ""
            if shift:
                hint = "; with shift=True it has the rows of all T targets, the first of each sequence too"
            raise ValueError(
                f"support has {len(self)} rows, the targets {tuple(shape)} have {rows}{hint}; "
                "rows stand in the order of targets.flatten()"
            )
        if self.ids.device != device:
            raise ValueError(
                f"support is on {self.ids.device}, the targets are on {device}; use support.to(...)"
            )
        begin = self.offsets[:-1].view(shape)
        end = self.offsets[1:].view(shape)
        # the set of a target goes to the position before it, and the last position scores nothing
        if shift:
            none = (0, min(1, shape[1]))
            begin = torch.nn.functional.pad(begin[:, 1:], none)
            end = torch.nn.functional.pad(end[:, 1:], none)
        return RowSupport(self.ids, begin, end)


def check_support(support: object, several: bool = False) -> None:
    """`several`: the targets are (..., K)."""
    if several:
        raise ValueError(
            "support takes one target per row; leave it out, or score the K targets in K calls"
        )
    if not isinstance(support, TokenSupport):
        raise ValueError(
            f"support must be a TokenSupport or None, got {described(support)}; see TokenSupport.from_lists"
        )


def check_support_values(
    support: RowSupport, targets: Tensor, mask: Tensor | None, vocab: int | None
) -> None:
    """Ids below `vocab` (None: it is not known) and each target in its set; what the mask drops may hold anything."""
    ids, begin, end = support
    bad = (begin < 0) | (end < begin) | (end > len(ids))
    if bad.any():
        at = tuple(bad.nonzero()[0].tolist())
        spans = f"{int(begin[at])} to {int(end[at])} of {len(ids)} ids"
        raise ValueError(f"the kept set of logits[{', '.join(map(str, at))}] spans {spans}")

    # the ids of the rows that count, in one vector
    counts = end > begin
    if mask is not None:
        counts = counts & mask
    lengths = (end - begin)[counts]
    begin = begin[counts]
    targets = targets[counts]
    if not len(lengths):
        return
    row = torch.repeat_interleave(lengths)
    starts = begin - (lengths.cumsum(0) - lengths)
    each = ids[starts[row] + torch.arange(len(row), device=row.device)]

    # by the rows that count; a message wants the caller's index
    if vocab is not None and bool((each.amax() >= vocab) | (each.amin() < 0)):
        outside = (each >= vocab) | (each < 0)
        first = outside.nonzero()[0, 0]
        raise ValueError(
            f"the kept set of {_named(counts, row[first])} has id {int(each[first])}, outside the vocabulary of "
            f"{vocab} (0 to {vocab - 1})"
        )
    is_target = each == targets.index_select(0, row)
    has_target = torch.zeros(len(lengths), dtype=torch.bool, device=ids.device)
    has_target[row[is_target.nonzero()[:, 0]]] = True
    if not has_target.all():
        missing = ~has_target
        first = missing.nonzero()[0, 0]
        raise ValueError(
            f"the target {int(targets[first])} of {_named(counts, first)} is not in its kept set of "
            f"{int(lengths[first])} ids; {int(missing.sum())} of {len(missing)} targets are not. Record the sets "
            "where the tokens are sampled, or give rows to ignore False in mask"
        )


def _row_of_ids(row, ids):
    """(K,) int64; what is not a row of whole numbers would be made one in silence."""
    row_ids = torch.as_tensor([] if ids is None else ids, device="cpu")
    if row_ids.dim() != 1 or len(row_ids) and row_ids.dtype not in INTEGERS:
        raise ValueError(
            f"row {row} of lists must be a list of ids, whole numbers, or None, got {described(ids)}"
        )
    return row_ids.long()


def _of_valid(ids, offsets):
    """The arrangement of valid sets, kept because a second check would take longer than all else."""
    # past __post_init__, which checks, and past the setter of a frozen class
    support = object.__new__(TokenSupport)
    object.__setattr__(support, "ids", ids)
    object.__setattr__(support, "offsets", offsets)
    return support


def _offsets(lengths):
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def _named(counts, nth):
    """`logits[...]` of the nth row that counts."""
    index = counts.nonzero()[nth].tolist()
    return f"logits[{', '.join(map(str, index))}]"


def _check_form(ids, offsets):
    for name, x, dtypes, wanted in (
        ("ids", ids, INTEGERS, "(M,) integers"),
        ("offsets", offsets, (torch.int64,), "(N + 1,) int64"),
    ):
        if not isinstance(x, Tensor) or x.dim() != 1 or x.dtype not in dtypes:
            raise ValueError(
                f"{name} must be {wanted}, got {described(x)}; TokenSupport.from_lists takes lists"
            )
        check_plain(name, x)
    if ids.device != offsets.device:
        raise ValueError(f"ids are on {ids.device}, offsets on {offsets.device}; move one")


def _check_values(ids, offsets):
    lengths = offsets.diff()
    decreases = lengths < 0
    if bool(decreases.any()):
        row = int(decreases.nonzero()[0])
        raise ValueError(
            f"offsets decrease at row {row}: from {int(offsets[row])} to {int(offsets[row + 1])}"
        )
    if int(offsets[0]) != 0 or int(offsets[-1]) != len(ids):
        raise ValueError(
            f"offsets must run from 0 to the number of ids, {len(ids)}; got {int(offsets[0])} to {int(offsets[-1])}"
        )
    if len(ids) == 0:
        return

    # within a row, ids that ascend have no double; others are sorted to see
    if int(ids.min()) < 0:
        at = (ids < 0).nonzero()[0, 0]
        row = int(torch.searchsorted(offsets, at, right=True)) - 1
        raise ValueError(f"row {row} keeps id {int(ids[at])}; ids start at 0")
    ids = ids.long()
    ascends = ids.diff() > 0
    # from the end of a row to the begin of the next they may fall
    inner = offsets[1:-1]
    inner = inner[(inner > 0) & (inner < len(ids))]
    ascends[inner - 1] = True
    if ascends.all():
        return
    row = torch.repeat_interleave(lengths)
    base = int(ids.max()) + 1
    key = (row * base + ids).sort().values
    is_double = key.diff() == 0
    if is_double.any():
        row, twice = divmod(int(key[1:][is_double][0]), base)
        raise ValueError(
            f"row {row} keeps id {twice} more than once; {int(is_double.sum())} ids are doubles"
        )


def _check_scores(steps):
    shapes = {tuple(step.shape) if isinstance(step, Tensor) else () for step in steps}
    fits = len(shapes) == 1 and len(next(iter(shapes))) == 2
    if not fits or not all(step.is_floating_point() and step.shape[1] for step in steps):
        raise ValueError(
            "scores must be a floating-point tensor (..., V), or one (B, V) per step as generate returns them, got "
            + (", ".join(map(described, steps[:4])) or "none")
        )
    for t, step in enumerate(steps):
        bad = step.isnan() | (step == torch.inf)
        if bad.any():
            row, column = bad.nonzero()[0].tolist()
            at = f"row {row}" + (f" at step {t}" if len(steps) > 1 else "")
            raise ValueError(
                f"scores must be finite, or -inf where filtered: {at} has {step[row, column]} at id {column}"
            )
