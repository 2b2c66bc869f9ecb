"""Pretraining for minutes, then every task on the pretrained model, on a random twin, and by simple methods."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.session import Session
    from benchmarks.tables import Claim

SUMMARY = "six tasks on a model pretrained for minutes, on its random twin, and by simple methods"

_ROOT = Path(__file__).resolve().parents[2]


def add_arguments(parser: ArgumentParser) -> None:
    """Add the case's options."""
    from benchmarks.tasks.finetuning import MODELS, TASKS

    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="holds corpus_fr.parquet, corpus_fr_valid.parquet, tasks/"
    )
    parser.add_argument("--corpus", type=Path, metavar="FILE", help="the corpus, DIR/corpus_fr.parquet if not given")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/tasks"), metavar="DIR", help="kept: a second command goes on"
    )
    parser.add_argument("--minutes", type=float, default=8.0, metavar="N", help="length of the pretraining")
    parser.add_argument("--only-pretrain", action="store_true", help="stop after the pretraining")
    parser.add_argument(
        "--only", nargs="+", default=list(TASKS), choices=TASKS, metavar="TASK", help="tasks, in this order"
    )
    parser.add_argument(
        "--models",
        nargs="+",
        default=list(MODELS),
        choices=MODELS,
        metavar="MODEL",
        help="which models; random alone needs no pretraining",
    )
    parser.add_argument(
        "--task-seconds", type=float, default=60.0, metavar="N", help="longest training of a task and seed"
    )
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds a task")
    parser.add_argument(
        "--config", type=Path, default=_ROOT / "configs" / "eight-minutes.yaml", metavar="FILE", help="pretraining"
    )
    parser.add_argument("--pretrain", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of the pretraining")
    parser.add_argument("--finetune", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of every task")
    parser.add_argument("--vocab-size", type=int, default=32768, metavar="N", help="pieces of the tokenizer")
    parser.add_argument("--no-leaks", action="store_true", help="do not search the corpus for held-out documents")


def run(arguments: Namespace, session: Session) -> None:
    """Pretrain, finetune, print a row as each comes, then the table."""
    import logging

    from benchmarks.registry import UsageError
    from benchmarks.tasks.finetuning import find_leaks
    from benchmarks.tasks.pretraining import prepare_text, pretrain_for, untrained
    from fat5.errors import nearest_path

    if arguments.data is None:
        raise UsageError(
            "--data is missing: the folder that holds corpus_fr.parquet, corpus_fr_valid.parquet and tasks/"
        )
    corpus, validation = (
        arguments.corpus or arguments.data / "corpus_fr.parquet",
        arguments.data / "corpus_fr_valid.parquet",
    )
    tables = [arguments.data / "tasks" / f"{name}.parquet" for name in arguments.only]
    for path in (corpus, validation, *tables, arguments.config):
        if not path.is_file():
            raise UsageError(f"there is no {path}{nearest_path(path)}")
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("fat5").setLevel(logging.INFO)
    # Beside the training: the search takes one core for as long as some steps.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        search = None
        if not arguments.no_leaks:
            search = pool.submit(find_leaks, str(corpus), str(arguments.data), arguments.only)
        arguments.work.mkdir(parents=True, exist_ok=True)
        prepare_text(corpus, validation, arguments.work, arguments.vocab_size)
        if arguments.models == ["random"]:
            checkpoint = untrained(arguments.work, arguments.config, arguments.pretrain)
        else:
            facts = pretrain_for(arguments.minutes, arguments.work, arguments.config, arguments.pretrain)
            session.record([{"table": "pretraining", "implementation": "pretrained", "status": "ok", **facts}])
            print(f"pretraining: {facts}", flush=True)
            checkpoint = facts["model"]
        if not arguments.only_pretrain:
            _tasks(arguments, session, checkpoint)
        if search is not None:
            _report_leaks(search, session)


def _tasks(arguments: Namespace, session: Session, checkpoint: str) -> None:
    from benchmarks.session import FAILED
    from benchmarks.tables import format_table, number
    from benchmarks.tasks.finetuning import baseline_row, row_of, simple_methods, task_config
    from fat5.tasks.finetune import finetune

    limits = [
        f"training.max_seconds={arguments.task_seconds}",
        f"training.seeds={arguments.seeds}",
        *arguments.finetune,
    ]
    rows: list[dict[str, Any]] = []
    for name in arguments.only:
        own: list[dict[str, Any]] = []
        for model in arguments.models:
            try:
                config = task_config(name, arguments.data, arguments.work, model, checkpoint, limits)
                result = finetune(config)
            except Exception as error:  # one task that breaks must not hide the others
                session.failures += 1
                message = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
                own += session.record(
                    [{"table": "tasks", "task": name, "implementation": model, "status": FAILED, "error": message}]
                )
                print(f"{name} {model}: {FAILED} {message}", flush=True)
                continue
            if result.stopped_by is not None:
                raise KeyboardInterrupt
            summary = result.summary
            own += session.record([row_of(name, model, summary)])
            print(_line(own[-1]), flush=True)
            if model == arguments.models[-1]:
                for method, scores in simple_methods(name, config, arguments.work).items():
                    own += session.record([baseline_row(name, method, scores, summary["metric"])])
                    print(_line(own[-1]), flush=True)
        rows += own
    lines = [
        [
            row["task"], row["implementation"], row.get("metric", "-"), number(row.get("score"), ".2f"),
            number(row.get("spread"), ".2f"), number(row.get("seconds"), ".0f"), number(row.get("peak_mib"), ",.0f"),
        ]
        for row in rows
    ]  # fmt: skip
    print(f"\n{format_table(['task', 'model', 'metric', 'score', 'spread', 's', 'peak MiB'], lines)}\n")
    print("\n".join(map(str, claims(rows))))


def _line(row: dict[str, Any]) -> str:
    seconds = f" in {row['seconds']:.0f} s, {row['steps']} steps" if "seconds" in row else ""
    peak = f", {row['peak_mib']:,.0f} MiB" if row.get("peak_mib") else ""
    return f"{row['task']} {row['implementation']}: {row['metric']} {row['score']:.2f}{seconds}{peak}"


def comparison(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the newest score of each task and model: commands may share the tasks, and models, among them."""
    from benchmarks.tasks.finetuning import newest_scores

    return newest_scores(rows)


def claims(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Return the pretrained model's score beside the twin's and the best simple method's, a claim each."""
    from benchmarks.tables import Claim

    found = []
    scored = [row for row in rows if row["table"] == "tasks" and "score" in row]
    for name in dict.fromkeys(row["task"] for row in scored):
        scores = {row["implementation"]: row["score"] for row in scored if row["task"] == name}
        ours, twin = scores.pop("pretrained", None), scores.pop("random", None)
        if ours is None:
            continue
        if twin is not None:
            found.append(Claim(f"{name}: pretrained over its random twin", ours - twin, 0.0, unit=" points"))
        if scores:
            method = max(scores, key=lambda key: scores[key])
            found.append(Claim(f"{name}: pretrained over {method}", ours - scores[method], 0.0, unit=" points"))
    return found


def _report_leaks(search: Future[dict[str, tuple[int, int, str]]], session: Session) -> None:
    from benchmarks.session import FAILED, OK

    print()
    for name, (leaks, covered, report) in search.result().items():
        clean = not leaks and not covered
        session.failures += not clean
        session.record(
            [
                {
                    "table": "leaks",
                    "task": name,
                    "implementation": "corpus",
                    "status": OK if clean else FAILED,
                    "error": report,
                }
            ]
        )
        print(f"leaks {name}: {'none' if clean else FAILED}; {report}")
