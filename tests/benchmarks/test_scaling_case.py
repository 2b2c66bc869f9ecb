"""The case of several processes: shares of time, what is compared with what, and a toy run of two processes."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

import pytest

from benchmarks.command_line import main
from benchmarks.precision import runs as precision
from benchmarks.results import read_rows
from benchmarks.scaling import launch as launching
from benchmarks.scaling import report, stage
from benchmarks.scaling.communication import communication_shares
from benchmarks.scaling.launch import Outcome, RunError
from benchmarks.scaling.plan import SAME, TIMES, Run, Scale
from fat5.training.profiling import Kernel

ROOT = Path(__file__).resolve().parents[2]


def test_communication_counts_alone_where_nothing_else_runs():
    kernels = [
        Kernel("", "gemm_a", 0.0, 4.0),
        Kernel("", "ncclDevKernel_AllReduce", 2.0, 4.0),  # two hidden, two alone
        Kernel("", "ncclDevKernel_AllGather", 5.0, 2.0),  # one of them at the same time as the other
        Kernel("", "elementwise", 8.0, 2.0),
    ]
    assert communication_shares(kernels) == pytest.approx((0.3, 0.5))
    assert communication_shares(reversed(kernels)) == pytest.approx((0.3, 0.5))
    assert communication_shares(kernels[:1]) == (0.0, 0.0)
    assert communication_shares([]) is None


@pytest.fixture
def scale(tmp_path) -> Scale:
    return Scale("toy", 2, 8, tmp_path / "tokens", tmp_path / "work", compiled=False, saves=True)


def test_several_processes_share_one_batch_or_take_one_each(scale):
    one = Run("one", 1, TIMES).settings(scale)
    accumulating = Run("one, accumulating", 1, SAME, accumulation=2).settings(scale)
    same, times = (Run("fsdp2", 2, batch, strategy="fsdp2").settings(scale) for batch in (SAME, TIMES))
    assert one.denoising == times.denoising
    assert accumulating.denoising == same.denoising
    assert 2 * same.denoising.encoder_budget == times.denoising.encoder_budget == scale.budget
    for config in (accumulating, same, times):
        assert (config.model, config.optimizer, config.schedule) == (one.model, one.optimizer, one.schedule)
    assert [c.training.gradient_accumulation_steps for c in (one, accumulating, same, times)] == [1, 2, 1, 1]
    assert [c.training.data_parallel_shard_degree for c in (one, accumulating, same, times)] == [1, 1, -1, -1]
    assert len({c.training.output_dir for c in (one, accumulating, same, times)}) == 4
    resumed = Run("fsdp2", 1, SAME, accumulation=2, resume=Run("fsdp2", 2, SAME, strategy="fsdp2").checkpoint(scale))
    assert resumed.settings(scale).training.resume == f"{same.training.output_dir}/checkpoint-4"


@pytest.mark.parametrize("model", ["small", "base"])
def test_the_shipped_configurations_can_be_scaled(tmp_path, model):
    large = Scale(model, 8, 80, tmp_path / "tokens", tmp_path / "work", compiled=True, saves=False)
    config = Run("ddp", 8, SAME, strategy="ddp").settings(large, ["training.num_workers=1"])
    assert config.training.compile
    assert (config.denoising.encoder_budget, config.training.log_every, config.training.save_every) == (4096, 20, 80)
    assert config.training.num_workers == 1
    assert config.data.validation is None


def outcome(rate: float, losses: tuple[float, ...] = (6.0, 5.0, 4.5, 4.25, 4.0)) -> Outcome:
    entries = [{"step": step, "loss": loss} for step, loss in zip((1, 2, 4, 6, 8), losses, strict=True)]
    for entry, factor in zip(entries[1:], (9.0, 1.1, 1.0, 0.5), strict=True):  # the first window is not timed
        entry["tokens_per_second"] = rate * factor
    return Outcome([*entries, {"step": 8, "train_loss": 4.8}], 1.5, (0.02, 0.1))


def run_case(monkeypatch, tmp_path, outcomes, *arguments: str) -> tuple[int, list[dict]]:
    """Run the case with outcomes in the place of trainings, by order."""
    order = count()

    def launched(*args, **kwargs):
        got = outcomes[next(order)]
        if isinstance(got, Exception):
            raise got
        return got

    monkeypatch.setattr(stage, "launch", launched)
    monkeypatch.setattr(precision, "prepare_text", lambda folder: None)
    code = main(["scaling", "--strategies", "ddp", "--results", str(tmp_path), *arguments])
    return code, read_rows(tmp_path / "scaling.csv")


def test_rates_are_each_processs_over_those_of_one(monkeypatch, tmp_path):
    outcomes = [outcome(100.0), outcome(90.0), outcome(160.0), outcome(190.0), outcome(1.0), outcome(1.0)]
    code, rows = run_case(monkeypatch, tmp_path, outcomes)
    assert code == 0
    assert [float(row["share_of_one"]) for row in rows[:4]] == [1.0, 0.9, 0.8, 0.95]
    assert [row["tokens_per_s"] for row in rows[:4]] == ["100", "90", "160", "190"]
    assert rows[3]["share_communication_alone"] == "0.02"
    assert [row["processes"] for row in rows] == ["1", "1", "2", "2", "1", "2"]
    assert [row["loss_distance"] for row in rows] == ["", "", "0", "", "0", "0"]
    typed = [
        {**row, "processes": int(row["processes"]), "share_of_one": float(row["share_of_one"] or 0)} for row in rows
    ]
    (claim,) = report.claims([{**row, "gpu": "a GPU"} for row in typed])
    assert claim.met
    assert "toy x2, times the batch: ddp" in str(claim)


def test_other_losses_than_those_of_one_process_fail(monkeypatch, tmp_path, capsys):
    far = outcome(1.0, (6.0, 5.0, 4.5, 4.25, 4.01))
    late = outcome(1.0, (6.0, 5.0, 4.5, 4.25, 4.001))
    code, rows = run_case(monkeypatch, tmp_path, [outcome(1.0), outcome(1.0), far, outcome(1.0), late, outcome(1.0)])
    assert code == 1
    assert [row["status"] for row in rows] == ["ok", "ok", "FAILED", "ok", "FAILED", "FAILED"]
    assert "losses are up to 0.250% from those they should equal, 0.010% allowed" in rows[2]["error"]
    assert "FAILED" in capsys.readouterr().out


def test_first_losses_are_compared_more_strictly_and_no_number_fails(monkeypatch, tmp_path):
    order = [outcome(1.0), outcome(1.0), outcome(1.0, (6.0003, 5.0, 4.5, 4.25, 4.0)), outcome(1.0)]
    _, rows = run_case(monkeypatch, tmp_path / "early", order, "--no-resume")
    assert "losses are up to 0.005% from those they should equal, 0.001% allowed" in rows[2]["error"]
    order[2] = outcome(1.0, (6.0, float("nan"), 5.0, 4.5, 4.0))
    _, rows = run_case(monkeypatch, tmp_path / "nan", order, "--no-resume")
    assert [row["status"] for row in rows] == ["ok", "ok", "FAILED", "ok"]


def test_a_run_that_fails_says_what_it_said_and_the_others_go_on(monkeypatch, tmp_path):
    broken = [outcome(1.0), RunError("the run in x ended with code 1: ...out of memory"), *[outcome(1.0)] * 4]
    code, rows = run_case(monkeypatch, tmp_path, broken)
    assert code == 1
    assert "out of memory" in rows[1]["error"]
    assert "'one, accumulating' to compare with has failed" in rows[2]["error"]
    assert rows[3]["status"] == "ok"


def test_a_model_that_learns_nothing_fails(monkeypatch, tmp_path):
    flat = outcome(1.0, (6.0,) * 5)
    _, rows = run_case(monkeypatch, tmp_path, [flat] * 4, "--no-resume")
    assert all("nothing was learned" in row["error"] for row in rows)


def test_a_worker_that_fails_or_takes_too_long_is_an_error(scale, tmp_path, monkeypatch):
    config = Run("one", 1, TIMES).settings(scale)
    monkeypatch.setattr(launching, "_WORKER", "benchmarks.no_such_module")
    with pytest.raises(RunError, match=r"first ended with code 1: .*no_such_module"):
        launching.launch(config, tmp_path / "first", processes=1, torchrun=False, seconds=60)
    with (tmp_path / "said").open("wb") as output:
        assert launching._wait([sys.executable, "-c", "import time; time.sleep(60)"], output, 0.2) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "0"], "--processes is 0, expected 1"),
        (["--steps", "6"], "--steps is 6, expected a multiple of 4"),
        (["--train", "benchmarks/reslts"], "there is no folder benchmarks/reslts; did you mean 'benchmarks/results'?"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit):
        main(["scaling", "--no-save", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "processes", "more"), [("fsdp2", "2", []), ("ddp", "1", ["--no-resume"])])
def test_toy_runs_of_processes_equal_one(tmp_path, capsys, strategy, processes, more):
    options = ["--strategies", strategy, "--processes", processes, "--steps", "4", "--results", str(tmp_path)]
    code = main(["scaling", "--models", "toy", *options, *more])
    rows = read_rows(tmp_path / "scaling.csv")
    assert code == 0, rows
    resumed = [row for row in rows if row["table"] == "resumed"]
    assert [row["processes"] for row in resumed] == ([] if more else ["1", "2"])
    compared = [row for row in rows if row["loss_distance"]]
    assert len(compared) == len(resumed) + 1
    assert all(float(row["loss_distance"]) <= 1e-4 for row in compared)
    assert all(float(row["tokens_per_s"]) > 0 for row in rows if row["table"] == "runs")
    assert f"toy x{processes}, same batch: {strategy}" in capsys.readouterr().out
