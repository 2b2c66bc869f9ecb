"""Random documents in memory, with the lengths that real ones have."""

from __future__ import annotations

import numpy as np

from fat5.data.special_tokens import NUM_SENTINELS, SpecialTokens

MEDIAN_LENGTH, SIGMA, SEED = 400, 1.0, 0
VOCAB_SIZE = 32_768
_PREFIXES = ("[R]", "[S]", "[X]")
_FIRST_TEXT_ID = 4 + len(_PREFIXES) + NUM_SENTINELS
_LARGEST_BUFFER = 2**26  # tokens; longer corpora reuse them, at other places


class RandomDocuments:
    """Documents of random tokens whose lengths are log-normal; a `fat5.data.window_tokens.TokenSource`.

    Args:
        num_documents: How many.
        median_length: Median of their lengths, in tokens.
        sigma: Standard deviation of the logarithm of the lengths.
        seed: Seed of lengths and tokens.
    """

    def __init__(
        self, num_documents: int, *, median_length: int = MEDIAN_LENGTH, sigma: float = SIGMA, seed: int = SEED
    ) -> None:
        generator = np.random.default_rng(seed)
        lengths = np.exp(generator.normal(np.log(median_length), sigma, num_documents)).astype(np.int64)
        ends = np.cumsum(lengths)
        size = int(min(ends[-1], max(_LARGEST_BUFFER, 2 * lengths.max())))
        places = (ends - lengths) % (size - lengths.max() + 1)
        self.lengths = lengths
        self._tokens = generator.integers(_FIRST_TEXT_ID, VOCAB_SIZE, size, dtype=np.uint16)
        self._offsets = np.append(places, places[-1] + lengths[-1]).astype(np.int32)

    def flat_shards(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return one shard: token ids, and the first token of each document."""
        return [(self._tokens, self._offsets)]

    def tokens(self, document: int) -> np.ndarray:
        """Return the tokens of one document."""
        first = int(self._offsets[document])
        return self._tokens[first : first + int(self.lengths[document])]


def special_tokens() -> SpecialTokens:
    """Return the ids of FAT5's own tokenizer."""
    prefixes = {prefix: 4 + place for place, prefix in enumerate(_PREFIXES)}
    sentinels = tuple(range(_FIRST_TEXT_ID - NUM_SENTINELS, _FIRST_TEXT_ID))
    return SpecialTokens(pad=0, eos=1, bos=3, prefixes=prefixes, sentinels=sentinels)
