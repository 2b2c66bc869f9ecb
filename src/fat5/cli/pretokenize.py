"""`fat5 pretokenize`: text to token files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fat5.cli.settings import add_settings, settings_from
from fat5.data.pretokenize import PretokenizeConfig, pretokenize
from fat5.data.sources import TextSource, local_files
from fat5.data.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

    from fat5.data.manifest import Manifest


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments to `parser`."""
    add_settings(parser, TextSource, positional="source")
    parser.add_argument(
        "--tokenizer", type=str, required=True, help="Folder of a tokenizer, or the name of one on the hub."
    )
    parser.add_argument("--output", type=str, required=True, help="Folder to make for the token files.")
    add_settings(parser, PretokenizeConfig)


def run(args: Namespace) -> int:
    """Write the token files and print what they hold."""
    source, config = settings_from(args, TextSource), settings_from(args, PretokenizeConfig)
    local_files(source)  # a mistyped file shows before a tokenizer is looked for on the hub
    manifests = pretokenize(source, load_tokenizer(args.tokenizer), args.output, config)
    for name, manifest in manifests.items():
        place = f"{args.output}/{name}" if len(manifests) > 1 else args.output
        print(f"{place}: {_summary(manifest)}")
    return 0


def _summary(manifest: Manifest) -> str:
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in manifest.skipped.items()) or "none"
    return (
        f"{manifest.documents:,} documents, {manifest.tokens:,} tokens ({manifest.dtype}), "
        f"{manifest.text_bytes / manifest.tokens:.2f} bytes a token; skipped: {skipped}"
    )
