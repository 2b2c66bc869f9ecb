"""Small tokenizers, and texts that are hard to keep whole."""

from __future__ import annotations

import functools
import random
from itertools import islice

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fat5.data.sample import sample_documents
from fat5.data.tokenizer_training import TokenizerConfig, train_tokenizer

HARD_TEXTS = [
    "",
    " ",
    "a",
    "  deux  espaces   et fin  ",
    "\n\n\tligne\r\n \r\n\n  fin\n",
    "L'homme qu’il a vu, aujourd'hui : « 12 345,67 € » (n° 2024).",
    "caf\u00e9 et cafe\u0301",
    "\x00\x01\x07\x1b\x7f\x85\u200b\u2028\ufeff\uffff",
    "👩‍👩‍👧 🇫🇷 日本語テキスト العربية हिन्दी ᚠ \U0010fffd",
    "١٢٣ ½ Ⅷ 七八 3²",
    "<extra_id_ 0> [ R] </ s> <pad",
]


SPELLED = "a</s>b <extra_id_0>c [R] <pad> <s><extra_id_255>"


def random_texts(count: int) -> list[str]:
    """Return texts of random code points of all planes, surrogates aside."""
    draw = random.Random(0)
    planes = (0x80, 0x250, 0x3000, 0x110000)
    texts = []
    for _ in range(count):
        points = (draw.randrange(draw.choice(planes)) for _ in range(draw.randrange(1, 60)))
        texts.append("".join(chr(point) for point in points if not 0xD800 <= point < 0xE000))
    return texts


@functools.cache
def small_tokenizer(*, add_bos: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer of 1,024 pieces. Tests that change it take `copy.deepcopy` of it."""
    config = TokenizerConfig(vocab_size=1024, add_bos=add_bos)
    return train_tokenizer(islice(sample_documents(), 200), config, show_progress=False)


def unigram_tokenizer(sentinels: list[str]) -> PreTrainedTokenizerFast:
    """Build a SentencePiece-like tokenizer whose sentinels are pieces of the model, as in T5's files."""
    letters = [("\u2581", -4.0), *((letter, -5.0) for letter in "</>_abcdeilrstux0123456789")]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *letters, *((token, 0.0) for token in sentinels)]
    backend = Tokenizer(models.Unigram(vocabulary, unk_id=2))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens=sentinels,
    )
