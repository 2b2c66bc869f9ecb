"""Rows of every case as its CSV file has them, with figures that are made up."""

from __future__ import annotations

from pathlib import Path

from benchmarks.results import append_rows

DATE = "2026-01-01T00:00:00Z"
ENVIRONMENT = {"gpu": "a GPU", "torch": "2.11", "commit": "0123456", "status": "ok"}


def attention_rows(date: str, factor: float = 1.0) -> list[dict]:
    base = {**ENVIRONMENT, "case": "attention", "date": date, "dtype": "bf16", "heads": 12}
    rows = [
        {**base, "table": "sweep", "implementation": name, "head_dim": head_dim, "mask": mask, "length": length,
         "phase": phase, "tflops": factor * speed * (1 - 128 / length)}
        for name, speed in (("cudnn", 500.0), ("fat5-triton", 400.0))
        for head_dim in (64, 128) for mask in ("full", "causal")
        for length in (512, 1024, 4096) for phase in ("forward", "backward")
    ]  # fmt: skip
    failed = {**base, "status": "FAILED", "table": "sweep", "implementation": "flex", "head_dim": 64, "mask": "full"}
    memory = [
        {**base, "table": "memory", "implementation": name, "head_dim": 64, "length": length, "peak_mib": peak}
        for name, power in (("fat5-triton", 1), ("sdpa-bias", 2))
        for length in (512, 8192) for peak in [float(length**power)]
    ]  # fmt: skip
    return [*rows, {**failed, "length": 512}, *memory]


def collator_rows() -> list[dict]:
    base = {**ENVIRONMENT, "case": "collator", "date": DATE, "table": "workers", "denoisers": "fat5"}
    return [
        {**base, "cores_allowed": 16, "workers": workers, "pin_memory": pinned, "tokens_per_s": 1e7 * (workers + 1)}
        for workers in (0, 1, 4)
        for pinned in (False, True)
    ]


BANDWIDTH_COLUMNS = {
    "rms_norm": {"operation": "rms_norm", "rows": 8, "width": 4},
    "rotary": {"tokens": 8, "heads": 2, "head_dim": 4, "interleaved": False},
    "geglu": {"rows": 8, "width": 4, "approximate": "tanh", "layout": "apart"},
    "cross_entropy": {"table": "times", "rows": 8, "vocab": 4, "ignored": 0.0},
    "linear_cross_entropy": {"table": "times", "rows": 8, "width": 2, "vocab": 4, "ignored": 0.0, "peak_mib": 9.0},
    "optimizer": {"table": "step", "tensors": "130M"},
}


def bandwidth_rows(case: str) -> list[dict]:
    base = {**ENVIRONMENT, "case": case, "date": DATE, "dtype": "bf16", **BANDWIDTH_COLUMNS[case]}
    return [
        {**base, "implementation": "fat5-triton", "phase": phase, "p50_ms": 1.0, "gb_per_s": 3, "copy_gb_per_s": 4}
        for phase in ("forward", "backward")
    ]


def precision_rows() -> list[dict]:
    base = {**ENVIRONMENT, "case": "precision", "date": DATE, "table": "curve", "steps": 20}
    return [
        {**base, "implementation": name, "step": step, "loss": loss / step}
        for name, loss in (("fp32", 8.0), ("bf16-kahan", 8.1), ("bf16", 9.0))
        for step in (10, 20)
    ]


def curve_rows() -> list[dict]:
    base = {**ENVIRONMENT, "case": "curves", "date": DATE, "table": "curves", "model": "8x64"}
    return [
        {**base, "implementation": name, "step": step, "seconds": step, "tokens": step * speed,
         "eval_loss": 9 - step / 100, "eval_accuracy": step / 1000}
        for name, speed in (("fat5-compiled", 2_000_000), ("transformers-compiled", 1_000_000))
        for step in (0, 100, 200)
    ]  # fmt: skip


def decode_rows() -> list[dict]:
    base = {**ENVIRONMENT, "case": "decode", "date": DATE, "table": "decode", "kind": "cross", "batch": 2, "queries": 1}
    base |= {"keys": 40, "heads": 2, "head_dim": 16, "dtype": "bf16", "phase": "forward", "yardstick": "sdpa"}
    copy = {**ENVIRONMENT, "case": "decode", "date": DATE, "table": "copy", "implementation": "copy", "phase": "copy"}
    speeds = {"p50_ms": 1.0, "gb_per_s": 3.0, "copy_gb_per_s": 4.0}
    return [{**copy, "gb_per_s": 4.0}, *({**base, **speeds, "implementation": name} for name in ("sdpa", "fat5"))]


def pretrain_rows() -> list[dict]:
    base = {**ENVIRONMENT, "case": "pretrain", "date": DATE, "d_model": 512, "checkpointing": False, "phase": "step"}
    shares = {"gemm": 0.5, "attention": 0.2, "memory_bound": 0.2, "communication": 0.0, "idle": 0.1}
    columns = {f"share_{name}": share for name, share in shares.items()}
    return [
        {**base, **columns, "table": table, "implementation": name, "p50_ms": 10.0, "tokens_per_s": speed,
         "utilisation": 0.4, "peak_gib": 12.0, "peak_reserved_gib": 12.5}
        for table in ("8x64", "base") for name, speed in (("transformers-compiled", 4e5), ("fat5-compiled", 9e5))
    ]  # fmt: skip


def scaling_rows() -> list[dict]:
    base = {**ENVIRONMENT, "case": "scaling", "date": DATE, "model": "small", "several": 2}
    runs = [
        {**base, "table": "runs", "implementation": name, "processes": processes, "batch": batch,
         "peak_reserved_gib": 9.0,
         "tokens_per_s": processes * rate, "tokens_per_s_per_process": rate, "share_of_one": rate / 1e5}
        for name, processes, batch, rate in (
            ("one", 1, "times", 1e5), ("one, accumulating", 1, "same", 9e4), ("ddp", 2, "same", 8e4),
            ("ddp", 2, "times", 9.6e4), ("fsdp2", 2, "times", 9.4e4),
        )
    ]  # fmt: skip
    resumed = {**base, "table": "resumed", "implementation": "ddp", "batch": "same", "loss": 4.0, "loss_distance": 0.0}
    return [*runs, *({**resumed, "processes": processes} for processes in (1, 2))]


def generation_rows() -> list[dict]:
    base = {**ENVIRONMENT, "case": "generation", "date": DATE, "size": "147M", "length": 512, "encode": True}
    return [
        {**base, "beams": beams, "phase": phase, "implementation": name, "p50_ms": 1e3 / rate, "ratio": 1e3 / rate,
         "tokens_per_s": rate, "same_tokens": 1.0, "yardstick": "transformers"}
        for beams, phase in ((1, "greedy"), (4, "4 beams"))
        for name, rate in (("transformers", 1e3), ("transformers static", 6e3), ("fat5 graph", 2.4e4))
    ]  # fmt: skip


def heads_rows() -> list[dict]:
    base = {**ENVIRONMENT, "case": "heads", "date": DATE, "table": "full", "size": "base", "dtype": "bf16", "batch": 32}
    return [
        {**base, "length": 512, "padding": 0.0, "implementation": name, "phase": phase, "p50_ms": 10 / speed,
         "ratio": 1 / speed, "texts_per_s": 3200 * speed, "yardstick": "transformers"}
        for name, speed in (("transformers", 1.0), ("fat5", 2.5)) for phase in ("inference", "training")
    ]  # fmt: skip


def tasks_rows() -> list[dict]:
    base = {**ENVIRONMENT, "case": "tasks", "date": DATE}
    scores = {"pretrained": 91.0, "random": 61.0, "majority": 20.0, "tf-idf": 86.9}
    done = {**base, "table": "pretraining", "implementation": "pretrained", "steps": 9, "eval_loss": 3.0}
    leaks = {
        **base,
        "table": "leaks",
        "task": "topic_fr",
        "implementation": "corpus",
        "error": "no document <found> & so",
    }
    return [
        done,
        *(
            {**base, "table": "tasks", "task": "topic_fr", "metric": "accuracy", "implementation": name, "score": score}
            for name, score in scores.items()
        ),
        leaks,
    ]


def hopper_forward_rows() -> list[dict]:
    base = {**ENVIRONMENT, "case": "hopper_forward", "date": DATE, "head_dim": 64, "length": 1024, "mask": "full"}
    return [
        {**base, "layout": "tokens", "implementation": f"{n} consumers", "consumers": n, "phase": "forward",
         "p50_ms": 1.0, "ratio": n / 2, "yardstick": "cudnn"}
        for n in (2, 3)
    ]  # fmt: skip


def feed_forward_rows() -> list[dict]:
    base = {**ENVIRONMENT, "case": "feed_forward", "date": DATE, "tokens": 8, "d_model": 4, "d_ff": 8}
    base |= {"phase": "forward", "yardstick": "two kernels"}
    return [
        {**base, "implementation": name, "p50_ms": ratio, "ratio": ratio, "today": name != "two kernels"}
        for name, ratio in (("two kernels", 1.0), ("128x64x32", 0.9))
    ]


def make_results(folder: Path) -> None:
    """Write a CSV file of every case."""
    cases = [attention_rows(DATE), collator_rows(), precision_rows(), curve_rows(), decode_rows(), pretrain_rows()]
    cases += [scaling_rows(), generation_rows(), heads_rows(), tasks_rows(), hopper_forward_rows(), feed_forward_rows()]
    cases += map(bandwidth_rows, BANDWIDTH_COLUMNS)
    for rows in cases:
        append_rows(folder / f"{rows[0]['case']}.csv", rows)
