"""`fat5 export`: a checkpoint for another library."""

from __future__ import annotations

from jsonargparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    """Add what to export, where to, and for whom."""
    parser.add_argument("source", type=str, help="folder of a FAT5 model, such as the output of a training")
    parser.add_argument("output", type=str, help="folder to make")
    parser.add_argument(
        "--to",
        type=str,
        default="t5",
        metavar="FORMAT",
        help="t5: stock Transformers, equal logits without FAT5 installed; sentence-transformers: the encoder as an "
        "embedding model, with FAT5 installed (default: t5)",
    )


def run(args: Namespace) -> int:
    """Export, and say what loads the result."""
    from fat5.models.export import export_checkpoint

    loads_as = export_checkpoint(args.source, args.output, to=args.to)
    print(f"{args.output}: load it with {loads_as}")
    return 0
