"""What must hold before the pipeline is timed."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
import torch

from benchmarks.collator.documents import RandomDocuments, special_tokens
from benchmarks.subject import GateError
from fat5.data.collator import IGNORE_INDEX
from fat5.data.denoising_config import DenoisingConfig
from fat5.data.denoising_dataset import DenoisingDataset
from fat5.data.packing import BatchPlan, PackingStatistics, Planner

_CHECKED_BATCHES = 3
_COMPARED_BATCHES = 8

Batch = dict[str, Any]


def check_text(
    batches: Iterable[Batch], planner: Planner, documents: RandomDocuments, config: DenoisingConfig
) -> float:
    """Rebuild every window of the first batches from its input and target, and compare it with the document.

    Returns:
        0, the share of the tolerance that is used.

    Raises:
        GateError: A window is not what the plan says, or an unused slot is not padding.
    """
    checked = 0
    for batch, plan in islice(zip(batches, planner, strict=False), _CHECKED_BATCHES):
        _check_batch(batch, plan, documents, config)
        checked += len(plan.document)
    if checked == 0:
        raise GateError("there is no batch")
    return 0.0


def check_resume(fresh: DenoisingDataset, resumed: DenoisingDataset, start_batch: int) -> float:
    """Compare a stream that starts at `start_batch` with the uninterrupted one."""
    expected = islice(fresh, start_batch, start_batch + _COMPARED_BATCHES)
    return check_equal(resumed, expected, f"resume at batch {start_batch}")


def check_equal(batches: Iterable[Batch], expected: Iterable[Batch], what: str) -> float:
    """Compare the first batches of two streams, tensor by tensor.

    Raises:
        GateError: They differ.
    """
    compared = 0
    for number, (got, want) in enumerate(islice(zip(batches, expected, strict=False), _COMPARED_BATCHES)):
        for name, value in want.items():
            same = torch.equal(got[name], value) if isinstance(value, torch.Tensor) else got[name] == value
            if not same:
                raise GateError(f"{what}: {name} of batch {number} is another than in the uninterrupted stream")
        compared += 1
    if compared == 0:
        raise GateError(f"{what}: there is no batch to compare")
    return 0.0


def check_every_token_planned(statistics: PackingStatistics, lengths: np.ndarray) -> float:
    """Check that one epoch's windows and what was skipped are all there is.

    Raises:
        GateError: Tokens are missing or counted twice.
    """
    planned = statistics.text_tokens + statistics.skipped_tokens
    if planned != int(lengths.sum()) or statistics.documents != len(lengths):
        raise GateError(
            f"planned {planned} tokens of {statistics.documents} documents, expected {lengths.sum()} of {len(lengths)}"
        )
    return 0.0


def _check_batch(batch: Batch, plan: BatchPlan, documents: RandomDocuments, config: DenoisingConfig) -> None:
    inputs, targets = batch["input_ids"].numpy(), batch["labels"].numpy()
    input_ends, target_ends = batch["cu_seqlens"].tolist(), batch["decoder_cu_seqlens"].tolist()
    for index, document in enumerate(plan.document):
        denoiser = config.mixture[plan.denoiser[index]]
        source = inputs[input_ends[index] : input_ends[index + 1]].tolist()
        target = targets[target_ends[index] : target_ends[index + 1]].tolist()
        text = _rebuild(source[denoiser.prefix is not None :], target, denoiser.use_sentinels)
        start = int(plan.start[index])
        expected = documents.tokens(int(document))[start : start + int(plan.length[index])]
        if text != expected.tolist():
            raise GateError(f"window {index}, of document {document} from token {start}, does not hold its text")
    used = len(plan.document)
    pad = special_tokens().pad
    if (inputs[input_ends[used] :] != pad).any() or (targets[target_ends[used] :] != IGNORE_INDEX).any():
        raise GateError("an unused slot is not padding")


def _rebuild(source: list[int], target: list[int], with_sentinels: bool) -> list[int]:
    """Put the hidden spans of the target back in the place of their sentinels; both end in EOS."""
    special = special_tokens()
    if source.pop() != special.eos or target.pop() != special.eos:
        raise GateError("an input or a target does not end in EOS")
    if not with_sentinels:
        return source + target
    sentinels = set(special.sentinels)
    spans: dict[int, list[int]] = {}
    for token in target:
        if token in sentinels:
            current = spans.setdefault(token, [])
        else:
            current.append(token)
    text: list[int] = []
    for token in source:
        text += spans[token] if token in sentinels else [token]
    return text
