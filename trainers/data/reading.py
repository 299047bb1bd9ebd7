"""Reading all rows of a run: those that cannot be used are collected, and reported together at the end."""

import contextlib
from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import datasets
import pandas

from fused_rl.trainers.base.screen import print_rank0
from fused_rl.trainers.base.text import InputError, escaped
from fused_rl.trainers.data.rows import BadRow, Rows, load_rows, rows_of_sources
from fused_rl.trainers.options import DataConfig

RowsLike: TypeAlias = (
    str | Iterable[Any] | datasets.Dataset | datasets.DatasetDict | pandas.DataFrame | None
)
"""Rows in Python: a name, or the rows themselves."""


class BadRows(InputError):
    """The rows that end a run; the message is a block of several lines, its parts escaped."""


class Reading(contextlib.AbstractContextManager):
    """The rows that a run reads, as a context: at its end bad ones raise `BadRows`, or with "skip" are printed.

    It also prints which forms the rows had, and which of their columns were not read.
    """

    def __init__(self, bad_rows: Literal["refuse", "skip"] = "refuse"):
        self.skips = bad_rows == "skip"
        self.bad: list[BadRow] = []
        self.read: list[Rows] = []

    def add(self, rows: Rows) -> Rows:
        """Return rows, which are read now."""
        self.read.append(rows)
        return rows

    def __exit__(self, kind, error, traceback) -> None:
        # Bad rows may be why too few are left; what they lack is said first.
        if error is None or (isinstance(error, InputError) and self.bad and not self.skips):
            self.finish()

    def finish(self) -> None:
        """Raise or print what cannot be used, and print what was read."""
        # A row may have been read twice, to be trained on and to be sampled for.
        bad_places = {error.where: error for error in self.bad}
        self.bad = [*bad_places.values()]
        total = sum(map(len, self.read))
        counts = f"{len(self.bad)} of {total}"
        if self.bad and not self.skips:
            # One row's reason is a line.
            if len(self.bad) == 1:
                (bad,) = self.bad
                remedy = f"{bad.remedy}, or --bad_rows skip" if total > 1 else bad.remedy
                raise BadRow(bad.reason, remedy, got=bad.got, where=bad.where)
            remedy = "" if len(self.bad) == total else " (--bad_rows skip leaves them out)"
            title = f"{counts} rows cannot be used{remedy}; the first of each kind:"
            raise BadRows("\n".join([title, *self._kinds()]))
        if self.bad:
            title = f"left out {counts} rows that cannot be used; the first of each kind:"
            print_rank0(title, *self._kinds())
        if self.bad and len(self.bad) == total:
            raise InputError(f"no row can be used; {self.bad[0]}")
        # Without a single held-out row nothing would be evaluated, and nothing would say so.
        for rows in self.read if bad_places else ():
            places = [rows.where(i) for i in range(len(rows))]
            if places and all(place in bad_places for place in places):
                problem = f"no row from {places[0]} to {places[-1]} can be used"
                raise InputError(f"{problem}; {bad_places[places[0]]}")
        print_rank0(*self._forms())

    def _kinds(self) -> list[str]:
        """Return a line for each reason: how many rows it has, and the first of them with what to do."""
        kinds: dict[tuple[str, str], list[BadRow]] = {}
        for error in self.bad:
            kinds.setdefault((error.reason, error.remedy), []).append(error)
        ordered = sorted(kinds.values(), key=len, reverse=True)
        return [escaped(f"{len(kind):>6}  {kind[0]}") for kind in ordered]

    def _forms(self) -> list[str]:
        """Return a line for each source: the forms of its rows, and the columns that nothing has read."""
        sources: dict[str, list[Rows]] = {}
        for rows in self.read:
            sources.setdefault(rows.source, []).append(rows)
        lines = []
        for source, rows_of_source in sources.items():
            forms = sum((rows.forms for rows in rows_of_source), Counter())
            names = [name for name, _ in forms.most_common()]
            # Numbers say more than names only where there are several forms.
            if len(forms) > 1:
                names = [f"{count} {name}" for name, count in forms.most_common()]
            read = {name for rows in rows_of_source for name in rows.columns_read}
            filled = {name: None for rows in rows_of_source for name in rows.columns_filled}
            unused = [name for name in filled if name not in read]
            label = "rows" if len(sources) == 1 else source
            line = f"{label}: {', '.join(names)}"
            lines.append(f"{line}; unused columns: {', '.join(unused)}" if unused else line)
        return lines


def chosen_rows(
    option: str,
    rows: RowsLike,
    name: str | list[str] | None,
    config_name: str | None,
    split: str,
    bad_rows: list[BadRow] | None = None,
) -> Rows:
    """Return the rows that Python gave for an option, or that the config names; `bad_rows` as in `load_rows`."""
    named: Any = name if rows is None else rows
    if named is None:
        raise InputError(
            f"{option} is missing; give --{option}, or in Python train(config, {option}=rows)"
        )
    if isinstance(named, str):
        return load_rows(named, config_name, split, bad_rows)
    if isinstance(named, datasets.DatasetDict):
        if len(named) > 1:
            raise InputError(f"{option}: expected one split, got {sorted(named)}; give one of them")
        (named,) = named.values()
    if isinstance(named, pandas.DataFrame):
        named = datasets.Dataset.from_pandas(named, preserve_index=False)
    if isinstance(named, datasets.Dataset):
        return rows_of_sources([named], [option], bad_rows)
    if isinstance(named, dict) or not isinstance(named, Iterable):
        expected = "names of files or of Hub datasets, a Dataset, a DataFrame, or dictionaries"
        raise InputError(f"{option}: expected {expected}, got {type(named).__name__}")
    named = [*named]
    if named and all(isinstance(one, str) for one in named):
        return load_rows(named, config_name, split, bad_rows)
    if not named:
        raise InputError(f"dataset {option} has no rows")
    return Rows(named, option, bad=bad_rows)


def load_train_eval(
    config: DataConfig,
    dataset: RowsLike = None,
    eval_dataset: RowsLike = None,
    reading: Reading | None = None,
) -> tuple[Rows, Rows]:
    """Return the rows to train on and the held-out rows: those given, or those that a run config names."""
    bad = None if reading is None else reading.bad
    train = chosen_rows(
        "dataset", dataset, config.dataset, config.dataset_config, config.dataset_split, bad
    )
    if not config.eval_size:
        held_out = train.subset(range(0))
    # Held out from the end of the rows: the same rows, whatever the seed.
    elif config.eval_dataset is None and eval_dataset is None:
        cut = len(train) - config.eval_size
        if cut <= 0:
            problem = f"eval_size={config.eval_size} leaves nothing to train on"
            has = f"{train.source} has {len(train)} rows"
            raise InputError(f"{problem}: {has}; hold out fewer, or --eval_size 0 for none")
        train, held_out = train.subset(range(cut)), train.subset(range(cut, len(train)))
    # Or of a dataset of its own, which has the same configuration if it has the same name.
    else:
        name = config.eval_dataset
        configuration = config.dataset_config if name == config.dataset else None
        held_out = chosen_rows(
            "eval_dataset", eval_dataset, name, configuration, config.eval_split, bad
        )
        evaluated = min(len(held_out), config.eval_size)
        if len(held_out) != config.eval_size:
            summary = f"evaluated on {evaluated} of {len(held_out)} held-out rows (--eval_size)"
            print_rank0(f"{held_out.source}: {summary}")
        held_out = held_out.subset(range(evaluated))
    if reading is not None:
        reading.read += [train, held_out]
    return train, held_out
