"""Libraries that take seconds to import, imported where a test first uses them, and not when tests are collected."""

import importlib
import importlib.util

import pytest


class Lazy:
    """Stands for a module whose attributes are read; `monkeypatch` sets them by the module's name."""

    def __init__(self, name: str, before: str | None = None):
        """`before` is imported first, where a library's modules import each other in a circle."""
        vars(self).update(_name=name, _before=before)

    def _module(self):
        if self._before is not None:
            importlib.import_module(self._before)
        return importlib.import_module(self._name)

    def __getattr__(self, attribute):
        # Of each name of a module pytest asks what it is.
        if attribute.startswith(("__", "_mock")):
            raise AttributeError(attribute)
        return getattr(self._module(), attribute)


transformers = Lazy("transformers")
datasets = Lazy("datasets")
needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="TRL needs Python 3.11"
)
