"""Denoising in plain Python, slow and obvious, from the same random numbers as the compiled engine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fat5.data.denoisers import Denoiser
from fat5.data.special_tokens import SpecialTokens

MASK = 2**64 - 1


def special_tokens(num_sentinels: int = 256, descending: bool = False) -> SpecialTokens:
    """FAT5's own ids, or with `descending` sentinels that fall from the vocabulary's end as T5's do."""
    first = 31_999 if descending else 7
    step = -1 if descending else 1
    sentinels = tuple(first + step * index for index in range(num_sentinels))
    return SpecialTokens(pad=0, eos=1, bos=3, prefixes={"[R]": 4, "[S]": 5, "[X]": 6}, sentinels=sentinels)


def draw(key: int, counter: int) -> int:
    bits = (key + (counter + 1) * 0x9E3779B97F4A7C15) & MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK
    return bits ^ (bits >> 31)


def window_key(seed: int, epoch: int, document: int, window: int) -> int:
    return draw(draw(draw(seed, epoch), document), window)


def choose_denoiser(denoisers: tuple[Denoiser, ...], key: int) -> int:
    share = (draw(key, 0) >> 11) / 2**53
    total = sum(denoiser.weight for denoiser in denoisers)
    reached = 0.0
    for index, denoiser in enumerate(denoisers):
        reached += denoiser.weight
        if share < reached / total:
            return index
    raise AssertionError("weights sum to their total")


def span_counts(length: int, denoiser: Denoiser, num_sentinels: int) -> tuple[int, int]:
    noise = min(max(math.floor(length * denoiser.noise_density + 0.5), 1), length - 1)
    if denoiser.mean_noise_span_length is None:
        return noise, 1
    spans = math.floor(noise / denoiser.mean_noise_span_length + 0.5)
    return noise, max(1, min(spans, noise, length - noise, num_sentinels))


def side_lengths(length: int, denoiser: Denoiser, num_sentinels: int) -> tuple[int, int]:
    noise, spans = span_counts(length, denoiser, num_sentinels)
    sentinels = spans if denoiser.use_sentinels else 0
    return (denoiser.prefix is not None) + length - noise + sentinels + 1, sentinels + noise + 1


def segments(items: int, count: int, key: int, counter: int) -> list[int]:
    sizes = [1]
    for place in range(items - 1):
        places_left, cuts_left = items - 1 - place, count - len(sizes)
        if ((draw(key, counter + place) >> 32) * places_left) >> 32 < cuts_left:
            sizes.append(1)
        else:
            sizes[-1] += 1
    return sizes


def corrupt(tokens: list[int], denoiser: Denoiser, special: SpecialTokens, key: int) -> tuple[list[int], list[int]]:
    noise, spans = span_counts(len(tokens), denoiser, len(special.sentinels))
    hidden = segments(noise, spans, key, 1)
    clean = segments(len(tokens) - noise, spans, key, noise)
    source = [] if denoiser.prefix is None else [special.prefixes[denoiser.prefix]]
    target: list[int] = []
    rest = list(tokens)
    for span in range(spans):
        marker = [special.sentinels[span]] if denoiser.use_sentinels else []
        source += rest[: clean[span]] + marker
        rest = rest[clean[span] :]
        target += marker + rest[: hidden[span]]
        rest = rest[hidden[span] :]
    return [*source, special.eos], [*target, special.eos]


def reconstruct(source: list[int], target: list[int], denoiser: Denoiser, special: SpecialTokens) -> list[int]:
    """Put the spans of `target` back where their sentinels stand in `source`."""
    assert source[-1] == special.eos
    assert target[-1] == special.eos
    source, target = source[:-1], target[:-1]
    if denoiser.prefix is not None:
        assert source[0] == special.prefixes[denoiser.prefix]
        source = source[1:]
    if not denoiser.use_sentinels:
        return source + target
    spans: dict[int, list[int]] = {}
    for token in target:
        if token in special.sentinels:
            spans[token] = []
            last = token
        else:
            spans[last].append(token)
    return [token for piece in source for token in (spans.pop(piece) if piece in spans else [piece])]


@dataclass
class Example:
    """One window of a batch as Python lists."""

    source: list[int]
    target: list[int]
    decoder_input: list[int]
    denoiser: int


def examples(batch: dict) -> list[Example]:
    """The windows of a batch of either layout, cut at the boundaries that the batch states."""
    found = []
    for slot, denoiser in enumerate(batch["denoiser_ids"].tolist()):
        if denoiser < 0:
            continue
        if "cu_seqlens" in batch:
            encoder, decoder = (
                slice(*batch[name][slot : slot + 2].tolist()) for name in ("cu_seqlens", "decoder_cu_seqlens")
            )
            sides = (batch["input_ids"][encoder], batch["labels"][decoder], batch["decoder_input_ids"][decoder])
        else:
            kept = batch["labels"][slot] != -100
            sides = (
                batch["input_ids"][slot][batch["attention_mask"][slot].bool()],
                batch["labels"][slot][kept],
                batch["decoder_input_ids"][slot][kept],
            )
        found.append(Example(*(side.tolist() for side in sides), denoiser))
    return found
