"""The cases rms_norm, rotary and geglu at toy sizes: the gate finds what is wrong, and passes what is right."""

from __future__ import annotations

import itertools

import pytest
import torch

from benchmarks.command_line import main
from benchmarks.elementwise import geglu, rms_norm, rotary
from benchmarks.operators import Implementation, Operator
from benchmarks.results import read_rows
from benchmarks.subject import GateError
from tests.ops.kernel_checks import CUDA, needs_gpu

CPU = torch.device("cpu")
CASES = {
    "rms_norm": lambda dtype: rms_norm.operators(48, [40], [dtype], CPU),
    "rotary": lambda dtype: rotary.operators(24, [16], [dtype], CPU),
    "geglu": lambda dtype: geglu.operators(24, [40], [dtype], CPU),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_every_implementation_passes_the_gate(case, dtype, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    passed = 0
    for operator, implementations in CASES[case](dtype):
        for implementation in implementations:
            if implementation.unavailable is not None or (implementation.own and dtype == "bf16"):
                continue  # the interpreter truncates bf16 where a GPU rounds
            assert 0 <= operator._prepare(implementation, None).check() <= 1, implementation.name
            passed += 1
    assert passed >= 4


@torch._functorch.config.patch("donated_buffer", True)  # which timing changes, and this puts back
def test_compiled_peers_can_be_timed(monkeypatch, tmp_path):
    """Pitfall: the backward of a compiled function runs once for each forward, unless it is told otherwise."""
    compile_for_real = torch.compile
    options = {"backend": "aot_eager"}
    monkeypatch.setattr(torch, "compile", lambda function, **given: compile_for_real(function, **given | options))
    sizes = ["--widths", "40", "--rows", "16", "--implementations", "compile", "--results", str(tmp_path)]
    assert main(["rms_norm", "--quick", *sizes]) == 0
    rows = [row for row in read_rows(tmp_path / "rms_norm.csv") if row["implementation"] == "compile"]
    assert [row["phase"] for row in rows] == ["forward", "backward"] * 2


def wrong(function, change):
    def changed(*inputs):
        outputs = function(*inputs)
        return tuple(map(change, outputs)) if isinstance(outputs, tuple) else change(outputs)

    return changed


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda y: y * 1.001, "is off by 1.00e-03"),
        (lambda y: y * 0, "more than"),
        (lambda y: y + torch.nan, "off by nan"),
        (lambda y: y.detach() + 1.01 * (y - y.detach()), "grad_"),
        (lambda y: y[..., :-1], "has shape|shapes? mismatch|Mismatch|must match"),
    ],
)
def test_gate_finds_what_is_wrong(case, change, named):
    for operator, (first, *_) in CASES[case]("fp32"):
        broken = Implementation("broken", wrong(first.function, change))
        with pytest.raises((GateError, RuntimeError), match=named):
            operator._prepare(broken, None).check()


def test_inputs_that_a_peer_overwrites_are_its_own():
    x = torch.randn(4, 12)[:, ::2]
    before = x.clone()
    operator = Operator({}, lambda x: x * 2, {"x": x}, {"y": torch.ones(4, 6)}, forward_bytes=1, backward_bytes=1)
    seen = []

    def greedy(x):
        seen.append(x.stride())
        y = x * 2
        x.detach().zero_()
        return y

    prepared = operator._prepare(Implementation("greedy", greedy), None)
    assert prepared.check() == 0
    assert torch.equal(x, before)
    assert seen == [(12, 2)]


def test_runs_of_the_whole_cases(tmp_path, capsys):
    sizes = {"rms_norm": ["--widths", "40"], "rotary": ["--head-dims", "16"], "geglu": ["--widths", "40"]}
    for case, size in sizes.items():
        name = "torch" if case == "rms_norm" else "eager"
        options = ["--rows", "16", "--dtype", "fp32", "--implementations", name, "liger", "--results", str(tmp_path)]
        assert main([case, "--quick", *size, *options]) == 0
        rows = read_rows(tmp_path / f"{case}.csv")
        fine = [row for row in rows if row["status"] == "ok" and row["implementation"] == name]
        assert {row["phase"] for row in fine} == {"forward", "backward"}
        assert all(float(row["copy_gb_per_s"]) > float(row["gb_per_s"]) > 0 for row in fine)
        if not CUDA:
            assert {row["status"] for row in rows if row["implementation"] == "liger"} == {"skipped"}
    printed = capsys.readouterr().out
    for text in ("rms_norm 16x40 fp32 forward", "16 tokens H8 D16 halves fp32 backward", "16x40 tanh halves fp32"):
        assert text in printed


def test_unknown_implementations_are_named(capsys):
    for case in CASES:
        with pytest.raises(SystemExit):
            main([case, "--no-save", "--implementations", "fat5-tritn"])
        assert "did you mean 'fat5-triton'" in capsys.readouterr().err


@pytest.mark.gpu
@needs_gpu
def test_peers_pass_the_gate_and_the_figures_are_plausible(tmp_path):
    assert main(["rms_norm", "rotary", "geglu", "--quick", "--results", str(tmp_path)]) == 0
    for case, phase in itertools.product(CASES, ("forward", "backward")):
        rows = [row for row in read_rows(tmp_path / f"{case}.csv") if row.get("phase") == phase]
        own = [row for row in rows if row["implementation"] == "fat5-triton"]
        assert own
        assert {row["bit_equal"] for row in own} == {"True"}
        assert all(0.1 < float(row["gb_per_s"]) / float(row["copy_gb_per_s"]) < 1.5 for row in own)
