"""The pretrain case on a tiny model: operations, gate, rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.command_line import main
from benchmarks.pretraining import report, stage, steps
from benchmarks.pretraining.models import Gate, make_fat5, make_t5
from benchmarks.pretraining.workload import WORKLOADS
from benchmarks.results import read_rows
from benchmarks.subject import GateError
from fat5.training.profiling import Profile

CPU = torch.device("cpu")


def test_operations_of_the_step_are_those_of_its_matrices():
    """Counted by PyTorch on the model without attention's fused kernels: Transformers' T5."""
    from torch.utils.flop_counter import FlopCounterMode

    workload = WORKLOADS["smoke"]
    model = make_t5(workload)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(**workload.draw(CPU)).loss.backward()
    # The formula takes half of a causal attention, and 2.5 times the forward for a backward that recomputes: 2 here.
    inner = workload.heads * workload.head_dim
    full = workload.encoder**2 + workload.decoder**2 + workload.encoder * workload.decoder
    half = full - workload.decoder**2 / 2
    expected = counter.get_total_flops() - workload.batch * workload.layers * 4 * inner * (3 * full - 3.5 * half)
    assert workload.flops == pytest.approx(expected, rel=1e-3)


def test_parameters_are_those_of_the_baselines():
    assert make_fat5(WORKLOADS["8x64"], "meta").num_parameters() / 1e6 == pytest.approx(146.8, abs=0.05)


def test_gate_passes_the_model_and_finds_a_wrong_one():
    workload = WORKLOADS["smoke"]
    gate = Gate(workload, CPU, torch.bfloat16)
    model = make_fat5(workload).to(torch.bfloat16)
    assert 0 < gate.check(model, is_packed=True) <= 1
    with torch.no_grad():
        model.encoder.block[0].layer[0].SelfAttention.k.weight *= 1.5
    with pytest.raises(GateError, match="gradients differ"):
        gate.check(model, is_packed=True)
    with torch.no_grad():
        model.lm_head.weight *= 5
    with pytest.raises(GateError, match="the loss is"):
        gate.check(model, is_packed=True)


def test_run_of_the_whole_case(tmp_path, capsys):
    chosen = ["fat5-compiled", "transformers-eager", "fat5-cuda-graphs"]
    arguments = ["--tables", "smoke", "--implementations", *chosen, "--steps", "2", "--quick"]
    arguments += ["--results", str(tmp_path)]
    assert main(["pretrain", *arguments]) == 0
    rows = {row["implementation"]: row for row in read_rows(tmp_path / "pretrain.csv")}
    assert rows["fat5-cuda-graphs"]["status"] == "skipped"
    measured = {name: row for name, row in rows.items() if row["status"] == "ok"}
    assert measured.keys() == {"fat5-compiled", "transformers-eager"}
    for row in measured.values():
        tokens = 2 * (64 + 32)
        assert float(row["tokens_per_s"]) == pytest.approx(tokens / float(row["p50_ms"]) * 1e3, rel=0.5)
        assert float(row["tflops"]) == pytest.approx(WORKLOADS["smoke"].flops / float(row["p50_ms"]) / 1e9, rel=1e-3)
        assert float(row["first_step_s"]) > 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in measured)


@pytest.mark.slow
def test_every_implementation_and_real_documents_run(capsys, monkeypatch):
    assert main(["pretrain", "--tables", "smoke", "--steps", "1", "--quick", "--no-save"]) == 0
    monkeypatch.setattr(stage, "WORKLOADS", {**WORKLOADS, "8x64": replace(WORKLOADS["smoke"], vocab_size=32_768)})
    arguments = ["--tables", "documents", "--implementations", "fat5-eager", "--workers", "1", "--documents", "300"]
    assert main(["pretrain", *arguments, "--steps", "1", "--quick", "--no-save"]) == 0
    assert "FAILED" not in capsys.readouterr().out


def test_claims_compare_within_one_table():
    def row(table: str, implementation: str, rate: float) -> dict:
        return {"table": table, "implementation": implementation, "p50_ms": 1.0, "tokens_per_s": rate, "peak_gib": 13.0,
                "utilisation": 0.5}  # fmt: skip

    rows = [row("8x64", "transformers-compiled", 450e3), row("8x64", "fat5-compiled", 900e3)]
    texts = [str(claim) for claim in report.claims([*rows, row("documents", "fat5-compiled", 800e3)])]
    assert any("met" in text and "2x" in text for text in texts)
    assert any("MISSED" in text and "0.8889" in text for text in texts)
    assert not any("base" in text for text in texts)


def test_memory_is_claimed_of_the_implementation_whose_speed_is():
    def row(implementation: str, rate: float, peak: float) -> dict:
        return {"table": "8x64", "implementation": implementation, "p50_ms": 1.0, "tokens_per_s": rate,
                "peak_gib": peak}  # fmt: skip

    rows = [row("fat5-compiled", 400e3, 13.0), row("fat5-cuda-graphs", 900e3, 15.0), row("fat5-eager", 300e3, 20.0)]
    claims = {claim.text: claim.measured for claim in report.claims(rows)}
    assert claims["8 x 64: peak"] == 15.0
    assert claims["8 x 64: thousand tokens/s"] == 900


def test_shares_are_those_of_the_step_that_is_not_profiled(monkeypatch):
    """Three steps of 20 ms; in the trace they take 100 ms, of which the device works 45."""
    shares = {"gemm": 0.3, "attention": 0.15, "memory-bound": 0.0, "communication": 0.0, "idle": 0.55}
    monkeypatch.setattr(steps, "profile_of", lambda kernels: Profile(shares, 100.0, []))
    monkeypatch.setattr(steps, "read_kernels", lambda trace: [])
    found = steps._shares(lambda: None, torch.device("cuda"), 60.0)
    assert found["share_gemm"] == pytest.approx(0.5)
    assert found["share_attention"] == pytest.approx(0.25)
    assert found["share_idle"] == pytest.approx(0.25)
    assert steps._shares(lambda: None, torch.device("cuda"), 40.0)["share_idle"] == 0
    assert steps._shares(lambda: None, CPU, 60.0) == {}
