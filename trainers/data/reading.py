"""Reading all rows of a run: those that cannot be used are collected, and reported together at the end."""

import contextlib
from collections.abc import Iterable
from typing import Any, NoReturn, TypeAlias

from ..base.screen import print_rank0
from ..base.text import InputError, InputErrors, escaped
from ..options import RunConfig
from .rows import IS_NAME, BadRow, Name, Rows, load_rows

RowsLike: TypeAlias = Name | Iterable[Any] | None
"""Rows in Python: names, tables, or the rows themselves."""


class RowReport(contextlib.AbstractContextManager):
    """The rows that a run reads, as a context. At its end more bad ones than a share of all raise `InputErrors`.

    It also prints which rows are left out, which forms the rows had, and which of their columns were not read.
    """

    def __init__(self, bad_rows: float = 0.0):
        self.share = bad_rows
        self.bad: list[BadRow] = []
        self.read: list[Rows] = []

    def add(self, rows: Rows) -> Rows:
        """Return rows, which are read now."""
        self.read.append(rows)
        return rows

    def __exit__(self, kind, error, traceback) -> None:
        # A row may have been read twice, to be trained on and to be sampled for.
        errors = {error.where: error for error in self.bad}
        self.bad[:] = errors.values()
        total = sum(map(len, self.read))
        # Too many bad rows may be why too few are left; what they lack is said first.
        if len(self.bad) > self.share * total and isinstance(error, InputError | None):
            self._refuse(total)
        if error is not None:
            return
        if self.bad:
            title = f"left out {len(self.bad)} of {total} rows that cannot be used; the first of each kind:"
            print_rank0(title, *self._kinds())
        # Without a single held-out row nothing would be evaluated, and nothing would say so.
        for rows in self.read:
            places = [*map(rows.where, range(len(rows)))] if len(rows) <= len(self.bad) else []
            if places and errors.keys() >= {*places}:
                problem = f"no row from {places[0]} to {places[-1]} can be used"
                raise InputError(f"{problem}; {errors[places[0]]}")
        print_rank0(*self._forms())

    def _refuse(self, total: int) -> NoReturn:
        remedy = "" if len(self.bad) == total else "--bad_rows 1 leaves them out"
        # One row's reason is a line.
        if len(self.bad) == 1:
            raise InputError("; or ".join(filter(None, [str(self.bad[0]), remedy])))
        title = f"{len(self.bad)} of {total} rows cannot be used{remedy and f' ({remedy})'}; the first of each kind:"
        raise InputErrors("\n".join([title, *self._kinds()]))

    def _kinds(self) -> list[str]:
        """Return a line for each reason: how many rows it has, and the first of them with what to do."""
        kinds: dict[tuple[str, str], list[BadRow]] = {}
        for error in self.bad:
            kinds.setdefault((error.reason, error.remedy), []).append(error)
        ordered = sorted(kinds.values(), key=len, reverse=True)
        return [escaped(f"{len(kind):>6}  {kind[0]}") for kind in ordered]

    def _forms(self) -> list[str]:
        """Return a line for each source: the forms of its rows, and the columns that nothing has read."""
        sources = {rows.source: rows for rows in self.read if len(rows)}
        lines = []
        for source, rows in sources.items():
            names = [name for name, _ in rows.forms.most_common()]
            # Numbers say more than names only where there are several forms.
            if len(names) > 1:
                names = [f"{count} {name}" for name, count in rows.forms.most_common()]
            unused = [name for name in rows.columns_filled if name not in rows.columns_read]
            label = "rows" if len(sources) == 1 else source
            line = f"{label}: {', '.join(names)}"
            shown = ", ".join(_shown(name, rows) for name in unused)
            lines.append(f"{line}; unused columns: {shown}" if unused else line)
        return lines


def _shown(column: str, rows: Rows) -> str:
    """Return the name of a column, with how a text in it begins."""
    with contextlib.suppress(BadRow):
        text = str(rows[0].get(column))
        return f"{column} ({text!r:.40})" if " " in text else column
    return column


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
    if not isinstance(named, IS_NAME):
        if isinstance(named, dict) or not isinstance(named, Iterable):
            expected = "names of files or of Hub datasets, a Dataset, a DataFrame, or dictionaries"
            raise InputError(f"{option}: expected {expected}, got {type(named).__name__}")
        named = [*named]
        if not named:
            raise InputError(f"dataset {option} has no rows")
        if not isinstance(named[0], IS_NAME):
            return Rows(named, option, bad=bad_rows)
    return load_rows(named, config_name, split, bad_rows, option)


def load_train_eval(
    config: RunConfig,
    dataset: RowsLike = None,
    eval_dataset: RowsLike = None,
    reading: RowReport | None = None,
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
            remedy = f"hold out fewer (--eval_size 0: none); a step takes {config.batch_option}={config.rows_per_step}"
            raise InputError(f"{problem}: {has}; {remedy} of the others")
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
