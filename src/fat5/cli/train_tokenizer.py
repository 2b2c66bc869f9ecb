"""`fat5 train-tokenizer`: text to a tokenizer folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fat5.cli.settings import add_settings, settings_from
from fat5.data.sources import TextSource, expected_bytes, read_documents
from fat5.data.tokenizer import tokenizer_folder, write_tokenizer
from fat5.data.tokenizer_training import TokenizerConfig, train_tokenizer

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments to `parser`."""
    add_settings(parser, TextSource, positional="source")
    parser.add_argument("--output", type=str, required=True, help="Folder to make for the tokenizer.")
    add_settings(parser, TokenizerConfig)
    parser.add_argument("--overwrite", action="store_true", help="Replace the tokenizer that is already there.")


def run(args: Namespace) -> int:
    """Train the tokenizer, save it and say what to do next."""
    source, config = settings_from(args, TextSource), settings_from(args, TokenizerConfig)
    documents = read_documents(source)
    with tokenizer_folder(args.output, overwrite=args.overwrite) as folder:
        tokenizer = train_tokenizer(documents, config, text_bytes=expected_bytes(source))
        write_tokenizer(tokenizer, folder)
    print(f"{args.output}: {len(tokenizer):,} pieces; next: `fat5 pretokenize SOURCE --tokenizer {args.output}`")
    return 0
