"""Slips that are drawn (`make test-mutations`): each is one change of code that compiles, and finds its tests."""

import ast

import pytest

from tests.tools import draw, slips

EVERYTHING = lambda file, function: True  # noqa: E731


@pytest.mark.parametrize(
    "before, kind, after",
    [
        ("a < b", "edge", "a <= b"),
        ("a[:, 1:]", "slice", "a[:, :-1]"),
        ("f(x, a, b)", "swap", "f(x, b, a)"),
        ("f(x, group=g)", "keyword", "f(x)"),
        ("x.float() + 1", "forgotten", "x + 1"),
        ("x * mask - y", "term", "x - y"),
        ("a + 1 if b else c", "condition", "a + 1 if (not (b)) else c"),
        ("-a", "sign", "(a)"),
        ("a and b", "and, or", "a or b"),
        ("x.sum(dim=-1)", "twin", "x.mean(dim=-1)"),
        ("x.sum(dim=-1)", "dim", "x.sum(dim=0)"),
        ("row['a']", "key", "row['a_']"),
        ("lambda: 4", "constant", "lambda: 5"),
    ],
)
def test_kinds_of_slips(tmp_path, monkeypatch, before, kind, after):
    monkeypatch.setattr(draw, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text(f"y = {before}\n")
    found = draw._Places("a.py", lambda name: True).found
    changed = {slip.applied().decode() for slip in found if slip.kind == kind}
    assert f"y = {after}\n" in changed


def test_slips_follow_from_the_seed_and_each_is_one_change():
    drawn = draw.draw(3, 40, "objectives", EVERYTHING)
    assert drawn[:20] == draw.draw(3, 20, "objectives", EVERYTHING)
    assert drawn[:20] != draw.draw(4, 20, "objectives", EVERYTHING)
    for _, slip in drawn:
        before, after = slip.lines()
        assert before != after
        if slip.file.endswith(".py"):
            ast.parse(slip.applied())


def test_a_slip_has_the_tests_that_executed_its_function_the_narrowest_first():
    file = "fused_rl/objectives/estimators.py"
    slip = draw.Slip(file, 0, 0, "", "", "k3")
    called = {file: ["k3"], "trainers/sft.py": ["train"]}
    wide = slips.Test("tests/a.py::wide", 1.0, called)
    narrow = slips.Test("tests/b.py::narrow", 9.0, {file: called[file]})
    other = slips.Test("tests/a.py::other", 1.0, {file: ["another"]})
    assert slips.tests_of(slip, [wide, narrow, other]) == [narrow, wide]


def test_a_slip_in_a_kernel_has_the_tests_of_all_that_import_it():
    users = slips.users_of("kernels/online.py")
    assert {"kernels/online.py", "kernels/logprob.py"} <= users
    assert "fused_rl/cpu/native.py" in slips.users_of("fused_rl/cpu/rows.c")
