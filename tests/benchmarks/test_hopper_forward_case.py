"""The case hopper_forward: its options, and on the emulator of the kernels, at toy size, a whole run."""

from __future__ import annotations

import pytest
import torch

from benchmarks.command_line import main
from benchmarks.hopper_forward import stage, sweep
from benchmarks.results import read_rows
from fat5.ops.attention.hopper import launch
from tests.ops.gluon_emulator import EmulatedKernel

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the case itself")
TOY = ["--quick", "--dtype", "fp16", "--lengths", "130", "--tokens", "130", "--heads", "1", "--head-dims", "64"]
TOY += ["--stages", "2", "--alternate", "no"]


@pytest.fixture
def emulated(monkeypatch):
    """Have the case measure on the emulator what it would on a card; return what it compiles."""
    compiled = []
    for module in (stage, sweep):
        monkeypatch.setattr(module, "unavailable", lambda: None)
    monkeypatch.setattr(sweep, "compile_all", lambda every: compiled.extend(every) or {})
    monkeypatch.setattr(launch, "forward_kernel", EmulatedKernel("forward_kernel"))
    monkeypatch.setattr(launch, "processors", lambda device: 1)
    return compiled


def run(tmp_path, *options):
    code = main(["hopper_forward", *options, "--results", str(tmp_path)])
    return code, read_rows(tmp_path / "hopper_forward.csv")


def test_every_shape_is_compared_and_timed(emulated, tmp_path, capsys):
    code, rows = run(tmp_path, *TOY, "--masks", "causal", "--chunks", "4", "1", "--layouts", "tokens", "heads")
    assert code == 0
    own = [row for row in rows if row["implementation"] != "cudnn"]
    assert {row["status"] for row in own} == {"ok"}
    assert all(0 < float(row["gate"]) <= 1 and float(row["p50_ms"]) > 0 for row in own)
    tokens = [row["implementation"] for row in own if row["layout"] == "tokens"]
    assert tokens[:4] == ["2 consumers, 2 stages, ahead", "2 consumers, 2 stages, not ahead",
                          "2 consumers, 2 stages, not ahead, halves", "3 consumers, 2 stages, not ahead"]  # fmt: skip
    assert tokens[4].endswith("chunks of 1")
    assert len(tokens) == 5
    assert any(row["layout"] == "heads" for row in own)
    today = {row["implementation"] for row in own if row["today"] == "True"}
    assert today == {"2 consumers, 3 stages, not ahead, halves, chunks of 2"}
    assert {(x.shape.consumers, x.shape.ahead) for x in emulated} == {(2, True), (2, False), (3, False)}
    assert {x.shape.halves for x in emulated} == {True, False}
    printed = capsys.readouterr().out
    assert "D64 L130 causal tokens" in printed.split("fastest")[1]


def test_half_tiles_of_keys_are_left_out_where_all_are_whole(emulated, tmp_path):
    code, rows = run(tmp_path, *TOY, "--lengths", "128", "--masks", "full", "--consumers", "2", "--ahead", "no")
    assert code == 0
    assert not any(x.shape.halves for x in emulated)
    assert {row["halves"] for row in rows if row["implementation"] != "cudnn"} == {"False"}


def test_a_wrong_output_fails(emulated, tmp_path, monkeypatch):
    right = launch.run_forward
    monkeypatch.setattr(launch, "run_forward", lambda *a: (right(*a)[0] * 0.9, None))
    code, rows = run(tmp_path, *TOY, "--masks", "full", "--consumers", "2", "--ahead", "yes")
    assert code == 1
    assert "of its norm from the portable kernel's" in next(row["error"] for row in rows if row["status"] == "FAILED")


def test_what_does_not_compile_is_not_timed(emulated, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "compile_all", lambda every: dict.fromkeys(every, "RuntimeError: ptxas died"))
    code, rows = run(tmp_path, *TOY, "--masks", "full", "--consumers", "2", "--ahead", "yes")
    assert code == 1
    assert [row["error"] for row in rows if row["status"] == "FAILED"] == ["GateError: RuntimeError: ptxas died"]


def test_without_a_card_the_rows_say_so(tmp_path, capsys):
    code, rows = run(tmp_path, "--quick")
    assert code == 0
    assert {row["status"] for row in rows} == {"skipped"}
    assert "there is no CUDA GPU" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--head-dims", "128", "--consumers", "3"], "no shape of those fits at head dimension 128; there are: 2 cons"),
        (["--consumers", "3", "--ahead", "yes"], "no shape of those fits at head dimension 64"),
        (["--lengths", "4096", "--tokens", "1024"], "a batch of 1024 tokens has no row of 4096; raise --tokens"),
        (["--lengths", "0"], "got --lengths 0, expected at least 1"),
        (["--chunks", "0"], "got --chunks 0, expected at least 1"),
        (["--heads", "0"], "got --heads 0, expected at least 1"),
        (["--consumers", "4"], "invalid choice: 4"),
    ],
)
def test_options_that_cannot_be_used_have_a_reason(options, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        run(tmp_path, *options)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
