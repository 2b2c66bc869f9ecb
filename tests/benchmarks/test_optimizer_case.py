"""The optimizer case on a few small tensors: its gate, its bytes, its rows."""

from __future__ import annotations

import pytest
import torch

from benchmarks.command_line import main
from benchmarks.optimizer import gate, workload
from benchmarks.optimizer.implementations import IMPLEMENTATIONS, Implementation
from benchmarks.optimizer.workload import Workload
from benchmarks.results import read_rows
from benchmarks.subject import GateError
from fat5.optim import AdamWScale, fused_update
from fat5.optim.fused_update import Launch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_tensors(monkeypatch):
    monkeypatch.setattr("benchmarks.timing._MIN_REPETITIONS", 2)
    monkeypatch.setattr(fused_update, "LAUNCH", Launch(128, 1, 4))
    monkeypatch.setattr(workload, "LISTS", {"french-small": lambda: ([(12, 10), (5, 4)], [(33,), (8, 2)])})


def test_the_lists_have_the_sizes_of_the_claims(monkeypatch):
    monkeypatch.undo()
    assert Workload("french-small", "bf16").numel == pytest.approx(146.8e6, rel=1e-3)
    assert Workload("130M", "bf16").numel == pytest.approx(130e6, rel=1e-3)
    decayed, kept = Workload("french-small", "bf16").shapes
    assert all(len(shape) == 2 for shape in decayed)
    assert {len(shape) for shape in kept} == {1, 2}  # norms, and tables of position biases


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_gate_passes_each_implementation(name, dtype):
    if IMPLEMENTATIONS[name].on_gpu and dtype == "bf16":
        pytest.skip("Triton's interpreter truncates bf16")
    assert 0 < gate.check(Workload("french-small", dtype), IMPLEMENTATIONS[name], CPU) <= 1


class Idle(AdamWScale):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["step"] = torch.zeros(())


class Unclipped(AdamWScale):
    def clip_grad_norm(self, max_norm):
        return super().clip_grad_norm(max_norm) * 1.1


class WithoutScale(AdamWScale):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(torch.linspace(0.5, 2.0, parameter.numel()).view(parameter.shape))
        super().step()


@pytest.mark.parametrize(
    ("wrong", "message"), [(Idle, "off by"), (Unclipped, "norm of the gradients is"), (WithoutScale, "off by")]
)
def test_gate_finds_what_is_wrong(wrong, message):
    implementation = Implementation(lambda groups: wrong(groups, lr=0.005), compensated=True)
    with pytest.raises(GateError, match=message):
        gate.check(Workload("french-small", "fp32"), implementation, CPU)


def test_bytes_are_those_of_the_tensors_each_step_touches():
    fused, adamw = IMPLEMENTATIONS["fat5-fused"], IMPLEMENTATIONS["adamw-fused"]
    # parameter, first moment, compensation: 2 + 2 each; second moment 4 + 4; gradient 2; parameter again for its RMS
    assert fused.bytes_of(10, 2, clip=False) == 10 * (3 * 4 + 8 + 2 + 2)
    assert fused.bytes_of(10, 2, clip=True) == 10 * (3 * 4 + 8 + 2 + 2 + 2)
    assert fused.bytes_of(10, 4, clip=False) == 10 * (3 * 8 + 4 + 4)  # no compensation
    assert adamw.bytes_of(10, 2, clip=False) == 10 * (3 * 4 + 2)
    assert adamw.bytes_of(10, 2, clip=True) == 10 * (3 * 4 + 2 + 2 + 4)


def test_rows_table_and_claims(tmp_path, capsys):
    command = ["optimizer", "--quick", "--tensors", "french-small", "--dtype", "fp32", "--results", str(tmp_path)]
    assert main(command) == 0
    rows = [row for row in read_rows(tmp_path / "optimizer.csv") if row["table"] == "step"]
    names = {"fat5-fused", "fat5-foreach", "adamw-fused", "adamw-foreach"}
    assert {row["implementation"] for row in rows} == names
    assert {row["phase"] for row in rows} == {"step", "clip + step", "clip + step, wall"}
    assert all(float(row["gb_per_s"]) > 0 for row in rows if row["phase"] != "clip + step, wall")
    assert all(float(row["ratio"]) > 0 for row in rows)
    shown = capsys.readouterr().out
    for text in ("french-small, fp32 clip + step", "fat5-foreach", "wall"):
        assert text in shown


def test_a_sweep_measures_every_size(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.optimizer.stage.SWEEP", [Launch(64, 2, 4)])
    launch = fused_update.LAUNCH
    command = ["optimizer", "--sweep", "--tensors", "french-small", "--dtype", "fp32", "--results", str(tmp_path)]
    assert main([*command, "--quick"]) == 0
    names = {row["implementation"] for row in read_rows(tmp_path / "optimizer.csv") if row["table"] == "step"}
    assert names == {"fat5-fused 64x2, 4 warps"}
    assert fused_update.LAUNCH is launch


def test_an_unknown_implementation_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["optimizer", "--implementations", "adam-fused", "--no-save"])
    assert "did you mean 'adamw-fused'" in capsys.readouterr().err
