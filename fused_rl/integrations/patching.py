"""Replacing attributes of a host library by ours, and putting back every one of them."""

import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from packaging.specifiers import SpecifierSet


class Patch:
    """The replacements of an integration in its host: `apply()` replaces, `remove()` puts back, and a `with` does both.

    A host's modules import each other's functions by name, so that one function stands in many places. Every module of
    the host that holds the original, under whatever name, gets the replacement; a module that is imported later copies
    the replacement, and is found again by `remove`.

    Args:
        host: the distribution, as pip knows it, and the package that is imported.
        versions: the versions that the integration was tested with, e.g. `">=1.16,<1.17"`.
        replacements: `{"package.module.attribute": replacement}`, resolved at each `apply`; it may import the host.
    """

    def __init__(self, host: str, versions: str, replacements: Callable[[], Mapping[str, object]]):
        self.host = host
        self.versions = SpecifierSet(versions)
        self._replacements = replacements
        # The options of `apply`, for the replacements to read while they are in force.
        self.options: dict[str, Any] = {}
        # By name, the original and ours of what is replaced now.
        self._pairs: dict[str, tuple[object, object]] = {}

    @property
    def applied(self) -> bool:
        """True if the host is patched now."""
        return bool(self._pairs)

    def check_version(self) -> None:
        """Refuse a host that is absent, or of a version that the integration does not know."""
        try:
            version = importlib.metadata.version(self.host)
        except importlib.metadata.PackageNotFoundError:
            raise ImportError(
                f"{self.host} is not installed; install {self.host}{self.versions}"
            ) from None
        # Without `prereleases` a release candidate of a known version would be unknown.
        if not self.versions.contains(version, prereleases=True):
            raise ImportError(
                f"{self.host} {version} is not a version that this integration knows ({self.versions}); "
                f"install {self.host}{self.versions}, or a fused_rl that knows {version}"
            )

    def apply(self, **options: object) -> "Applied":
        """Replace everything, or nothing if it is replaced already. The result restores when used in a `with`.

        Raises:
            ImportError: a host that is absent, or of a version that the integration does not know.
            ValueError: a host that is patched with other options.
        """
        if self.applied:
            if options != self.options:
                raise ValueError(
                    f"{self.host} is patched with {self.options}, and now with {options}; unpatch() first"
                )
            # Leaving this `with` must not end the patch of whoever applied it first.
            return Applied(self, owner=False)
        self.check_version()
        # All originals are read before the first is exchanged: an error leaves the host as it was.
        pairs = {name: (self._read(name), ours) for name, ours in self._replacements().items()}
        for original, ours in pairs.values():
            self._exchange(original, ours)
        self._pairs = pairs
        self.options = options
        return Applied(self, owner=True)

    def original(self, name: str) -> Any:
        """The host's own object of that name in `replacements`, patched or not: what a replacement does not serve."""
        return self._pairs[name][0] if self.applied else self._read(name)

    def remove(self) -> None:
        """Put back every attribute that was replaced; nothing if the host is not patched."""
        for original, ours in self._pairs.values():
            self._exchange(ours, original)
        self._pairs = {}
        self.options = {}

    def _read(self, name):
        module, _, attribute = name.rpartition(".")
        found = vars(importlib.import_module(module)).get(attribute)
        if found is None:
            raise ImportError(
                f"{self.host} has no {name}: its version is known, but its files are not as released"
            )
        return found

    def _exchange(self, old: object, new: object) -> None:
        """In every imported module of the host, each attribute that is `old` becomes `new`."""
        # A distribution has hyphens where its package has underscores.
        package = self.host.replace("-", "_")
        # In a copy, because a thread may import meanwhile.
        for name, module in sys.modules.copy().items():
            if module is None or name.partition(".")[0] != package:
                continue
            # `vars`, not `getattr`: a lazy module would import the attribute.
            found = [attribute for attribute, value in vars(module).items() if value is old]
            for attribute in found:
                setattr(module, attribute, new)


class Removable(Protocol):
    """What a `with` can take away again."""

    def remove(self) -> None: ...


class Applied:
    """A patch in force: leaving the `with` removes it, unless it was in force before."""

    def __init__(self, patch: Removable, owner: bool):
        self._patch = patch
        self._owner = owner

    def __enter__(self) -> "Applied":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._owner:
            self._patch.remove()
