"""The verifier `math`: mathematics is compared by value, under limits that strike one answer alone."""

import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import fused_rl
from fused_rl import judging
from fused_rl.judging import Pool
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.rollouts.roll_out import rollout_metrics
from fused_rl.trainers.scorers import math
from tests.trainers.test_verifiers import load_scorers, rolled_out, samples

ROOT = Path(__file__).parents[2]
CASES = [
    ("The answer is \\boxed{42}.", "42", 1),
    ("#### 1,000", "#### 1000", 1),
    ("#### 41", "#### 42", 0),
    ("$\\frac{1}{2}$", "0.5", 1),
    ("#### 1234.5", "$1,234.50", 1),
    ("\\boxed{(1, 2)}", "(1, 3)", 0),
    ("\\boxed{50\\%}", "0.5", 1),
    ("\\boxed{3 \\text{ cm}}", "3", 1),
    ("\\boxed{\\$32,\\!348}", "\\$32,\\!348", 1),
    ("So it costs \\$6.", "$\\$6$.", 1),
    ("\\boxed{1}", "$\\{x|-2\\leq x<1\\}$", 0),  # no number of it
    ("\\boxed{\\frac{3}{4}}", "$$\n\\frac34\n$$", 1),
    ("x+1", "x+1", 1),  # without a sign of LaTeX: as text
    ("", "42", 0),
    ("\\boxed{\\frac{", "42", 0),
]


@pytest.fixture(scope="module")
def verifier():
    found = math.MathVerifier(timeout=5)
    yield found
    found.pool.close()


def test_mathematics_is_compared_by_value_for_everybody(verifier):
    responses, answers, verdicts = zip(*CASES, strict=True)
    assert verifier(samples(responses, [{"answer": answer} for answer in answers])) == [*verdicts]
    assert verifier(samples(["#### 8", "#### 9"], [{"answer": ["7", "8"]}] * 2)) == [1, 0]
    assert verifier.broken == []
    assert fused_rl.judge([*responses[:3]], [*answers[:3]], cpu_seconds=5.0) == [*verdicts[:3]]
    assert fused_rl.judge(["\\boxed{(10^{10})!}"], ["7"], cpu_seconds=0.5) == [0]


def test_an_answer_that_math_verify_cannot_read_is_refused(verifier):
    good = ("1,234.5", "50%", r"5\text{cm}", r"[0,\infty)", r"\text{(B)}", r"\$6", "$5$.")
    bad = {"Paris": "has a word", "?": "cannot", "3:30 p.m.": "cannot"}
    verifier.read_ahead({"answer": answer} for answer in (*good, None, *bad))
    for answer in good:
        verifier.check({"answer": answer})
    for answer, why in bad.items():
        reason = f"^verifier 'math': .*{why}.*{re.escape(answer)}.*exact_match"
        with pytest.raises(InputError, match=reason):
            verifier.check({"answer": answer})


def test_an_answer_that_never_ends_costs_itself_alone_and_is_a_metric_and_a_line(
    capsys, monkeypatch
):
    monkeypatch.setattr(math, "PATIENCE", 1)
    verifier = math.MathVerifier(timeout=0.6)  # a pool of its own, which it closes
    endless = "\\boxed{(10^{10})!}"  # two are equal, and are judged once
    rollout = rolled_out([verifier], ["7", endless, "\\boxed{7}", endless], [{"answer": "7"}] * 4)
    row = {"answer": "(" * 300 + "1" + ")" * 300}
    verifier.read_ahead([row])
    with pytest.raises(InputError, match=r"the answer took more than 0.6 s of CPU, got '\(\(\("):
        verifier.check(row)
    verifier.pool.close()
    assert rollout.scores["math"].tolist() == [1, 0, 1, 0]
    metrics = rollout_metrics(rollout, {}, 1)
    assert (
        rollout.incidents == {"verifier/math/timeouts": 2.0}
        and rollout.incidents.items() <= metrics.items()
    )
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "2 of 4" in said and "d.jsonl, line 2" in said


def judged(what):
    """A judge whose cases are commands."""
    if what == "memory":
        bytearray(1 << 31)
    if what == "crash":
        os._exit(7)
    if what == "print":
        os.write(1, b"nobody reads this")
    if what == "raise":
        raise ValueError("no such number")
    if what == "draw":
        import random

        return random.random()
    return float(what != "wrong")


def test_a_limit_costs_its_own_case(capfd):
    pool = Pool(judged, cpu_seconds=5.0)
    verdicts = pool.judge(
        [(what,) for what in ("right", "memory", "crash", "raise", "wrong", "print", "right")]
    )
    drawn = {score for score, _ in pool.judge([("draw",)] * 4)}
    pool.close()
    assert [score for score, _ in verdicts] == [1, 0, 0, 0, 0, 1, 1] and len(drawn) == 1
    assert ["MemoryError" in broke for _, broke in verdicts if broke] == [True, False, False]
    assert "no such number" in verdicts[3][1] and verdicts[4][1] is None
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_no_process_outlives_a_run_that_was_killed():
    code = """
        import os, signal
        from fused_rl.judging import Pool
        pool = Pool(os.getpid, 5.0)
        print(int(pool.judge([()])[0][0]), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True
    )
    stat, end = Path(f"/proc/{int(done.stdout)}/stat"), time.monotonic() + 30
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX":
        assert time.monotonic() < end
        time.sleep(0.02)


def test_math_verify_that_is_missing_is_reported_at_once(monkeypatch):
    monkeypatch.setattr(judging, "agrees", lambda *case: __import__("no_such_module"))
    judging.pool.cache_clear()
    with pytest.raises(InputError, match="'no_such_module'; pip install 'math-verify"):
        load_scorers("math")
