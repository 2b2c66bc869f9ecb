"""The whole way in one script: tokenizer, token files, pretraining, finetuning, evaluation, generation, export.

`python examples/tutorial.py --output tutorial` runs on the text that comes with the package, in minutes on a CPU;
`--source JeanKaddour/minipile --config configs/minipile.yaml` on MiniPile, with a GPU. docs/tutorial.md tells more.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from fat5.cli.main import main as fat5
from fat5.data.sample import SAMPLE_NAME
from fat5.data.sources import TextSource, read_documents
from fat5.files import atomic_file

WORDS = 24
SPLITS = {"train": 0.7, "valid": 0.15, "test": 0.15}


def order_rows(documents: Iterator[str], count: int) -> Iterator[dict[str, str]]:
    """Yield the first words of up to `count` documents, about half of them in a random order.

    Which words there are says nothing of the class; which are neighbours does.
    """
    draw = random.Random(0)
    for document in islice((d for d in documents if len(d.split()) >= WORDS), count):
        words = document.split()[:WORDS]
        label = draw.choice(["kept", "mixed"])
        if label == "mixed":
            draw.shuffle(words)
        split = draw.choices(list(SPLITS), weights=list(SPLITS.values()))[0]
        yield {"text": " ".join(words), "label": label, "split": split}


def commands(arguments: argparse.Namespace) -> Iterator[list[str]]:
    """Yield the commands, in their order, without the name of the program."""
    root, source = arguments.output, arguments.source
    tokens, run, order = f"{root}/tokens", f"{root}/run", f"{root}/order"
    size = [] if arguments.vocab_size is None else ["--vocab-size", str(arguments.vocab_size)]
    yield ["train-tokenizer", source, *size, "--output", f"{root}/tokenizer"]
    fraction = str(arguments.validation_fraction)
    yield ["pretokenize", source, "--tokenizer", f"{root}/tokenizer", "--validation-fraction", fraction,
           "--output", tokens]  # fmt: skip
    yield ["pretrain", arguments.config, f"data.train={tokens}/train", f"data.validation={tokens}/validation",
           f"training.output_dir={run}", *arguments.overrides]  # fmt: skip
    finetuning = arguments.finetuning.split()
    yield ["finetune", "classification", run, "--data", f"{order}.jsonl", "--output", order, "--baseline", *finetuning]
    yield ["evaluate", "classification", f"{order}/seed-0", "--data", f"{order}.jsonl"]
    yield ["generate", run, arguments.text]
    yield ["export", run, f"{root}/exported", "--to", "t5"]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="From text to a model in use; see docs/tutorial.md.")
    parser.add_argument("overrides", nargs="*", help="settings of the pretraining, such as training.max_steps=2000")
    parser.add_argument("--output", default="tutorial", metavar="FOLDER", help="folder for all results")
    parser.add_argument(
        "--source", default=SAMPLE_NAME, help="a .txt, .jsonl or .parquet file, or a data set of the hub"
    )
    parser.add_argument(
        "--config", default="configs/quickstart.yaml", metavar="FILE", help="settings of the pretraining"
    )
    parser.add_argument("--vocab-size", type=int, help="pieces; 4,096 for the shipped text, else the command's default")
    parser.add_argument("--validation-fraction", type=float, default=0.05, help="share of the documents held out")
    parser.add_argument("--rows", type=int, default=4000, help="rows of the finetuning, at most")
    parser.add_argument("--finetuning", default="", help="settings of the finetuning, such as 'training.max_steps=50'")
    parser.add_argument("--text", default="Le ministre <extra_id_0> fixe la liste.", help="a text with blanks to fill")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.source == SAMPLE_NAME and arguments.vocab_size is None:
        arguments.vocab_size = 4096
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Run every command; the exit code is that of the first one that fails."""
    arguments = parse(argv)
    for command in commands(arguments):
        if command[0] == "finetune":
            write_rows(Path(f"{arguments.output}/order.jsonl"), arguments)
        print(f"\n$ fat5 {shlex.join(command)}", flush=True)
        if code := fat5(command):
            return code
    return 0


def write_rows(path: Path, arguments: argparse.Namespace) -> None:
    """Write the rows of the finetuning."""
    rows = order_rows(read_documents(TextSource([arguments.source])), arguments.rows)
    with atomic_file(path) as staging:
        staging.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
