"""The pool of processes that judge answers: limits, deaths, ends. None of it depends on how fast the machine is."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from fused_rl.trainers.workers.limits import Pool, Verdict, WorkerError

ROOT = Path(__file__).parent.parent.parent
JUDGE = """
    import os, signal, sys, time

    def load():
        return judge

    def once(marker):
        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
            return True
        except FileExistsError:
            return False

    def judge(what, marker=""):
        if what == "spin":
            while True:
                pass
        if what == "sleep":
            time.sleep(3600)
        if what == "memory":
            bytearray(1 << 30)
        if what == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if what == "raise":
            raise ValueError("no such number")
        if what == "exit":
            os._exit(7)
        if what == "print":
            print("{}")
            os.write(1, b"{}")
            os.write(2, b"told to nobody")
        if what == "die once" and once(marker):
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "kill the server once" and once(marker):
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(3600)
        if what == "length":
            return len(marker)
        if what == "hash":
            return hash("a") % 1000
        if what == "tell and wait":  # until the test has done what it does
            with open(marker + ".new", "w") as file:
                file.write(f"{os.getpid()} {os.getppid()}")
            os.rename(marker + ".new", marker)
            while not os.path.exists(marker + ".go"):
                time.sleep(0.01)
        return what != "wrong"
"""
RIGHT, WRONG = Verdict(1.0), Verdict(0.0)


@pytest.fixture
def judge(tmp_path):
    path = tmp_path / "judge.py"
    path.write_text(textwrap.dedent(JUDGE))
    return path


def eventually(condition, seconds=60.0):
    """Wait for it; the bound is for a test that fails."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def gone(pid: int) -> bool:
    """No such process, or one that has ended and that nobody has asked about yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


def test_a_broken_limit_costs_its_own_case_and_no_other(judge, capfd):
    kinds = ["right", "spin", "wrong", "memory", "raise", "crash", "print", "right"]
    with Pool(judge, cpu_seconds=0.5, memory=1 << 28, size=3) as pool:
        verdicts = pool.judge([[kind] for kind in kinds])
        assert pool.judge([["wrong"], ["right"]]) == [WRONG, RIGHT] and pool.restarts == 0
    broke = {kind: verdict.broke for kind, verdict in zip(kinds, verdicts, strict=True)}
    assert broke == {
        "right": None,
        "wrong": None,
        "print": None,
        "spin": "took more than 0.5 s of CPU",
        "memory": "took more than 0.25 GiB of memory",
        "raise": "raised ValueError: no such number",
        "crash": "crashed (SIGSEGV)",
    }
    assert [verdict.score for verdict in verdicts] == [1, 0, 0, 0, 0, 0, 1, 1]
    assert capfd.readouterr() == ("", "")  # a parser's complaints are not the user's


def test_a_long_batch_keeps_its_order_and_a_child_its_own_memory(judge):
    texts = ["x" * n for n in [*range(50), 300_000, 7]]  # more than a pipe holds
    with Pool(judge, cpu_seconds=60, size=3) as pool:
        assert [verdict.score for verdict in pool.judge([["length", text] for text in texts])] == list(map(len, texts))
        assert pool.judge([]) == []
        hashes = pool.judge([["hash"]])
    with Pool(judge, cpu_seconds=60) as other:
        assert other.judge([["hash"]]) == hashes  # else sympy's order of terms would change from run to run


def test_a_child_that_was_killed_is_replaced_and_its_case_judged_again(judge, tmp_path):
    with Pool(judge, cpu_seconds=60, size=2) as pool:
        assert pool.judge([["wrong"], ["die once", str(tmp_path / "a")], ["wrong"]]) == [WRONG, RIGHT, WRONG]
        assert pool.restarts == 1
        with pytest.raises(WorkerError, match="died 3 times in a row, at last of exit status 7") as raised:
            pool.judge([["wrong"], ["exit"]])
        assert raised.value.case == 1 and pool.restarts == 4
        assert pool.judge([["right"]]) == [RIGHT]


def test_a_server_that_was_killed_is_replaced(judge, tmp_path):
    with Pool(judge, cpu_seconds=60, size=1) as pool:
        assert pool.judge([["wrong"], ["kill the server once", str(tmp_path / "a")]]) == [WRONG, RIGHT]
        assert pool.restarts == 1
        pool.close()
        assert pool.judge([["right"]]) == [RIGHT]


def test_a_child_that_sleeps_is_killed_and_at_last_named(judge):
    with Pool(judge, cpu_seconds=60, wall_seconds=0.2) as pool:
        with pytest.raises(WorkerError, match="sleep: it did not end within 0.2 s") as raised:
            pool.judge([["sleep"]])
        assert raised.value.case == 0


def test_verdicts_of_an_interrupted_call_are_not_taken_for_those_of_the_next(judge, monkeypatch):
    with Pool(judge, cpu_seconds=60, size=2) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(pool, "_receive", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                pool.judge([["right"], ["right"]])
        assert pool.judge([["wrong"]] * 5) == [WRONG] * 5


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit(2)", "SystemExit: 2"),
        ("import os; os._exit(3)", "it ended with exit status 3"),
        ("print('{}'); import time; time.sleep(3600)", "it was not ready within 1 s"),
    ],
)
def test_a_judge_that_does_not_load_is_told(code, message, tmp_path):
    path = tmp_path / "judge.py"
    path.write_text(code)
    with pytest.raises(WorkerError, match=message):
        Pool(path, cpu_seconds=1, start_seconds=1 if "sleep" in code else 300)


CALLER = """
    import os, signal, sys, time
    from pathlib import Path
    from fused_rl.trainers.workers.limits import Pool

    told = []
    signal.signal(signal.SIGINT, lambda *_: told.append("SIGINT"))
    pool = Pool(Path(sys.argv[1]), cpu_seconds=3600)
    if sys.argv[3:] and os.fork() == 0:
        Path(sys.argv[3]).write_text(str(os.getpid()))
        time.sleep(3600)  # holds the server's pipe open
    print(pool.judge([["tell and wait", sys.argv[2]]]), pool.restarts, told)
"""


@pytest.fixture
def caller(judge, tmp_path):
    """Starts a process in a session of its own, waits until it is judging; it, and the pids of child and server."""
    started = []

    def start(*arguments):
        told = tmp_path / "told"
        command = [sys.executable, "-c", textwrap.dedent(CALLER), str(judge), str(told), *arguments]
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=subprocess.PIPE, text=True)
        started.append(process)
        eventually(lambda: told.exists() or process.poll() is not None, 300)
        return process, [int(pid) for pid in told.read_text().split()]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_terminals_ctrl_c_reaches_the_caller_and_not_the_workers(caller, tmp_path, number):
    process, pids = caller()
    assert not [pid for pid in pids if os.getsid(pid) == process.pid]
    os.killpg(process.pid, signal.SIGINT)
    for pid in pids:
        os.kill(pid, number)  # as a scheduler does, which knows of no sessions
    (tmp_path / "told.go").touch()
    out, _ = process.communicate(timeout=300)
    assert out == "[Verdict(score=1.0, broke=None)] 0 ['SIGINT']\n"


@pytest.mark.slow
def test_no_worker_outlives_a_caller_that_was_killed(caller):
    process, pids = caller()
    assert not any(gone(pid) for pid in pids)
    process.kill()
    eventually(lambda: all(gone(pid) for pid in pids))


def test_no_worker_outlives_a_caller_whose_fork_holds_the_pipe(caller, tmp_path):
    process, pids = caller(str(tmp_path / "fork"))
    eventually((tmp_path / "fork").exists)
    process.kill()
    try:
        eventually(lambda: all(gone(pid) for pid in pids))
    finally:
        os.kill(int((tmp_path / "fork").read_text()), signal.SIGKILL)


def test_no_child_outlives_its_server(caller, tmp_path):
    _, (child, server) = caller()
    os.kill(server, signal.SIGKILL)
    eventually(lambda: gone(child))


def test_a_pool_that_is_forgotten_ends_its_server(judge):
    pool = Pool(judge, cpu_seconds=60)
    server = pool.server.pid
    del pool
    eventually(lambda: gone(server))
