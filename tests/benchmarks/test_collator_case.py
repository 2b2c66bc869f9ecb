"""The collator case on few documents: its gate, its documents, its rows."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from benchmarks.collator import gate, measurements
from benchmarks.collator.documents import RandomDocuments, special_tokens
from benchmarks.collator.measurements import Pipeline, cores
from benchmarks.command_line import main
from benchmarks.results import read_rows
from benchmarks.subject import GateError
from fat5.data.denoising_config import DenoisingConfig
from fat5.data.denoising_dataset import DenoisingDataset

CONFIG = DenoisingConfig(encoder_budget=4096)
PIPELINE = Pipeline(CONFIG, num_documents=300, num_resumed=300)


def batches() -> list[dict]:
    return list(PIPELINE._dataset(PIPELINE.documents, epochs=1))


def check(stream: list[dict]) -> float:
    return gate.check_text(stream, PIPELINE._planner(PIPELINE.documents), PIPELINE.documents, CONFIG)


def test_documents_have_the_stated_lengths_and_no_special_tokens():
    documents = RandomDocuments(20_000)
    assert abs(np.median(documents.lengths) - 400) < 15
    assert abs(np.log(documents.lengths).std() - 1) < 0.02
    special = special_tokens()
    reserved = {special.pad, special.eos, special.bos, *special.prefixes.values(), *special.sentinels}
    assert documents.tokens(7).min() > max(reserved)
    assert len(documents.tokens(19_999)) == documents.lengths[-1]
    assert (RandomDocuments(20_000).tokens(7) == documents.tokens(7)).all()


def test_long_corpora_reuse_a_buffer_and_keep_their_documents_whole(monkeypatch):
    monkeypatch.setattr("benchmarks.collator.documents._LARGEST_BUFFER", 50_000)
    documents = RandomDocuments(2000)
    assert documents.lengths.sum() > 500_000
    (tokens, offsets) = documents.flat_shards()[0]
    assert len(tokens) < documents.lengths.sum() / 4
    assert (offsets[:-1] + documents.lengths <= len(tokens)).all()
    assert all(len(documents.tokens(n)) == documents.lengths[n] for n in range(2000))


def test_gate_passes_the_collator_s_batches():
    assert check(batches()) == 0.0


def change_text(batch: dict) -> None:
    batch["input_ids"][5] += 1


def lose_end(batch: dict) -> None:
    batch["labels"][int(batch["decoder_cu_seqlens"][1]) - 1] = 400


def fill_padding(batch: dict) -> None:
    batch["input_ids"][-1] = 400


@pytest.mark.parametrize(
    ("change", "message"),
    [(change_text, "does not hold its text"), (lose_end, "does not end in EOS"), (fill_padding, "is not padding")],
)
def test_gate_finds_a_changed_batch(change, message, monkeypatch):
    monkeypatch.setattr(gate, "_CHECKED_BATCHES", 1000)
    stream = batches()
    assert check(stream) == 0.0
    change(next(batch for batch in stream if int(batch["cu_seqlens"][-1]) < 4096))
    with pytest.raises(GateError, match=message):
        check(stream)


def test_gate_finds_a_stream_that_starts_elsewhere():
    fresh = DenoisingDataset(PIPELINE.documents, special_tokens(), CONFIG)
    resumed = DenoisingDataset(PIPELINE.documents, special_tokens(), CONFIG, start_batch=3)
    assert gate.check_resume(fresh, resumed, 3) == 0.0
    with pytest.raises(GateError, match=r"resume at batch 4: .* of batch 0"):
        gate.check_resume(fresh, resumed, 4)
    with pytest.raises(GateError, match="no batch to compare"):
        gate.check_equal([], fresh, "workers")


def test_gate_finds_a_lost_token():
    planner = PIPELINE._planner(PIPELINE.documents)
    planner.skip(10**9)
    lengths = PIPELINE.documents.lengths
    assert gate.check_every_token_planned(planner.statistics(), lengths) == 0.0
    with pytest.raises(GateError, match="expected"):
        gate.check_every_token_planned(planner.statistics(), lengths + 1)


def test_cores_are_limited_and_given_back():
    before = os.sched_getaffinity(0)
    threads = torch.get_num_threads()
    with cores(1):
        assert len(os.sched_getaffinity(0)) == torch.get_num_threads() == 1
    with cores(None):
        assert os.sched_getaffinity(0) == before
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == (before, threads)


def test_run_of_the_whole_case(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measurements, "_BATCHES_A_REPETITION", 10)
    arguments = ["--documents", "2000", "--resumed-documents", "3000", "--workers", "0", "1", "--quick"]
    assert main(["collator", *arguments, "--results", str(tmp_path)]) == 0
    rows = {
        (row.get("phase"), row["workers"]): row for row in read_rows(tmp_path / "collator.csv") if row["status"] == "ok"
    }
    assert list(rows) == [("collate", ""), ("plan", ""), ("resume", ""), ("load", "0"), ("load", "1")]
    collate = rows["collate", ""]
    assert collate["cores_allowed"] == "1"
    assert 0.9 < float(collate["fill"]) <= 1
    tokens_a_batch = float(collate["tokens_per_s"]) / float(collate["batches_per_s"])
    assert 40_000 < tokens_a_batch < 32_768 * 2
    assert float(rows["plan", ""]["documents_per_s"]) == pytest.approx(
        3e6 / float(rows["plan", ""]["p50_ms"]), rel=1e-3
    )
    printed = capsys.readouterr().out
    assert "M tokens/s" in printed
    assert "real tokens/s on one core" in printed
