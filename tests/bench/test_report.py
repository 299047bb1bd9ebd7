"""Results survive the way to a file and to the page."""

from types import SimpleNamespace

import pytest

from bench import plots, report, results, run
from bench.machine import ROOT
from tests.bench.cases import one_case


@pytest.fixture
def page(tmp_path, monkeypatch):
    """Results and a page in a folder of their own."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(plots, "DOCS", tmp_path)
    return tmp_path / "benchmarks.md"


@pytest.mark.slow
def test_results_survive_the_round_trip_and_the_report(page, clock, capsys):
    assert report.command("report", []) == 1
    assert "no results" in capsys.readouterr().out and not page.exists(), "what was there stays"
    rows = run.run_case(one_case(), "plain torch", 1e9, 1e9)
    wrong = rows[-1] | {
        "implementation": "a peer",
        "status": results.WRONG,
        "reason": "entropy off by 2 nats",
    }
    rows += [
        wrong,
        results.not_run("TRL", results.NOT_INSTALLED, "not installed", "token_logprobs"),
    ]
    args = SimpleNamespace(device="cpu", out=str(page.parent), group="kernels")
    path = results.save(args, rows, copy_bytes_per_s=1e9)
    found = results.load(path)
    assert {"command", "commit", "device", "versions"} <= set(found["environment"])
    assert str(ROOT) not in path.read_text()
    assert len(found["rows"][0]["samples_ms"]["both"]) >= 3

    # What cannot be read is left out, and said.
    whole = path.read_text()
    (page.parent / "kl-cpu.json").write_text(whole[:-200])
    (page.parent / "linear-cpu.json").write_text(whole.replace('"status"', '"state"'))
    assert report.command("report", []) == 1
    printed = capsys.readouterr().out
    assert "left out: kl-cpu.json: JSONDecodeError" in printed
    assert "left out: linear-cpu.json: KeyError: 'status'" in printed
    text = page.read_text()
    assert f"{results.number(found['rows'][0]['ms']['both'])} ms" in text
    assert "| a peer |" in text and " †" in text
    assert (page.parent / "benchmarks-cpu.svg").stat().st_size > 5000


def test_time_to_an_accuracy_is_read_between_evaluations():
    row = {"accuracy": [[0, 0.0, 0.2], [10, 4.0, 0.4], [20, 8.0, 0.8]]}
    assert report.seconds_to(row, 0.6) == pytest.approx(6.0)
    with pytest.raises(ValueError, match="never"):
        report.seconds_to(row, 0.9)
