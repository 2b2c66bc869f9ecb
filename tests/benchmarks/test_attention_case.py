"""The attention case at toy sizes: the gate finds what is wrong, and passes what is right."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.attention import peers, report
from benchmarks.attention.catalogue import catalogue, choose
from benchmarks.attention.gate import Gate, poisoned_memory
from benchmarks.attention.implementation import Implementation, Run
from benchmarks.attention.reference import attention_answer
from benchmarks.attention.stage import Stage
from benchmarks.attention.workload import Inputs, Workload, half_padding, uniform_documents
from benchmarks.command_line import main
from benchmarks.results import read_rows
from benchmarks.subject import GateError
from fat5.ops import DenseBias, RelativeBias
from fat5.ops.attention.reference import attention_reference

CPU = torch.device("cpu")
PLAIN = Workload(2, 3, 48, 16, causal=False, dtype="fp32")
WORKLOADS = {
    "full": PLAIN,
    "causal": dataclasses.replace(PLAIN, causal=True),
    "bf16": dataclasses.replace(PLAIN, dtype="bf16"),
    "one dense bias": dataclasses.replace(PLAIN, dense_bias=1),
    "a dense bias a row": dataclasses.replace(PLAIN, dense_bias=2, causal=True),
    "half padding": dataclasses.replace(PLAIN, documents=half_padding(2, 48)),
}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def gpu_kernels_on_the_cpu(monkeypatch):
    """Let PyTorch's plain kernel stand in for those that need a GPU, so that what they are given can be checked."""
    monkeypatch.setattr(peers, "sdpa_kernel", lambda kernel: sdpa_kernel(SDPBackend.MATH))
    monkeypatch.setattr(peers.torch, "compile", lambda function, **options: function)


@pytest.mark.parametrize("name", ["full", "causal", "one dense bias", "a dense bias a row", "half padding"])
@pytest.mark.parametrize("elements", [2**25, 16 * 48])
def test_blockwise_reference_equals_autograd(name, elements, monkeypatch):
    monkeypatch.setattr("benchmarks.attention.reference._BLOCK_ELEMENTS", elements)
    workload = WORKLOADS[name]
    inputs = Inputs.draw(workload, CPU)
    answer = attention_answer(workload, inputs, (0, 1, 2), torch.float64, with_bias=True)
    leaf = (inputs.table if inputs.dense is None else inputs.dense).double().requires_grad_()
    q, k, v = (x.double().transpose(1, 2).requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    bias = RelativeBias(leaf, bidirectional=not workload.causal) if inputs.dense is None else DenseBias(leaf)
    lengths = torch.tensor(workload.real_lengths)
    out = attention_reference(q, k, v, bias=bias, causal=workload.causal, key_lengths=lengths)
    grads = torch.autograd.grad(out, [q, k, v, leaf], inputs.grad_out.double().transpose(1, 2))
    real = torch.arange(48) < lengths[:, None]
    torch.testing.assert_close(answer.out, out.detach().transpose(1, 2) * real[:, None, :, None])
    for got, expected in zip((answer.grad_q, answer.grad_k, answer.grad_v), grads, strict=False):
        torch.testing.assert_close(got, expected.transpose(1, 2))
    torch.testing.assert_close(answer.grad_bias, grads[3])


@pytest.mark.usefixtures("gpu_kernels_on_the_cpu")
@pytest.mark.parametrize("name", WORKLOADS)
def test_every_implementation_that_runs_on_a_cpu_passes_the_gate(name):
    workload = WORKLOADS[name]
    names = ["cudnn-bias", "sdpa-bias", "eager-bias", "fat5-torch"]
    if workload.dense_bias == 0 and workload.documents is None:
        names += ["cudnn", "fa2", "fat5-torch-shared"]
    stage = Stage(workload, CPU)
    for implementation in choose(names, CPU):
        share = stage._prepare(implementation, timed=True).check()
        assert 0 < share <= 1, implementation.name


def test_triton_backend_passes_the_gate_in_the_interpreter():
    workload = Workload(1, 2, 40, 16, causal=True, dtype="fp16")
    (triton,) = choose(["fat5-triton"], CPU)
    if triton.unavailable(workload, CPU) is not None:
        pytest.skip("Triton's interpreter is off")
    assert 0 < Stage(workload, CPU)._prepare(triton, timed=False).check() <= 1


@pytest.mark.usefixtures("gpu_kernels_on_the_cpu")
@pytest.mark.parametrize("causal", [False, True])
def test_flex_attention_gets_the_right_bias(causal):
    """Its backward does not run on a CPU; the output shows bias, mask and scale."""
    workload = Workload(2, 3, 128, 16, causal=causal, dtype="fp32")
    inputs = Inputs.draw(workload, CPU)
    (flex,) = choose(["flex"], CPU)
    run = flex.prepare(workload, inputs)
    for leaf in run.leaves:
        leaf.requires_grad_(False)
    expected = attention_answer(workload, inputs, (0, 1, 2), torch.float64, with_bias=True).out
    torch.testing.assert_close(run.forward().double(), expected, rtol=1e-5, atol=1e-5)


def changed(change) -> Implementation:
    """The eager implementation with something wrong in what it returns."""
    eager = catalogue()["eager-bias"]
    return dataclasses.replace(
        eager, prepare=lambda workload, inputs: change(eager.prepare(workload, inputs), workload)
    )


def wrong_output(factor: float):
    def change(run: Run, workload: Workload) -> Run:
        return dataclasses.replace(run, forward=lambda: run.forward() * factor)

    return change


def unwritten_row(run: Run, workload: Workload) -> Run:
    def forward() -> Tensor:
        row = torch.zeros(workload.length, 1)
        row[-1] = torch.nan
        return run.forward() + row

    return dataclasses.replace(run, forward=forward)


def wrong_gradient(place: int, factor: float):
    def change(run: Run, workload: Workload) -> Run:
        run.leaves[place].register_hook(lambda grad: grad * factor)
        return run

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (wrong_output(1.001), "out is off"),
        (wrong_output(0.0), "out is off"),
        (unwritten_row, "out is off by nan"),
        (wrong_gradient(0, 1.001), "grad_q is off"),
        (wrong_gradient(1, 0.0), "grad_k is off"),
        (wrong_gradient(2, -1.0), "grad_v is off"),
        (wrong_gradient(3, 1.001), "grad_bias is off"),
        (wrong_gradient(3, torch.nan), "grad_bias is off by nan"),
    ],
)
@pytest.mark.parametrize("name", ["full", "one dense bias"])
def test_gate_finds_what_is_wrong(name, change, named):
    stage = Stage(WORKLOADS[name], CPU)
    with pytest.raises(GateError, match=named):
        stage._prepare(changed(change), timed=True).check()


def test_no_limit_lets_zeros_pass():
    """Pitfall: a tolerance relative to an error that is itself near 1."""
    workload = dataclasses.replace(PLAIN, dtype="bf16")
    inputs = Inputs.draw(workload, CPU)
    gate = Gate(workload, inputs)
    exact, plain = gate._answers(True)
    useless = dataclasses.replace(plain, grad_bias=torch.zeros_like(exact.grad_bias))
    gate._answers = lambda with_bias: (exact, useless)
    zeros = dataclasses.replace(exact, grad_bias=torch.zeros_like(exact.grad_bias))
    with pytest.raises(GateError, match=r"more than the 1\.00e-01 allowed"):
        gate.check(zeros, with_bias=True)


def test_poisoned_memory_shows_what_nobody_wrote():
    with poisoned_memory(CPU, python_too=True):
        like = torch.ones(3)
        for unwritten in (torch.empty(3), torch.empty_like(like), like.new_empty(3)):
            assert unwritten.isnan().all()
        assert torch.empty(3, dtype=torch.int32).dtype == torch.int32


def test_half_of_a_padded_batch_is_padding():
    lengths = half_padding(16, 1024)
    assert sum(lengths) == 16 * 1024 // 2
    assert len(set(lengths)) > 8
    assert min(lengths) >= 64
    assert lengths == half_padding(16, 1024)


def test_documents_fill_the_batch_evenly():
    lengths = uniform_documents(16_384, 100, 1024)
    assert 16_384 - 1024 < sum(lengths) <= 16_384
    assert 100 <= min(lengths) < 250
    assert 900 < max(lengths) <= 1024
    assert lengths == uniform_documents(16_384, 100, 1024)


def test_run_of_the_whole_case(tmp_path, capsys):
    sizes = ["--lengths", "32", "--tokens", "64", "--heads", "2", "--head-dims", "16", "--dtype", "fp32"]
    names = ["--implementations", "eager-bias", "fat5-torch", "cudnn"]
    assert main(["attention", *sizes, *names, "--quick", "--results", str(tmp_path)]) == 0
    tables = ["--shapes", "sweep", "memory", "dense", "packed", "documents"]
    assert main(["attention", *sizes, *names, *tables, "--quick", "--masks", "full", "--results", str(tmp_path)]) == 0
    rows = read_rows(tmp_path / "attention.csv")
    fine = [row for row in rows if row["status"] == "ok" and row["table"] != "memory"]
    assert {row["table"] for row in fine} == {"must-reach", "sweep", "dense", "packed", "documents"}
    assert {row["phase"] for row in fine} == {"forward", "backward"}
    assert {row["implementation"] for row in fine} == {"eager-bias", "fat5-torch", "fat5-torch-packed"}
    assert {row["bit_equal"] for row in fine if row["implementation"].startswith("fat5")} == {"True"}
    assert {row["bias"] for row in fine if row["table"] == "dense"} == {"dense [1, H, L, L]", "dense [2, H, L, L]"}
    assert {row["error"] for row in rows if row["implementation"] == "cudnn"} == {"there is no CUDA GPU"}
    printed = capsys.readouterr().out
    for text in (
        "attention, must-reach",
        "fp32 B2 H2 L32 D16 full",
        "TFLOP/s fwd/bwd, D16 full fp32",
        "bit-equal: fat5-torch",
    ):
        assert text in printed


def row(implementation: str, phase: str | None = None, **columns) -> dict:
    base = {"dtype": "bf16", "batch": 16, "heads": 12, "length": 1024, "head_dim": 64, "mask": "full", "bias": "table"}
    measured = {"status": "ok", "gate": 0.5, "tflops": 100.0, "ratio": None, "peak_mib": None}
    phases = {} if phase is None else {"phase": phase}
    return {**base, **measured, **phases, "implementation": implementation, **columns}


def test_claims_compare_with_the_figures_to_reach():
    both = ("forward", "backward")
    rows = [row("sdpa-bias", phase, table="must-reach", p50_ms=4.0, ratio=5.0) for phase in both]
    rows += [row("fat5-triton", phase, table="must-reach", p50_ms=1.0, ratio=1.3) for phase in both]
    rows += [
        row(name, table="memory", length=8192, peak_mib=peak) for name, peak in (("cudnn", 10), ("fat5-triton", 12))
    ]
    rows += [row("fat5-triton", table="memory", length=16384, peak_mib=24)]
    for name, milliseconds in (("sdpa-bias", 3.0), ("fat5-triton-packed", 1.0), ("fat5-triton", 2.0)):
        rows += [row(name, phase, table="packed", p50_ms=milliseconds) for phase in both]
    for name, milliseconds in (("sdpa-bias", 3.0), ("fat5-triton", 1.4)):
        rows += [row(name, phase, table="dense", bias="dense [1, H, L, L]", p50_ms=milliseconds) for phase in both]
    rows += [row("fat5-hopper-deterministic", phase, table="must-reach", p50_ms=1.0, ratio=1.4) for phase in both]
    for name, batch, rate in (("fat5-hopper", 10, 100.0), ("fat5-hopper-packed", 29, 85.0)):
        rows += [row(name, phase, table="documents", batch=batch, tflops=rate) for phase in both]
    verdicts = [str(claim).split("  ", 1)[0].strip() + " " + f"{claim.measured:.3g}" for claim in report.claims(rows)]
    assert verdicts == [
        "MISSED 1.3", "met 1.3",  # the ratio to cuDNN, forward and backward
        "met 4", "met 4",  # the speed-up over the materialised bias
        "MISSED 1.4",  # the deterministic backward
        "MISSED 2.14", "met 2.14",  # dense
        "met 3",  # packed
        "met 0.85", "met 0.85",  # documents, forward and backward
        "MISSED 1.2", "met 1",  # memory beside cuDNN's, and its growth
    ]  # fmt: skip


def test_failed_implementations_stand_in_the_tables():
    failed = row("fat5-triton", status="FAILED", error="wrong", table="sweep")
    assert "fat5-triton" in report.show_times([failed], compare_with="cudnn")
    for text in (
        report.show_times([failed], compare_with="cudnn"),
        report.show_sweep([failed]),
        report.show_memory([failed]),
    ):
        assert "FAILED" in text
