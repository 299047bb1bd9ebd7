"""Slips in the code (`make test-mutations`): each is one change, and the tests that could see it are found."""

from pathlib import Path

import pytest

from tests.mutations import MUTATIONS, Mutation
from tests.tools import slips

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_one_change_of_the_code_that_stands_here(name):
    mutation = MUTATIONS[name]
    assert mutation.old != mutation.new
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1


def test_a_slip_has_the_tests_that_executed_its_function_the_narrowest_first():
    file = "fused_rl/objectives/estimators.py"
    slip = Mutation(file, "    x = -d\n", "    x = d\n")
    called = {file: [slips.function_of(slip)], "trainers/sft.py": ["train"]}
    wide = slips.Test("tests/a.py::wide", 1.0, called)
    narrow = slips.Test("tests/b.py::narrow", 9.0, {file: called[file]})
    other = slips.Test("tests/a.py::other", 1.0, {file: ["another"]})
    assert slips.tests_of(slip, [wide, narrow, other]) == [narrow, wide]


def test_a_slip_in_a_kernel_has_the_tests_of_all_that_import_it():
    users = slips.users_of("kernels/online.py")
    assert {"kernels/online.py", "kernels/logprob.py"} <= users
    assert "fused_rl/cpu/native.py" in slips.users_of("fused_rl/cpu/rows.c")
