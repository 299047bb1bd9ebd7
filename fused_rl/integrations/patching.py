"""Replacing attributes of a host library by ours, and putting back every one of them."""

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from fused_rl.integrations.self_test import parameters_of, self_test

# The patch of each host whose module is imported, for `status`.
PATCHES: "dict[str, Patch]" = {}


class Replacement(NamedTuple):
    """One function of a host, and ours in its place; a row of a `Patch`'s table.

    Rows whose last names are equal, leading underscores aside, are one function under several names, the newest first.

    Args:
        name: the host's, `"package.module.attribute"`.
        ours: a function, or a class with a static `apply` for an autograd function. The host's parameters have to be a
            prefix of its own, in name, kind and default.
        versions: the releases that have it under this name and with these parameters; all by default.
        samples: by dtype, arguments for the self-test by name: small random tensors on the CPU from a generator of
            their own, `requires_grad` where a gradient is compared.
        optional: True where it is no news that the host lacks it, or outside of `versions` has it with other
            parameters.
    """

    name: str
    ours: Any
    versions: str = ""
    samples: Callable[[torch.dtype], Iterable[Mapping[str, object]]] | None = None
    optional: bool = False

    @property
    def function(self) -> str:
        """The host's function, under whatever name."""
        return self.name.rpartition(".")[2].lstrip("_")


class Agreement(NamedTuple):
    """What a host and a table agree on: rows with the host's own objects, and by function why the others stay."""

    pairs: dict[str, tuple[Replacement, Any]]  # by the host's name
    left: dict[str, str]


class Patch:
    """The replacements of an integration in its host: `apply()` replaces, `remove()` puts back, and a `with` does both.

    A host's modules import each other's functions by name, so that one function stands in many places. Every module of
    the host that holds the original, under whatever name, gets the replacement; a module that is imported later copies
    the replacement, and is found again by `remove`.

    Args:
        host: the distribution, as pip knows it, and the package that is imported.
        versions: the releases that the integration was tested with, e.g. `">=1.4,<1.17"`.
        table: what is replaced.
    """

    def __init__(self, host: str, versions: str, table: Sequence[Replacement]):
        self.host = host
        # A distribution has hyphens where its package has underscores.
        self.package = host.replace("-", "_")
        self.versions = SpecifierSet(versions)
        self.table = tuple(table)
        # The options of `apply`, for the replacements to read while they are in force.
        self.options: dict[str, Any] = {}
        self._agreement: Agreement | None = None
        PATCHES[host] = self

    @property
    def applied(self) -> bool:
        """True if the host is patched now."""
        return self._agreement is not None

    def installed(self) -> str | None:
        """The version of the host's distribution, without importing it; None if there is none."""
        try:
            return importlib.metadata.version(self.host)
        except importlib.metadata.PackageNotFoundError:
            return None

    def release(self) -> str:
        """The host's version; that of a fork under another distribution's name is what its package says.

        Raises:
            ImportError: the host is not installed.
        """
        installed = self.installed()
        if installed is not None:
            return installed
        if self.package not in sys.modules and importlib.util.find_spec(self.package) is None:
            raise ImportError(f"{self.host} is not installed; install {self.host}{self.versions}")
        package = importlib.import_module(self.package)
        # `getattr`, not `vars`: a lazy module has it only when it is asked.
        return str(getattr(package, "__version__", "of unknown version"))

    def knows(self, release: str) -> bool:
        """Return True of a release that the tests ran with: no candidate, development version or local build."""
        try:
            version = Version(release)
        except InvalidVersion:
            return False
        is_plain = not version.is_prerelease and version.local is None
        return is_plain and version in self.versions

    def check_version(self) -> None:
        """Refuse a host that is absent, or of a release that the integration does not know."""
        release = self.release()
        if not self.knows(release):
            raise ImportError(
                f"{self.host} {release} is not a release that this integration knows ({self.versions}); "
                f"install {self.host}{self.versions}, or a fused_rl that knows it"
            )

    def apply(self, *, strict: bool = False, **options: object) -> ExitStack:
        """Replace what agrees, or nothing if the host is patched already. Used in a `with`, the result restores the
        host at its end.

        In a known release names and parameters are compared, and in every other one the self-test runs as well.
        Functions that do not agree stay the host's, and a warning says so.

        Args:
            strict: raise instead of leaving anything to the host, and for a release that is not known.

        Raises:
            ImportError: a host that is not installed; with `strict`, one that differs from what the tests know.
            ValueError: a host that is patched with other options.
        """
        if strict:
            self.check_version()
        release = self.release()
        # All originals are read before the first is exchanged: an error leaves the host as it was.
        agreement = self.agreement(release)
        reasons = "; ".join(f"{name} ({why})" for name, why in agreement.left.items())
        message = f"left to {self.host} {release}: {reasons}"
        if strict and reasons:
            raise ImportError(message)
        if self.applied:
            if options != self.options:
                raise ValueError(
                    f"{self.host} is patched with {self.options}, and now with {options}; unpatch() first"
                )
            # Leaving this `with` must not end the patch of whoever applied it first.
            return ExitStack()
        if reasons:
            warnings.warn(message, stacklevel=3)
        for row, original in agreement.pairs.values():
            self._exchange(original, row.ours)
        self._agreement = agreement
        self.options = options
        patched = ExitStack()
        patched.callback(self.remove)
        return patched

    def agreement(self, release: str) -> Agreement:
        """What would be replaced in this release, or is; imports the host."""
        if self._agreement is not None:
            return self._agreement
        knows_release = self.knows(release)
        pairs: dict[str, tuple[Replacement, Any]] = {}
        left: dict[str, str] = {}
        for row in self.table:
            belongs = _belongs(release, row.versions)
            if knows_release and not belongs:
                continue
            original, gap = self._looked_up(row)
            is_news = not row.optional or (belongs and original is not None)
            if gap is not None and not is_news:
                continue
            if gap is None and not knows_release:
                result = self_test(original, row.ours, row.samples)
                gap = None if result == "passed" else f"self-test {result}"
            if gap is None:
                # A host may keep an older name beside a newer one.
                if all(original is not taken for _, taken in pairs.values()):
                    pairs[row.name] = row, original
                continue
            # Of several names the host has one, whose reason is the one to tell.
            if original is not None or row.function not in left:
                left[row.function] = gap
        replaced = {row.function for row, _ in pairs.values()}
        return Agreement(pairs, {name: gap for name, gap in left.items() if name not in replaced})

    def _looked_up(self, row):
        """The host's own object of a row, None if absent, and why its calls are not calls of ours, None if they are."""
        try:
            original = self._read(row.name)
        # A module of a host may fail in any way, as where another package that it needs is absent.
        except Exception as error:
            of_host = isinstance(error, ModuleNotFoundError) and row.name.startswith(
                f"{error.name}."
            )
            return None, f"no {row.name}" if of_host else f"{row.name}: {_line(error)}"
        if original is None:
            return None, f"no {row.name}"
        return original, _signature_gap(original, row.ours)

    def tested(self) -> dict[str, str]:
        """The result of the self-test by the host's name, of everything that is, or would be, replaced."""
        pairs = self.agreement(self.release()).pairs
        # The host has none of our options, so they must not count here.
        options, self.options = self.options, {}
        try:
            return {
                name: self_test(original, row.ours, row.samples)
                for name, (row, original) in pairs.items()
            }
        finally:
            self.options = options

    def original(self, name: str) -> Any:
        """The host's own object of that name, patched or not: what a replacement does not serve."""
        pairs = {} if self._agreement is None else self._agreement.pairs
        return pairs[name][1] if name in pairs else self._read(name)

    def remove(self) -> None:
        """Put back every attribute that was replaced; nothing if the host is not patched."""
        if self._agreement is None:
            return
        for row, original in self._agreement.pairs.values():
            self._exchange(row.ours, original)
        self._agreement = None
        self.options = {}

    def _read(self, name):
        module, _, attribute = name.rpartition(".")
        return vars(importlib.import_module(module)).get(attribute)

    def _exchange(self, old: object, new: object) -> None:
        """In every imported module of the host, each attribute that is `old` becomes `new`."""
        # In a copy, because a thread may import meanwhile.
        for name, module in sys.modules.copy().items():
            if module is None or name.partition(".")[0] != self.package:
                continue
            # `vars`, not `getattr`: a lazy module would import the attribute.
            for attribute, value in [*vars(module).items()]:
                if value is old:
                    setattr(module, attribute, new)


def _belongs(release: str, versions: str) -> bool:
    """Whether a release, or the one that a candidate precedes, is one of these; what is no version may be any."""
    try:
        version = Version(release)
    except InvalidVersion:
        return True
    return Version(version.base_version) in SpecifierSet(versions)


def _line(error: Exception) -> str:
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _signature_gap(theirs, ours) -> str | None:
    """Why calls of theirs are not calls of ours; None if they are."""
    try:
        host, mine = parameters_of(theirs), parameters_of(ours)
    except (TypeError, ValueError) as error:
        return f"parameters unknown: {_line(error)}"
    # What ours takes as *rest may have any name.
    takes_rest = bool(mine) and mine[-1].kind is inspect.Parameter.VAR_POSITIONAL
    compared = host[: len(mine) - 1] if takes_rest else host
    beyond = [
        p for p in mine[len(compared) :] if p.default is p.empty and p.kind is not p.VAR_POSITIONAL
    ]
    same = len(compared) <= len(mine) and not beyond
    for one, other in zip(compared, mine, strict=False):
        defaults_agree = one.default is one.empty or one.default == other.default
        same &= one.name == other.name and one.kind is other.kind and defaults_agree
    plain = [str(one.replace(annotation=one.empty)) for one in host]
    return None if same else f"parameters ({', '.join(plain)})"
