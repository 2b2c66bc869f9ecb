"""Shares of time from a trace, and the setting that writes one."""

from __future__ import annotations

import gzip
import json

import pytest

from fat5.training.pretrain import pretrain
from fat5.training.profiling import TRACE_NAME, ProfileCallback, describe_profile, kind_of, profile_of, read_kernels


def op(name: str, start: float, duration: float, **event):
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": start, "dur": duration, "tid": 1, **event}


def kernel(name: str, start: float, duration: float, launched: float, correlation: int):
    launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": launched, "dur": 0.1, "tid": 1}
    work = {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": duration, "tid": 7}
    arguments = {"args": {"correlation": correlation}}
    return [launch | arguments, work | arguments]


def test_shares_add_up_and_attention_is_told_by_what_launched_it(tmp_path):
    events = [
        op("fat5::triton_attention", 0, 10),
        op("aten::mm", 20, 10),
        op("fat5::triton_rms_norm", 40, 10),
        *kernel("forward_kernel", 100, 30, 5, 1),
        *kernel("nvjet_tst_128x128", 140, 40, 25, 2),
        *kernel("forward_kernel", 170, 20, 45, 3),  # begins while the one before still runs
        *kernel("ncclDevKernel_AllReduce", 190, 10, 60, 4),
        {"ph": "i", "cat": "kernel", "name": "no work", "ts": 0},
    ]
    path = tmp_path / TRACE_NAME
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    profile = profile_of(read_kernels(path))
    assert profile.milliseconds == pytest.approx(0.1)
    assert profile.shares == pytest.approx(
        {"attention": 0.3, "idle": 0.1, "gemm": 0.4, "memory-bound": 0.1, "communication": 0.1}
    )
    assert profile.longest[0] == ("forward_kernel", pytest.approx(0.4))
    assert "attention 30.0%" in describe_profile(profile)


def test_attention_in_a_replayed_graph_is_told_by_its_tiles(tmp_path):
    """One launch, around which is no operator: names that several kernels bear say nothing."""
    replay = {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 1, "dur": 1, "tid": 1}
    work = [("backward_kernel", 100_000, 30), ("backward_kernel", 16_384, 20), ("forward_kernel", 0, 10)]
    work += [("finish_kernel", 0, 15), ("nvjet_tst", 100_000, 25)]
    events, start = [op("CompiledFunctionBackward", 0, 10), replay | {"args": {"correlation": 1}}], 100
    for name, shared, duration in work:
        arguments = {"correlation": 1, "shared memory": shared}
        events.append(op(name, start, duration, tid=7) | {"cat": "kernel", "args": arguments})
        start += duration
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    shares = profile_of(read_kernels(tmp_path / "trace.json")).shares
    assert shares == pytest.approx(
        {"attention": 0.45, "memory-bound": 0.3, "gemm": 0.25, "communication": 0.0, "idle": 0.0}
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16>", "gemm"),
        ("pytorch_flash::flash_fwd_kernel", "attention"),
        ("fmha_cutlassB_bf16_aligned_64x64_k64_sm80", "attention"),
        ("key_value_kernel", "attention"),
        ("triton_poi_fused_add_mul_0", "memory-bound"),
        ("triton_red_fused__to_copy_mean_pow", "memory-bound"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16", "communication"),
    ],
)
def test_kernels_are_told_by_their_names(name, kind):
    assert kind_of("", name) == kind


def test_a_run_writes_a_trace_of_its_later_steps(make_config, tmp_path, monkeypatch):
    monkeypatch.setattr(ProfileCallback, "skipped", 1)
    pretrain(make_config(training__max_steps=3, data__validation=None, training__profile=1, training__device="cpu"))
    path = tmp_path / "run" / TRACE_NAME
    with gzip.open(path, "rt") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    # Of one step alone: encoder, decoder and cross-attention.
    assert sum(name.endswith("evaluate_function: torch_joined_attentionBackward") for name in names) == 3
    assert profile_of(read_kernels(path)) is None
    assert describe_profile(None) == "no work of a GPU was recorded"
