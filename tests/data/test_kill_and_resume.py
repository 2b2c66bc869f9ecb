"""A run that is killed goes on with the batches that it would have seen, whatever the number of workers then."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from fat5.data.budgets import resolve_budgets
from fat5.data.denoising_config import DenoisingConfig
from fat5.data.denoising_dataset import DenoisingDataset
from fat5.data.loader import data_loader
from fat5.data.pretokenize import pretokenize
from tests.data import denoising_reference as reference
from tests.data.endless_run import CONFIGS, digests, stream, text_stream
from tests.data.small_tokenizer import small_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def kill_after(lines: int, output: Path, *command: str) -> list[str]:
    """Start a run, kill it with SIGKILL once it has written so many lines, and return the whole lines in its file."""
    process = subprocess.Popen([sys.executable, "-m", "tests.data.endless_run", *command], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if output.exists() and output.read_text().count("\n") >= lines:
            break
        time.sleep(0.01)
    assert process.poll() is None, process.stderr.read().decode()
    process.kill()
    process.wait()
    process.stderr.close()
    written = output.read_text().rpartition("\n")[0].splitlines()
    assert len(written) >= lines
    return written


def test_killed_at_a_random_batch_the_stream_goes_on_exactly(tmp_path):
    """Pitfall: after a resume in the middle of an epoch the data starts over."""
    texts = [" ".join(["un", "deux", "trois", "quatre"][n % 4 :] * (1 + 7 * n % 60)) for n in range(300)]
    pretokenize(texts, small_tokenizer(), tmp_path / "tokens", show_progress=False)
    output = tmp_path / "digests.txt"
    lines = random.randrange(60, 200)
    written = kill_after(lines, output, "stored", str(tmp_path / "tokens"), str(output), "2")
    for layout in CONFIGS:
        before = [line.split()[1] for line in written if line.startswith(layout)]
        assert len(before) >= lines // 3
        uninterrupted = list(islice(digests(stream(layout, tmp_path / "tokens")), len(before) + 40))
        assert len(set(uninterrupted)) == len(uninterrupted)
        assert before == uninterrupted[: len(before)], f"killed after {lines} lines"
        for num_workers in (0, 3):
            loader = data_loader(stream(layout, tmp_path / "tokens", len(before)), num_workers=num_workers)
            assert list(islice(digests(iter(loader)), 40)) == uninterrupted[len(before) :]


def test_killed_at_a_random_batch_a_text_stream_goes_on_exactly(tmp_path):
    output = tmp_path / "digests.txt"
    written = kill_after(random.randrange(5, 40), output, "streamed", str(output), "2")
    uninterrupted = list(islice(digests(iter(data_loader(text_stream(), num_workers=2))), len(written) + 20))
    assert written == uninterrupted[: len(written)]
    loader = data_loader(text_stream(), num_workers=2)
    loader.load_state_dict(torch.load(f"{output}.state-{len(written)}", weights_only=True))
    assert list(islice(digests(iter(loader)), 20)) == uninterrupted[len(written) :]


class ManyDocuments:
    """A million documents that share their tokens."""

    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        self.lengths = np.exp(generator.normal(np.log(400), 1.0, 10**6)).astype(np.int64)
        self._tokens = generator.integers(300, 30_000, int(self.lengths.max()) + 1).astype(np.uint16)

    def flat_shards(self) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(self._tokens, np.zeros(len(self.lengths) + 1, dtype=np.int32))]


@pytest.mark.parametrize("layout", ["packed", "padded", "concat"])
def test_resume_after_a_million_documents_starts_within_five_seconds(layout):
    source, config = ManyDocuments(), DenoisingConfig(layout=layout)
    special = reference.special_tokens()
    next(iter(DenoisingDataset(source, special, config)))  # compiles
    budgets = resolve_budgets(config, source.lengths, 256)
    start = int(source.lengths.sum() // budgets.encoder_budget) * (2 if layout == "padded" else 1)
    started = time.monotonic()
    resumed = DenoisingDataset(source, special, config, start_batch=start)
    batch = next(iter(resumed))
    assert time.monotonic() - started < 5
    assert resumed.statistics(start + 1).documents > 1_000_000
    assert batch["num_input_tokens"] > 0
