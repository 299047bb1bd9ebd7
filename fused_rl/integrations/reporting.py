"""What of which host is replaced by what, and whether it still agrees with the host's own: `status()`."""

import importlib
import sys
from typing import NamedTuple

from fused_rl.integrations.patching import PATCHES

# Each has a module of the same name here, which imports its host when it patches it.
HOSTS = ("trl", "verl", "openrlhf", "transformers")


class StatusRow(NamedTuple):
    """A function of a host, or a host as a whole, where `function` is empty."""

    host: str
    release: str
    # "patched", "not patched", "left to the host", "patched model by model", "not imported" or "not installed".
    state: str
    function: str = ""
    ours: str = ""
    # "passed", or what did not agree; of a function that is left to the host the reason.
    self_test: str = ""


def status(*hosts: str) -> list[StatusRow]:
    """Print and return what of each host is replaced, or would be, by what, and the result of the self-test.

    A host that no one has imported is not imported for this, unless it is named here.

    Args:
        hosts: "trl", "verl", "openrlhf" or "transformers"; all by default.

    Returns:
        A row per function of an imported host, and one for any other host.

    Raises:
        ValueError: a host that is none of these.
    """
    unknown = [host for host in hosts if host not in HOSTS]
    if unknown:
        raise ValueError(f"a host must be one of {', '.join(HOSTS)}; got {unknown[0]!r}")
    rows = [row for host in hosts or HOSTS for row in _rows(host, imports=bool(hosts))]
    _print_table(rows)
    return rows


def _rows(host, imports):
    importlib.import_module(f"fused_rl.integrations.{host}")
    patch = PATCHES[host]
    if host not in sys.modules and not imports:
        release = patch.installed()
        state = "not imported" if release else "not installed"
        return [StatusRow(host, _shown(patch, release) if release else "", state)]
    try:
        release = patch.release()
    except ImportError:
        return [StatusRow(host, "", "not installed")]
    release_shown = _shown(patch, release)
    if not patch.table:
        return [StatusRow(host, release_shown, "patched model by model")]
    agreement, results = patch.agreement(release), patch.tested()
    state = "patched" if patch.applied else "not patched"
    replaced = [
        StatusRow(
            host,
            release_shown,
            state,
            name,
            f"{row.ours.__module__}.{row.ours.__name__}",
            results[name],
        )
        for name, (row, _) in agreement.pairs.items()
    ]
    left = [
        StatusRow(host, release_shown, "left to the host", name, "", why)
        for name, why in agreement.left.items()
    ]
    return replaced + left


def _shown(patch, release):
    return release if patch.knows(release) else f"{release} (not known)"


def _print_table(rows):
    table = [("host", "release", "state", "function", "ours", "self-test"), *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
