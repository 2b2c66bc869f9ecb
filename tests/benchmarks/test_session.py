"""Gate first, then time; every row says where it comes from and is on disk at once."""

from __future__ import annotations

import subprocess
import time

import pytest
import torch

from benchmarks import environment
from benchmarks.results import read_json, read_rows
from benchmarks.session import Session
from benchmarks.subject import GateError, Phase, Prepared, Subject
from benchmarks.tables import Claim, format_table, problems
from benchmarks.timing import Budget, measure_time

PARAMETERS = {"length": 8, "mask": "full"}


def subject(
    name: str, *, milliseconds: float = 0.5, check=lambda: 0.25, runs: list | None = None, **options
) -> Subject:
    """An implementation that sleeps."""

    def work() -> None:
        if runs is not None:
            runs.append(name)
        time.sleep(milliseconds / 1e3)

    phases = tuple(Phase(phase, lambda: work, flops=4e6, bytes=2e6, on_host=True) for phase in ("forward", "backward"))
    return Subject(name, PARAMETERS, lambda: Prepared(check, phases), yardstick="unit", **options)


def wrong() -> float:
    raise GateError("grad_q is off by 5.00e-01 of its norm, more than the 1.00e-02 allowed")


def broken() -> float:
    raise RuntimeError("out of\n  resources")


def test_rows_hold_times_rates_and_origin(tmp_path):
    session = Session("toy", quick=True, results=tmp_path, json_file=tmp_path / "toy.json")
    rows = session.measure(subject("unit"))
    assert [row["phase"] for row in rows] == ["forward", "backward"]
    for row in rows:
        assert 0.5 <= row["p20_ms"] <= row["p50_ms"] <= row["p80_ms"]
        assert row["tflops"] == pytest.approx(4e6 / (row["p50_ms"] * 1e-3) / 1e12)
        assert row["gb_per_s"] == pytest.approx(2e6 / (row["p50_ms"] * 1e-3) / 1e9)
        assert row["repetitions"] >= 5
        assert (row["case"], row["status"], row["gate"], row["ratio"]) == ("toy", "ok", 0.25, 1.0)
        assert row.items() >= PARAMETERS.items()
        assert row["torch"] == torch.__version__
        assert all(row[name] for name in ("date", "gpu", "triton", "transformers", "fat5", "python", "commit"))
    saved = read_rows(tmp_path / "toy.csv")
    assert [(row["phase"], row["p50_ms"]) for row in saved] == [(row["phase"], f"{row['p50_ms']:.6g}") for row in rows]
    assert read_json(tmp_path / "toy.json") == rows


def test_ratio_is_to_the_yardstick_of_the_same_workload_and_phase():
    session = Session("toy", quick=True)
    without = session.measure(subject("early"))
    session.measure(subject("unit", milliseconds=1))
    slower = session.measure(subject("slow", milliseconds=3))
    other = Subject("slow", {"length": 9}, subject("slow").prepare, yardstick="unit")
    assert all(row["ratio"] is None for row in (*without, *session.measure(other)))
    assert all(row["ratio"] > 1.2 for row in slower)


@pytest.mark.parametrize(("check", "error"), [(wrong, "GateError: grad_q is off"), (broken, "out of resources")])
def test_failed_gate_is_recorded_never_timed_and_the_run_goes_on(tmp_path, capsys, check, error):
    runs: list[str] = []
    session = Session("toy", quick=True, results=tmp_path)
    (row,) = session.measure(subject("bad", check=check, runs=runs))
    assert runs == []
    assert row["status"] == "FAILED"
    assert error in row["error"]
    assert row.items() >= PARAMETERS.items()
    assert "p50_ms" not in row
    assert session.failures == 1
    assert len(session.measure(subject("good", runs=runs))) == 2
    assert set(runs) == {"good"}
    assert [row["status"] for row in read_rows(tmp_path / "toy.csv")] == ["FAILED", "ok", "ok"]
    assert error in capsys.readouterr().err


def test_unavailable_is_skipped_and_no_failure():
    runs: list[str] = []
    session = Session("toy", quick=True)
    (row,) = session.measure(subject("gpu only", runs=runs, unavailable="there is no CUDA GPU"))
    assert (row["status"], row["error"], session.failures, runs) == ("skipped", "there is no CUDA GPU", 0, [])


def test_rows_are_on_disk_before_the_next_subject_starts(tmp_path):
    session = Session("toy", quick=True, results=tmp_path)
    seen: list[int] = []

    def prepare() -> Prepared:
        seen.append(len(read_rows(tmp_path / "toy.csv")))
        return Prepared(lambda: 0.0)

    session.measure(subject("unit"))
    session.measure(Subject("second", PARAMETERS, prepare))
    assert seen == [2]


def test_time_of_a_short_function_is_taken_often_and_of_a_long_one_seldom():
    calls = {"short": 0, "long": 0}

    def count(name: str, seconds: float) -> None:
        calls[name] += 1
        time.sleep(seconds)

    budget = Budget(warm_up_ms=0, measured_ms=20)
    short = measure_time(lambda: count("short", 0.0), torch.device("cpu"), budget)
    long = measure_time(lambda: count("long", 0.01), torch.device("cpu"), budget)
    assert short.repetitions > 20 > 5 == long.repetitions
    assert long.p50_ms >= 10 > short.p50_ms
    assert calls["long"] <= 7


def test_commit_is_the_variable_s_or_the_checkout_s(tmp_path, monkeypatch):
    monkeypatch.setenv("FAT5_COMMIT", "abc123")
    assert environment.commit(tmp_path) == "abc123"
    monkeypatch.delenv("FAT5_COMMIT")
    assert environment.commit(tmp_path) == "unknown"

    def git(*arguments: str) -> str:
        settings = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        command = ["git", *settings, "-C", str(tmp_path), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    assert environment.commit(tmp_path) == "unknown"
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("1")
    git("add", ".")
    git("commit", "-qm", "first")
    head = git("rev-parse", "--short=12", "HEAD")
    assert environment.commit(tmp_path) == head
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "toy.csv").write_text("case\n")
    assert environment.commit(tmp_path) == head
    (tmp_path / "src" / "a.py").write_text("2")
    assert environment.commit(tmp_path) == f"{head}-dirty"
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    assert environment.commit(tmp_path) == "unknown"


def test_tables_claims_and_problems_read_well():
    assert (
        format_table(["name", "ms"], [["a", "1.5"], ["longer", "10.25"]])
        == "name       ms\na         1.5\nlonger  10.25"
    )
    assert str(Claim("speed", 3.5, 3.0)) == "met     speed: 3.5x (>= 3x)"
    assert str(Claim("time", 1.3, 1.25, at_most=True)) == "MISSED  time: 1.3x (<= 1.25x)"
    assert str(Claim("time", None, 1.0)) == "not measured  time"
    assert not Claim("nothing", float("nan"), 1.0, at_most=True).met
    skipped = {"status": "skipped", "implementation": "a", "error": "no GPU"}
    failed = {"status": "FAILED", "implementation": "b", "error": "wrong"}
    text = problems([skipped, failed, skipped, {"status": "ok"}], lambda row: "L8")
    assert text == "FAILED L8 b: wrong\nskipped a (2x): no GPU"
