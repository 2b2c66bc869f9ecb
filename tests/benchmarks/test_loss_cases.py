"""The cases of the losses at toy sizes: the gate finds what is wrong, and passes what is right."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.cases import cross_entropy, linear_cross_entropy
from benchmarks.command_line import main
from benchmarks.figures import loss as figures
from benchmarks.loss.gate import Gate, answer, formula
from benchmarks.loss.implementations import Implementation, catalogue, choose, forced, tiles_of
from benchmarks.loss.stage import Stage
from benchmarks.loss.workload import IGNORE_INDEX, Inputs, Workload
from benchmarks.registry import UsageError
from benchmarks.results import read_rows
from benchmarks.subject import GateError
from fat5.ops.attention.backends import BACKENDS as REASONS
from fat5.ops.loss.tiles import Tile

CPU = torch.device("cpu")
LOGITS = Workload(48, 80, dtype="fp32", ignored=0.25)
HIDDEN = Workload(48, 80, 16, "fp32", ignored=0.25)
both = pytest.mark.parametrize("workload", [LOGITS, HIDDEN], ids=["logits", "hidden"])


@both
@pytest.mark.parametrize("block", [2**26, 80 * 5])
def test_reference_in_blocks_equals_autograd(workload, block, monkeypatch):
    monkeypatch.setattr("benchmarks.loss.gate._BLOCK_ELEMENTS", block)
    inputs = Inputs.draw(workload, CPU)
    assert 0 < (inputs.labels == IGNORE_INDEX).sum() < 24
    leaves = [x.double().requires_grad_() for x in inputs.leaves]
    logits = leaves[0] @ leaves[1].T if workload.width else leaves[0]
    expected = formula(logits, inputs.labels, workload.z_loss)
    grads = torch.autograd.grad(expected, leaves)
    got = answer(workload, inputs, torch.float64, torch.arange(48))
    torch.testing.assert_close(got.loss, expected.detach())
    torch.testing.assert_close(got.by_rows, grads[0])
    if workload.width:
        torch.testing.assert_close(got.by_weight, grads[1])


@both
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_runs_on_a_cpu_passes_the_gate(workload, dtype):
    stage = Stage(dataclasses.replace(workload, dtype=dtype), CPU)
    for implementation in choose(["eager", "fat5-torch"], workload):
        share = stage._prepare(implementation).check()
        assert 0 <= share <= 1, implementation.name


@both
def test_kernels_pass_the_gate_in_the_interpreter(workload):
    if REASONS["triton"]() is not None:
        pytest.skip("Triton's interpreter is off")
    stage = Stage(dataclasses.replace(workload, rows=20), CPU)
    names = [name for name in catalogue(workload) if name.startswith("fat5-triton")]
    assert len(names) == (1 if workload.width else 2)
    for implementation in choose(names, workload):
        assert 0 < stage._prepare(implementation).check() <= 1, implementation.name
    assert 0 < stage._prepare(forced("blocks", Tile(32, 1))).check() <= 1


def test_every_tile_is_an_implementation_of_its_own():
    paired = [x.name for x in tiles_of(Workload(8, 32_768))]
    assert paired[0] == "pairs 32768 16w 1s 64r"
    assert len(set(paired)) == len(paired) > 10
    assert {x.name.split()[0] for x in tiles_of(Workload(8, 32_768))} == {"pairs", "blocks"}
    assert {x.name.split()[0] for x in tiles_of(Workload(8, 50_257))} == {"blocks"}


def changed(workload: Workload, place: int | None, factor: float) -> Implementation:
    """Plain PyTorch with one gradient multiplied, or the loss where `place` is None."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, value):
            ctx.value = value
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.value, None

    def make(workload: Workload):
        loss = catalogue(workload)["eager"].make(workload)

        def run(leaves, labels):
            leaves = tuple(Wrong.apply(x, factor if side == place else 1.0) for side, x in enumerate(leaves))
            result = loss(leaves, labels)
            return result if place is not None else result + (factor - 1) * result.detach()

        return run

    return Implementation("wrong", make)


@both
@pytest.mark.parametrize("factor", [0.0, 1.01, -1.0, torch.nan])
@pytest.mark.parametrize(("place", "named"), [(None, "loss is off"), (0, "by_rows"), (1, "by_weight")])
def test_gate_finds_what_is_wrong(workload, factor, place, named):
    place = place if workload.width or place is None else 0  # given logits have no weight
    named = named if place is None or workload.width else "by_rows"
    stage = Stage(workload, CPU)
    assert stage._prepare(changed(workload, place, 1.0)).check() <= 1
    with pytest.raises(GateError, match=named):
        stage._prepare(changed(workload, place, factor)).check()


def test_no_limit_lets_zeros_pass():
    """Pitfall: a tolerance relative to an error that is itself near 1."""
    inputs = Inputs.draw(HIDDEN, CPU)
    gate = Gate(HIDDEN, inputs)
    exact, plain = gate._answers
    useless = plain._replace(by_weight=torch.zeros_like(plain.by_weight))
    gate._answers = (exact, useless)
    with pytest.raises(GateError, match=r"more than the 1\.00e-01 allowed"):
        gate.check(exact.loss, (exact.by_rows, torch.zeros_like(exact.by_weight)))


def test_bytes_and_operations():
    assert Workload(16_384, 32_768).moved_bytes == 2 * 2**30
    assert Workload(16_384, 32_768, ignored=0.5).moved_bytes == 1.5 * 2**30
    assert Workload(16_384, 32_768, 512).flops == 6 * 2**14 * 2**15 * 2**9


def test_unknown_implementation_is_named():
    with pytest.raises(UsageError, match=r"no implementation 'ligr'.*did you mean 'liger'"):
        choose(["ligr"], LOGITS)


def test_run_of_both_cases_and_their_figures(tmp_path, capsys):
    sizes = ["--rows", "32", "--vocab", "64", "--quick", "--results", str(tmp_path)]
    assert main(["cross_entropy", *sizes, "--dtype", "fp32", "bf16"]) == 0
    assert main(["linear_cross_entropy", *sizes, "--width", "8", "--ignored", "0.5"]) == 0
    for name, kinds in (("cross_entropy", 2), ("linear_cross_entropy", 1)):
        rows = read_rows(tmp_path / f"{name}.csv")
        fine = [row for row in rows if row["status"] == "ok" and row["implementation"] == "fat5-torch"]
        assert len(fine) == kinds
        assert {row["phase"] for row in fine} == {"forward+backward"}
    printed = capsys.readouterr().out
    for text in ("bf16 32 x 64", "fp32 32 x 64", "bf16 32 x 8 to 64 50% ignored", "share", "x products"):
        assert text in printed
    assert figures.draw_logits(read_rows(tmp_path / "cross_entropy.csv")) is not None
    drawn = figures.draw_hidden(read_rows(tmp_path / "linear_cross_entropy.csv"))
    assert drawn.axes[0].get_yticklabels()[0].get_text() == "the three matrix products alone"
    assert figures.draw_hidden([]) is None


def test_claims_compare_with_the_figures_to_reach():
    base = {**Workload(16_384, 32_768, 512).columns, "status": "ok", "implementation": "fat5-triton"}
    peak = (390 + linear_cross_entropy.returned_mb(base)) * 1e6 / 2**20
    verdicts = [str(c) for c in linear_cross_entropy.claims([{**base, "p50_ms": 3.2, "peak_mib": peak}])]
    assert verdicts[0].startswith("MISSED")
    assert verdicts[1].startswith("met")
    assert "390 MB" in verdicts[1]
    assert linear_cross_entropy.claims([{**base, "rows": 8, "p50_ms": 3.2, "peak_mib": peak}]) == []


def test_tiles_and_chunks_by_option(tmp_path, monkeypatch):
    """Where there is no GPU they are skipped, with the reason, and make no failure."""
    sizes = ["--rows", "32", "--vocab", "64", "--quick", "--results", str(tmp_path)]
    assert main(["cross_entropy", *sizes, "--tiles"]) == 0
    assert main(["linear_cross_entropy", *sizes, "--width", "8", "--chunk-mib", "1", "2"]) == 0
    names = {row["implementation"] for row in read_rows(tmp_path / "linear_cross_entropy.csv")}
    assert names == {"products", "fat5-triton-1MiB", "fat5-triton-2MiB"}
    assert {row["table"] for row in read_rows(tmp_path / "cross_entropy.csv")} == {"copy", "tiles"}


def test_a_workload_in_a_few_words():
    assert cross_entropy.place(LOGITS.columns) == "fp32 48 x 80 25% ignored"
    assert linear_cross_entropy.place(HIDDEN.columns) == "fp32 48 x 16 to 80 25% ignored"
