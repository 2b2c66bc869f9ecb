"""`fat5 generate`: texts through a model, and masked texts filled in."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from fat5.cli.settings import add_settings, settings_from
from fat5.training.text_generation import GenerationSettings

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    """Add the model, the texts, and how to generate."""
    parser.add_argument("checkpoint", type=str, help="folder or hub name of a FAT5, T5, mT5 or UMT5 model")
    parser.add_argument(
        "text",
        nargs="*",
        type=str,
        default=[],
        help="texts; where one has sentinels (<extra_id_0>, <extra_id_1>, ...) they are filled in. Without a text or "
        "--file, each line of the standard input is one",
    )
    parser.add_argument(
        "--file", type=str, default=None, help="texts: lines of a .txt, or rows of a .jsonl or .parquet"
    )
    parser.add_argument("--text-column", type=str, default="text", help="with --file, the column that holds the text")
    parser.add_argument("--output", type=str, default=None, help="file to write, instead of the standard output")
    parser.add_argument("--json", action="store_true", help="write a JSON object a text, its input and outputs")
    parser.add_argument("--device", type=str, default=None, help="cpu, cuda, cuda:1, ...; a GPU if there is one")
    parser.add_argument("--dtype", type=str, default=None, help="float32, bfloat16 or float16; as the checkpoint is")
    add_settings(parser, GenerationSettings)


def run(args: Namespace) -> int:
    """Load, generate, and write one line an output."""
    from fat5.files import atomic_file
    from fat5.training.progress import library_bars_hidden
    from fat5.training.text_generation import generate_texts, load_model

    settings = settings_from(args, GenerationSettings)
    texts = _texts(args)
    with library_bars_hidden():
        model, tokenizer = load_model(args.checkpoint, device=args.device, dtype=args.dtype)
    with ExitStack() as stack:
        stream = sys.stdout
        if args.output is not None:
            stream = stack.enter_context(stack.enter_context(atomic_file(args.output)).open("w", encoding="utf-8"))
        for result in generate_texts(model, tokenizer, texts, settings):
            if args.json:
                lines = [json.dumps({"input": result.input, "outputs": result.outputs}, ensure_ascii=False)]
            else:
                lines = result.outputs
            print(*lines, sep="\n", file=stream, flush=True)
    return 0


def _texts(args: Namespace) -> Sequence[str] | Iterator[str]:
    from fat5.data.text_files import decoded_lines, file_format, read_file
    from fat5.errors import ConfigError

    if args.text and args.file is not None:
        raise ConfigError("got texts and --file; give one of them")
    if args.text:
        return list(args.text)
    if args.file is not None:
        path = Path(args.file)
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}")
        if file_format(path) is None:
            raise ConfigError(f"{path} is of no known format; expected .txt, .jsonl or .parquet")
        return list(read_file(path, documents="line", text_column=args.text_column))
    if sys.stdin.isatty():
        print("reading texts from the terminal, one a line; end with Ctrl+D", file=sys.stderr)
    return list(decoded_lines(sys.stdin.buffer, "the standard input"))
