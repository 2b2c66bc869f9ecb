"""How many tokens and spans a denoiser hides, and how long the input and the target become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fat5.data.denoisers import Denoiser
from fat5.errors import ConfigError


@dataclass(frozen=True)
class SpanTable:
    """Lengths of the noised sides of a window, for each denoiser and window length.

    For a window of L >= 2 tokens, density r, mean span length mu, and S sentinels in the tokenizer,

        noise_tokens = clip(round(L * r), 1, L - 1)
        spans = clip(round(noise_tokens / mu), 1, min(noise_tokens, L - noise_tokens, S)), or 1 without mu
        input_length = prefix + (L - noise_tokens) + sentinels + 1
        target_length = sentinels + noise_tokens + 1

    where round(x) = floor(x + 0.5) in float64 (halves go up, unlike Python's), prefix is 0 or 1, sentinels is `spans`
    or 0 without them, and the last 1 is EOS. Where the sentinels run out, spans grow longer instead. Both lengths never
    fall as L grows, so each denoiser has one longest window.

    Attributes:
        denoisers: The mixture, in the order of the rows.
        noise_tokens: Hidden tokens, int32 [denoisers, L + 1]; columns 0 and 1 mean nothing.
        spans: Hidden spans, likewise.
        input_lengths: Tokens of the input, likewise.
        target_lengths: Tokens of the target, likewise.
        longest: Longest window within both limits, int64 [denoisers], at least 2.
    """

    denoisers: tuple[Denoiser, ...]
    noise_tokens: np.ndarray
    spans: np.ndarray
    input_lengths: np.ndarray
    target_lengths: np.ndarray
    longest: np.ndarray

    @classmethod
    def build(
        cls, denoisers: Sequence[Denoiser], *, max_input_length: int, max_target_length: int, num_sentinels: int
    ) -> SpanTable:
        """Compute the table up to the longest window that fits `max_input_length` and `max_target_length` tokens.

        Raises:
            ConfigError: A denoiser needs sentinels and there are none, or no window of 2 tokens fits the limits.
        """
        check_limits(denoisers, max_input_length, max_target_length)
        # Together both sides hold every token of the window, so no longer window fits.
        lengths = np.arange(max_input_length + max_target_length + 1)
        rows = []
        for denoiser in denoisers:
            if denoiser.use_sentinels and num_sentinels < 1:
                raise ConfigError(f"denoiser {denoiser.name!r} marks spans by sentinels, but the tokenizer has none")
            noise = np.clip(_round(lengths * denoiser.noise_density), 1, np.maximum(lengths - 1, 1))
            spans = np.ones_like(noise)
            if denoiser.mean_noise_span_length is not None:
                most = np.minimum(np.minimum(noise, lengths - noise), num_sentinels)
                spans = np.clip(_round(noise / denoiser.mean_noise_span_length), 1, np.maximum(most, 1))
            sentinels = spans if denoiser.use_sentinels else 0
            inputs = (denoiser.prefix is not None) + (lengths - noise) + sentinels + 1
            rows.append((noise, spans, inputs, sentinels + noise + 1))
        table = np.array(rows, dtype=np.int32).transpose(1, 0, 2)  # [4, denoisers, L + 1]
        fits = (table[2] <= max_input_length) & (table[3] <= max_target_length)
        longest = len(lengths) - 1 - np.argmax(fits[:, ::-1], axis=1)
        columns = int(longest.max()) + 1
        noise, spans, inputs, targets = (np.ascontiguousarray(side[:, :columns]) for side in table)
        return cls(tuple(denoisers), noise, spans, inputs, targets, longest)


def check_limits(denoisers: Sequence[Denoiser], max_input_length: int, max_target_length: int) -> None:
    """Raise ConfigError unless the shortest window, of 2 tokens, fits both limits under every denoiser."""
    for denoiser in denoisers:
        for side, limit, shortest in (
            ("input", max_input_length, denoiser.shortest_input),
            ("target", max_target_length, denoiser.shortest_target),
        ):
            if limit < shortest:
                raise ConfigError(
                    f"max_{side}_length = {limit} is too short for denoiser {denoiser.name!r}: one token, its prefix, "
                    f"sentinel and EOS need {shortest}"
                )


def _round(values: np.ndarray) -> np.ndarray:
    return np.floor(values + 0.5).astype(np.int64)
