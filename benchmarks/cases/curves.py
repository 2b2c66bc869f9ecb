"""Learning curves on a corpus, beside Transformers' T5: for the same time, and for the same tokens."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.curves.comparison import MODELS, curve_of, newest_comparison

if TYPE_CHECKING:
    from benchmarks.session import Session
    from benchmarks.tables import Claim

SUMMARY = "learning curves beside Transformers' T5, for the same time and for the same tokens"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the case's options."""
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    path: dict[str, Any] = {"type": Path, "metavar": "PATH"}
    parser.add_argument("--train", help="training text: a folder of token files, or .jsonl, .txt, .parquet", **path)
    parser.add_argument("--validation", help="held-out text, likewise", **path)
    parser.add_argument("--tokenizer", help="folder of the tokenizer", **path)
    parser.add_argument("--minutes", type=float, default=3.0, help="training time of each model")
    parser.add_argument("--model", default="8x64", help="a table of the case pretrain")
    parser.add_argument("--denoisers", default="t5", help="preset of the mixture")
    parser.add_argument("--batch", default=32, help="rows", **number)
    parser.add_argument("--input-length", default=1024, help="tokens of an encoder row", **number)
    parser.add_argument("--target-length", default=256, help="tokens of a decoder row", **number)
    parser.add_argument("--evaluate-every", default=100, help="steps", **number)
    parser.add_argument("--eval-batches", default=8, help="validation batches", **number)
    parser.add_argument("--lr", type=float, default=1e-2, help="relative to the RMS of each tensor")
    parser.add_argument("--warmup", default=200, help="steps", **number)
    parser.add_argument("--max-steps", default=1_000_000, help="steps at most", **number)
    parser.add_argument("--workers", default=4, help="worker processes", **number)
    own = "models to train: two cards can draw one each, and `record` brings them together"
    parser.add_argument("--implementations", nargs="+", choices=MODELS, default=[*MODELS], metavar="NAME", help=own)
    parser.add_argument("--eager", action="store_true", help="without torch.compile")


def run(arguments: Namespace, session: Session) -> None:
    """Train one after the other; each evaluation is a row, printed as it comes."""
    import dataclasses

    import torch

    from benchmarks.curves.corpus import open_corpus
    from benchmarks.curves.training import Plan, draw_curve
    from benchmarks.pretraining.steps import IMPLEMENTATIONS
    from benchmarks.pretraining.workload import WORKLOADS
    from benchmarks.registry import UsageError
    from benchmarks.session import FAILED, OK
    from benchmarks.timing import release_memory
    from fat5.data.denoising_config import DenoisingConfig

    missing = [name for name in ("train", "validation", "tokenizer") if getattr(arguments, name) is None]
    if missing:
        raise UsageError(f"the case curves needs a corpus; expected --{' and --'.join(missing)}")
    if arguments.model not in WORKLOADS:
        raise UsageError(f"no model {arguments.model!r}; expected one of {', '.join(WORKLOADS)}")
    config = DenoisingConfig(
        denoisers=arguments.denoisers,
        layout="concat",
        batch_size=arguments.batch,
        max_input_length=arguments.input_length,
        max_target_length=arguments.target_length,
    )
    corpus = open_corpus(arguments.train, arguments.validation, arguments.tokenizer, config)
    plan = Plan(
        seconds=arguments.minutes * 60 / (6 if session.quick else 1),
        evaluate_every=arguments.evaluate_every,
        eval_batches=arguments.eval_batches,
        lr=arguments.lr,
        warmup=arguments.warmup,
        workers=arguments.workers,
        max_steps=arguments.max_steps,
    )
    workload = dataclasses.replace(WORKLOADS[arguments.model], vocab_size=corpus.vocab_size)
    dtype = torch.bfloat16 if session.device.type == "cuda" else torch.float32
    # FAT5 as `training.compile_mode=auto` has it.
    compiled = "fat5-cuda-graphs" if session.device.type == "cuda" else "fat5-compiled"
    names = ("fat5-eager", "transformers-eager") if arguments.eager else (compiled, "transformers-compiled")
    settings = {
        "model": arguments.model,
        **{name: getattr(arguments, name).name for name in ("train", "validation", "tokenizer")},
        "text_tokens": corpus.tokens,
        **{name: getattr(arguments, name) for name in ("denoisers", "batch", "input_length", "target_length", "eager")},
        **{name: getattr(plan, name) for name in ("max_steps", "lr", "warmup", "evaluate_every", "eval_batches")},
        "minutes": plan.seconds / 60,
    }
    rows: list[dict[str, Any]] = []
    print(f"{corpus.tokens:,} tokens of text, {workload.columns}", flush=True)
    for name in (name for name in names if name.startswith(tuple(arguments.implementations))):
        implementation = IMPLEMENTATIONS[name]
        columns = {"table": "curves", **settings, "implementation": implementation.name}
        try:
            for point in draw_curve(implementation, workload, corpus, plan, session.device, dtype):
                rows += session.record([{**columns, "status": OK, **point}])
                print(describe(rows[-1]), flush=True)
        except Exception as error:
            session.failures += 1
            session.record([{**columns, "status": FAILED, "error": f"{type(error).__name__}: {error}"[:300]}])
            print(f"{FAILED} {implementation.name}: {error}", flush=True)
        release_memory()
    print("\n" + "\n".join(conclusions(rows)))


def describe(row: Mapping[str, Any]) -> str:
    """Return one point as a line."""
    loss = f"{row['loss']:.4f}" if "loss" in row else "     -"
    return (
        f"{row['implementation']:<22} step {row['step']:>6}  epoch {row['epoch']:5.2f}  "
        f"{row['tokens'] / 1e6:8.2f} M tokens  {row['seconds']:6.1f} s  loss {loss}  "
        f"validation {row['eval_loss']:.4f}  accuracy {row['eval_accuracy']:.4f}"
    )


def conclusions(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what the curves say: at the same tokens, at the same time, and where validation is best."""
    ours, theirs = _curves(rows)
    lines = list(map(str, claims(rows)))
    if ours and theirs:
        lines.append(
            f"in the same time: {ours[-1]['tokens'] / max(theirs[-1]['tokens'], 1):.2f} times the tokens, validation "
            f"loss {ours[-1]['eval_loss']:.4f} beside {theirs[-1]['eval_loss']:.4f}"
        )
    else:
        lines.append(
            "one of the two has no curve here; `plot` and `report` set one beside that of another run with the same "
            "settings"
        )
    for curve in filter(None, (ours, theirs)):
        best = min(curve, key=lambda row: row["eval_loss"])
        lines.append(f"{best['implementation']}: validation is best at step {best['step']}, epoch {best['epoch']:.2f}")
    return lines


def claims(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Return how far the two are apart after the same tokens, if the rows hold both curves."""
    from benchmarks.tables import Claim

    ours, theirs = _curves(rows)
    by_step = {row["step"]: row for row in theirs}
    mine = max((row for row in ours if row["step"] in by_step), key=lambda row: row["step"], default=None)
    if mine is None:
        return []
    difference = abs(mine["eval_loss"] / by_step[mine["step"]]["eval_loss"] - 1)
    return [Claim(f"validation loss at the same {mine['tokens']:,} tokens, difference", difference, 0.01, True, "")]


def comparison(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows of one or two runs that are compared: the newest curve of each model, with equal settings."""
    return newest_comparison(rows)


def _curves(rows: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Return FAT5's points and Transformers'."""
    return [curve_of(rows, model) for model in MODELS]
