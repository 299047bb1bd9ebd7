"""How far two runs agree: ratios to ours, of one machine, that differ by more than a tenth.

    python -m bench compare runs/first runs/second

Ratios are what the suite is for: absolute times are those of a machine on a day.
"""

import argparse
from pathlib import Path

from bench import results

APART = 0.1


def ratios(folder: Path) -> dict[tuple, float]:
    """Of every row of a folder's results, by group, case, implementation and what it is compared to."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        for row in results.measured(results.load(path)["rows"]):
            over = dict(row.get("time_over", {}))
            for name, base in (("steps_over_trl", "TRL"), ("over_generate", "generate")):
                over |= {base: row[name]} if name in row else {}
            told = (row.get(name) for name in ("op", "task", "dtype", "layout", "masked"))
            case = (*told, *row.get("shape", ()))
            for base, ratio in over.items():
                if base != row["implementation"] and isinstance(ratio, float):  # not "nan"
                    found[path.stem, case, row["implementation"], base] = ratio
    return found


def command(name: str, words: list[str]) -> int:
    """Print the ratios that differ, and how many agree; 1 where one differs, or nothing can be compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs=2, type=Path, metavar="FOLDER", help="written by --out")
    first, second = map(ratios, parser.parse_args(words).folders)
    both = first.keys() & second.keys()
    apart = []
    for key in first:
        if key in both and abs(second[key] / first[key] - 1) > APART:
            group, case, implementation, base = key
            told = " ".join(str(part) for part in case if part)
            change = f"{100 * (second[key] / first[key] - 1):+.0f} %"
            apart.append([group, told, implementation, base, first[key], second[key], change])
    if apart:
        print(results.table(["group", "case", "implementation", "over", "first", "second", "change"], apart))
    print(f"{len(both) - len(apart)} of {len(both)} ratios agree within {APART:.0%}")
    return int(bool(apart) or not both)
