"""The hostile inputs of test_hostile.py, ten times as many on the CPU path, three times on the kernels."""

import os

import pytest
from hypothesis import given, settings

from tests.hostile import OPS, cases
from tests.test_hostile import SETTINGS, check


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
def test_ops_at_length(backend, name):
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    settings(max_examples=36 if interpreted else 120, **SETTINGS)(given(cases())(lambda case: check(OPS[name], case)))()
