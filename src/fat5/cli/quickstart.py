"""`fat5 quickstart`: from raw French text to a small pretrained T5, and what it has learnt."""

from __future__ import annotations

from jsonargparse import ArgumentParser, Namespace

from fat5.cli.pretrain import report_end, show_progress


def add_arguments(parser: ArgumentParser) -> None:
    """Add where to write and which settings to change."""
    parser.add_argument(
        "overrides", nargs="*", type=str, help="settings of the pretraining to change, such as training.max_steps=50"
    )
    parser.add_argument("--output-dir", type=str, default="quickstart", help="folder to make")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier quickstart in that folder")


def run(args: Namespace) -> int:
    """Run it and print the summary; 0 when complete, 128 + the signal's number when a signal ended it early."""
    from fat5.training.quickstart import QuickstartSummary, quickstart

    show_progress()
    outcome = quickstart(args.output_dir, overwrite=args.overwrite, overrides=args.overrides)
    if not isinstance(outcome, QuickstartSummary):
        return report_end(outcome)
    gain = outcome.unigram_loss - outcome.eval_loss
    print(
        f"\n{outcome.parameters / 1e6:.1f} M parameters, {outcome.steps:,} steps, {outcome.tokens_seen:,} tokens, "
        f"{sum(outcome.seconds.values()):.0f} s\n\n"
        "evaluation loss (nats a target token, the same held-out targets for all three)\n"
        f"  this model       {outcome.eval_loss:7.3f}   accuracy {outcome.eval_accuracy:.1%}\n"
        f"  unigram          {outcome.unigram_loss:7.3f}   {gain:.3f} above this model\n"
        f"  untrained model  {outcome.untrained_loss:7.3f}\n\n"
        "masked sentences, filled by a model that has read for minutes: it knows the phrases of the law, and hardly\n"
        "yet how to read what stands around a mask"
    )
    for sentence, filled in outcome.filled.items():
        print(f"  {sentence}\n    {filled}")
    print(
        f"\nmodel and tokenizer: {outcome.output_dir}/run\nloss curve: {outcome.output_dir}/run/loss.png\n"
        f"summary: {outcome.output_dir}/summary.json"
    )
    return 0
