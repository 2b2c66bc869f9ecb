"""The compiled part of the planner; `fat5.data.packing` allocates its memory and explains it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fat5.data.counter_random import draw, draw_unit, permute
from fat5.data.jit import jit

# A window's columns, in the pool and in a plan.
DOCUMENT, START, LENGTH, DENOISER, WINDOW, EPOCH, INPUT, TARGET, POSITION, NUM_COLUMNS = range(10)
# The cursor: the next document to read, the one being cut (-1: none), and the number of windows in the pool.
NEXT_EPOCH, NEXT_POSITION, OPEN_DOCUMENT, OPEN_START, OPEN_WINDOW, WAITING, CURSOR_SIZE = range(7)
# The counters; the windows of each denoiser follow them.
(
    BATCHES,
    DOCUMENTS,
    SHORT_DOCUMENTS,
    SHORT_TAILS,
    SKIPPED_TOKENS,
    TEXT_TOKENS,
    INPUT_TOKENS,
    TARGET_TOKENS,
    NUM_COUNTERS,
) = range(9)

_BULK_SHARE = 0.75
_IMBALANCE_COST = 4.0
# Beyond every document's index: the counters below are keys of documents.
_ORDER_COUNTER = 2**62


class Rules(NamedTuple):
    """What stays: the span table, the mixture and the limits. `num_epochs` -1 is endless."""

    input_lengths: np.ndarray
    target_lengths: np.ndarray
    longest: np.ndarray
    cumulative_weights: np.ndarray
    seed: int
    num_epochs: int
    shuffle: bool
    encoder_budget: int
    decoder_budget: int
    max_documents: int
    look_ahead: int


class State(NamedTuple):
    """What changes: cursor [CURSOR_SIZE], pool [slots, NUM_COLUMNS] and counters [NUM_COUNTERS + denoisers], int64."""

    cursor: np.ndarray
    pool: np.ndarray
    counters: np.ndarray


@jit
def refill(lengths: np.ndarray, rules: Rules, state: State) -> None:
    """Read documents and append their windows until the pool is full or the last epoch has been read."""
    cursor, pool, counters = state
    epoch_key = draw(np.uint64(rules.seed), cursor[NEXT_EPOCH])
    while cursor[WAITING] < len(pool):
        if cursor[OPEN_DOCUMENT] < 0:
            if cursor[NEXT_POSITION] == len(lengths):
                cursor[NEXT_POSITION] = 0
                cursor[NEXT_EPOCH] += 1
                epoch_key = draw(np.uint64(rules.seed), cursor[NEXT_EPOCH])
            if cursor[NEXT_EPOCH] == rules.num_epochs:
                return
            document = cursor[NEXT_POSITION]
            if rules.shuffle:
                document = permute(document, len(lengths), draw(epoch_key, _ORDER_COUNTER))
            cursor[NEXT_POSITION] += 1
            counters[DOCUMENTS] += 1
            if lengths[document] < 2:
                counters[SHORT_DOCUMENTS] += 1
                counters[SKIPPED_TOKENS] += lengths[document]
                continue
            cursor[OPEN_DOCUMENT] = document
            cursor[OPEN_START] = 0
            cursor[OPEN_WINDOW] = 0
        document = cursor[OPEN_DOCUMENT]
        remaining = lengths[document] - cursor[OPEN_START]
        share = draw_unit(draw(draw(epoch_key, document), cursor[OPEN_WINDOW]), 0)
        denoiser = 0
        while share >= rules.cumulative_weights[denoiser]:
            denoiser += 1
        length = min(remaining, rules.longest[denoiser])
        window = pool[cursor[WAITING]]
        window[DOCUMENT] = document
        window[START] = cursor[OPEN_START]
        window[LENGTH] = length
        window[DENOISER] = denoiser
        window[WINDOW] = cursor[OPEN_WINDOW]
        window[EPOCH] = cursor[NEXT_EPOCH]
        window[INPUT] = rules.input_lengths[denoiser, length]
        window[TARGET] = rules.target_lengths[denoiser, length]
        window[POSITION] = cursor[NEXT_POSITION] - 1
        cursor[WAITING] += 1
        cursor[OPEN_START] += length
        cursor[OPEN_WINDOW] += 1
        if remaining - length < 2:
            cursor[OPEN_DOCUMENT] = -1
            counters[SHORT_TAILS] += remaining - length
            counters[SKIPPED_TOKENS] += remaining - length


@jit
def _best_fit(
    inputs: np.ndarray,
    targets: np.ndarray,
    stop: int,
    encoder_left: int,
    decoder_left: int,
    encoder_scale: float,
    decoder_scale: float,
) -> int:
    """Return the window of the first `stop` that leaves least of both budgets, evenly; -1 if none fits.

    It minimises x + y + cost * |x - y| over the shares x and y left of the encoder's and the decoder's budget: a window
    that uses up one budget alone makes the other's remainder useless.
    """
    best = -1
    best_cost = np.inf
    for slot in range(stop):
        encoder_rest = encoder_left - inputs[slot]
        decoder_rest = decoder_left - targets[slot]
        if encoder_rest < 0 or decoder_rest < 0:
            continue
        x = encoder_rest * encoder_scale
        y = decoder_rest * decoder_scale
        cost = x + y + _IMBALANCE_COST * abs(x - y)
        if cost < best_cost:
            best_cost = cost
            best = slot
    return best


@jit
def fill_batch(rules: Rules, state: State, plan: np.ndarray) -> int:
    """Move windows from the pool to `plan` [max_documents, NUM_COLUMNS]; return their number.

    The oldest come first, up to a share of either budget, then the best-fitting of the next `look_ahead`. The oldest
    window always opens the batch, so none waits for more batches than the pool has slots.
    """
    cursor, pool, counters = state
    waiting = cursor[WAITING]
    encoder_left = rules.encoder_budget
    decoder_left = rules.decoder_budget
    reserve = 1.0 - _BULK_SHARE if rules.look_ahead > 0 else 0.0
    size = 0
    while (
        size < min(waiting, rules.max_documents)
        and encoder_left > rules.encoder_budget * reserve
        and decoder_left > rules.decoder_budget * reserve
        and pool[size, INPUT] <= encoder_left
        and pool[size, TARGET] <= decoder_left
    ):
        encoder_left -= pool[size, INPUT]
        decoder_left -= pool[size, TARGET]
        size += 1
    plan[:size] = pool[:size]
    oldest = size
    # Side by side, since the search below reads them many times.
    inputs = pool[oldest:waiting, INPUT].copy()
    targets = pool[oldest:waiting, TARGET].copy()
    encoder_scale = 1.0 / rules.encoder_budget
    decoder_scale = 1.0 / rules.decoder_budget
    while size < rules.max_documents:
        stop = min(waiting, size + rules.look_ahead) - oldest
        best = _best_fit(inputs, targets, stop, encoder_left, decoder_left, encoder_scale, decoder_scale)
        if best < 0:
            break
        plan[size] = pool[oldest + best]
        encoder_left -= inputs[best]
        decoder_left -= targets[best]
        inputs[best] = rules.encoder_budget + 1  # fits nowhere: taken
        size += 1
    kept = 0
    for slot in range(oldest, waiting):
        if inputs[slot - oldest] <= rules.encoder_budget:
            for column in range(NUM_COLUMNS):
                pool[kept, column] = pool[slot, column]
            kept += 1
    cursor[WAITING] = kept
    counters[BATCHES] += size > 0
    counters[INPUT_TOKENS] += rules.encoder_budget - encoder_left
    counters[TARGET_TOKENS] += rules.decoder_budget - decoder_left
    for slot in range(size):
        counters[TEXT_TOKENS] += plan[slot, LENGTH]
        counters[NUM_COUNTERS + plan[slot, DENOISER]] += 1
    return size


@jit
def plan_batches(lengths: np.ndarray, rules: Rules, state: State, plan: np.ndarray, num_batches: int) -> int:
    """Plan `num_batches` batches, the last of which stays in `plan`; return its windows, 0 once all are used up."""
    size = 0
    for _ in range(num_batches):
        refill(lengths, rules, state)
        size = fill_batch(rules, state, plan)
        if size == 0:
            break
    return size


@jit
def _open_document(lengths: np.ndarray, rules: Rules, cursor: np.ndarray) -> int:
    """Open the next document that has a token, in this epoch or a later one; return the documents read for it."""
    read = 0
    while cursor[OPEN_DOCUMENT] < 0:
        if cursor[NEXT_POSITION] == len(lengths):
            cursor[NEXT_POSITION] = 0
            cursor[NEXT_EPOCH] += 1
        if cursor[NEXT_EPOCH] == rules.num_epochs:
            break
        document = cursor[NEXT_POSITION]
        if rules.shuffle:
            epoch_key = draw(np.uint64(rules.seed), cursor[NEXT_EPOCH])
            document = permute(document, len(lengths), draw(epoch_key, _ORDER_COUNTER))
        cursor[NEXT_POSITION] += 1
        read += 1
        if lengths[document] > 0:
            cursor[OPEN_DOCUMENT] = document
            cursor[OPEN_START] = 0
            cursor[OPEN_WINDOW] = 0
    return read


@jit
def cut_rows(lengths: np.ndarray, rules: Rules, state: State, plan: np.ndarray, num_batches: int) -> int:
    """Plan `num_batches` batches of rows cut from the documents end to end, the last of which stays in `plan`.

    Returns:
        Its rows, 0 once all documents are used up.
    """
    cursor, _, counters = state
    size = 0
    for _ in range(num_batches):
        size = 0
        while size < rules.max_documents:
            counters[DOCUMENTS] += _open_document(lengths, rules, cursor)
            if cursor[OPEN_DOCUMENT] < 0:
                break
            row = plan[size]
            row[DOCUMENT] = cursor[OPEN_DOCUMENT]
            row[START] = cursor[OPEN_START]
            row[WINDOW] = cursor[OPEN_WINDOW]
            row[EPOCH] = cursor[NEXT_EPOCH]
            row[POSITION] = cursor[NEXT_POSITION] - 1
            key = draw(draw(draw(np.uint64(rules.seed), row[EPOCH]), row[DOCUMENT]), row[WINDOW])
            share = draw_unit(key, 0)
            denoiser = 0
            while share >= rules.cumulative_weights[denoiser]:
                denoiser += 1
            cursor[OPEN_WINDOW] += 1
            length = 0
            while length < rules.longest[denoiser]:
                counters[DOCUMENTS] += _open_document(lengths, rules, cursor)
                document = cursor[OPEN_DOCUMENT]
                if document < 0:
                    break
                step = min(lengths[document] - cursor[OPEN_START], rules.longest[denoiser] - length)
                length += step
                cursor[OPEN_START] += step
                if cursor[OPEN_START] == lengths[document]:
                    cursor[OPEN_DOCUMENT] = -1
            if length < 2:
                counters[SHORT_TAILS] += length
                counters[SKIPPED_TOKENS] += length
                break
            row[LENGTH] = length
            row[DENOISER] = denoiser
            row[INPUT] = rules.input_lengths[denoiser, length]
            row[TARGET] = rules.target_lengths[denoiser, length]
            counters[INPUT_TOKENS] += row[INPUT]
            counters[TARGET_TOKENS] += row[TARGET]
            counters[TEXT_TOKENS] += length
            counters[NUM_COUNTERS + denoiser] += 1
            size += 1
        counters[BATCHES] += size > 0
        if size == 0:
            break
    return size


@jit
def row_pieces(
    lengths: np.ndarray,
    shuffle: bool,
    seed: int,
    epochs: np.ndarray,
    positions: np.ndarray,
    starts: np.ndarray,
    row_lengths: np.ndarray,
    pieces: np.ndarray,
) -> int:
    """List the stretches of documents that rows of `cut_rows` consist of, in order.

    Args:
        lengths: Tokens of each document.
        shuffle: As in `Rules`; likewise `seed`.
        seed: Seed of the order.
        epochs: Epoch of each row's first document.
        positions: Its place in that epoch's order.
        starts: Its first token in the row.
        row_lengths: Tokens of each row.
        pieces: Written to: document, first token and number of tokens, int64 [3, tokens of all rows].

    Returns:
        The number of stretches.
    """
    count = 0
    for row in range(len(epochs)):
        epoch = epochs[row]
        position = positions[row]
        start = starts[row]
        left = row_lengths[row]
        while left > 0:
            if position == len(lengths):
                position = 0
                epoch += 1
            document = position
            if shuffle:
                document = permute(position, len(lengths), draw(draw(np.uint64(seed), epoch), _ORDER_COUNTER))
            step = min(lengths[document] - start, left)
            if step > 0:
                pieces[0, count] = document
                pieces[1, count] = start
                pieces[2, count] = step
                count += 1
            left -= step
            start = 0
            position += 1
    return count
