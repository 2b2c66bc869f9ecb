"""A pretraining of so many minutes: tokenizer, token files, a few steps to know their time, then the run."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

CALIBRATION_STEPS = 60
_TOKENIZER_SHARE = 3
"""One document of so many trains the tokenizer: the pieces hardly change beyond tens of megabytes."""


def prepare_text(corpus: Path, validation: Path, work: Path, vocab_size: int) -> None:
    """Train the tokenizer and write the token files, unless an earlier command has."""
    from fat5.data.pretokenize import pretokenize
    from fat5.data.sources import TextSource, read_documents
    from fat5.data.tokenizer import load_tokenizer, save_tokenizer
    from fat5.data.tokenizer_training import TokenizerConfig, train_tokenizer

    if not (work / "tokenizer").is_dir():
        documents = islice(read_documents(TextSource([str(corpus)])), None, None, _TOKENIZER_SHARE)
        tokenizer = train_tokenizer(documents, TokenizerConfig(vocab_size=vocab_size), show_progress=False)
        save_tokenizer(tokenizer, work / "tokenizer")
        say("tokenizer trained")
    tokenizer = load_tokenizer(work / "tokenizer")
    for name, source in (("train", corpus), ("validation", validation)):
        if not (work / "tokens" / name).is_dir():
            output = work / "tokens" / name
            manifests = pretokenize(TextSource([str(source)]), tokenizer, output, show_progress=False)
            say(f"{name}: {sum(manifest.tokens for manifest in manifests.values()):,} tokens")


def pretrain_for(minutes: float, work: Path, settings: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Pretrain for about so many minutes and return what the run was; a run that is complete is not repeated.

    The learning rate must end with the run, so its number of steps is set beforehand, from the time that a few take.
    """
    from fat5.training.config import PretrainConfig
    from fat5.training.config_file import load_settings
    from fat5.training.pretrain import pretrain

    facts = work / "pretraining.json"
    if facts.is_file():
        return json.loads(facts.read_text(encoding="utf-8"))
    places = [
        f"data.train={work / 'tokens' / 'train'}",
        f"data.validation={work / 'tokens' / 'validation'}",
        f"data.tokenizer={work / 'tokenizer'}",
        "training.report_to=[]",
        "training.save_total_limit=1",
    ]

    def run(name: str, steps: int, log_every: int) -> Any:
        lengths = [f"training.max_steps={steps}", "training.max_tokens=null", f"training.log_every={log_every}"]
        rare = [f"training.eval_every={10 * steps}", f"training.save_every={10 * steps}", "training.eval_batches=50"]
        output = [f"training.output_dir={work / name}"]
        return pretrain(load_settings(PretrainConfig, settings, [*places, *output, *lengths, *rare, *overrides]))

    calibration = run(f"calibration-{time.time():.0f}", CALIBRATION_STEPS, CALIBRATION_STEPS // 3)
    shutil.rmtree(calibration.output_dir)
    logs = [entry for entry in calibration.log_history if "tokens_per_second" in entry]
    tokens = logs[-1]["tokens_seen"] - logs[-2]["tokens_seen"]
    step_seconds = tokens / logs[-1]["tokens_per_second"] / (logs[-1]["step"] - logs[-2]["step"])
    steps = max(10, round(60 * minutes / step_seconds))
    say(f"a step takes {step_seconds * 1e3:.0f} ms: {steps:,} steps in {minutes:g} minutes")
    started = time.perf_counter()
    result = run("run", steps, max(1, steps // 40))
    seconds = time.perf_counter() - started
    if result.stopped_by is not None:
        raise KeyboardInterrupt
    summary = {
        "model": str(work / "run"),
        "steps": result.step,
        "seconds": round(seconds, 1),
        "tokens_seen": int(result.evaluation["tokens_seen"]),
        "eval_loss": result.evaluation["eval_loss"],
        "eval_accuracy": result.evaluation["eval_accuracy"],
    }
    facts.write_text(json.dumps(summary, indent=1), encoding="utf-8")
    return summary


def untrained(work: Path, settings: Path, overrides: Sequence[str]) -> str:
    """Write the pretraining's model without its weights, which is all that a random twin takes; return its folder."""
    from fat5.data.tokenizer import load_tokenizer, save_tokenizer
    from fat5.training.config import PretrainConfig
    from fat5.training.config_file import load_settings

    config = load_settings(PretrainConfig, settings, [f"data.tokenizer={work / 'tokenizer'}", *overrides])
    tokenizer = load_tokenizer(work / "tokenizer")
    folder = work / "untrained"
    if not folder.is_dir():
        save_tokenizer(tokenizer, folder)
    model = config.model.build(len(tokenizer), pad=tokenizer.pad_token_id, eos=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    return str(folder)


def say(text: str) -> None:
    """Report progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)
