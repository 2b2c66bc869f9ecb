"""Special tokens are found by their text, in FAT5's tokenizers and in those of the T5 family."""

from __future__ import annotations

import pytest

from fat5.data.special_tokens import SpecialTokens
from fat5.data.text_encoder import EncoderSettings, TextEncoder
from fat5.data.tokenizer import backend_of
from fat5.errors import DataError

from .small_tokenizer import HARD_TEXTS, SPELLED, random_texts, small_tokenizer, unigram_tokenizer


def encoder(tokenizer) -> TextEncoder:
    return TextEncoder(EncoderSettings(backend_of(tokenizer).to_str(), "uint16", 1, 0.0))


def encoded(tokenizer, text: str) -> list[int]:
    return encoder(tokenizer).encode([text])[0].tokens.tolist()


def test_fat5_tokens_are_found():
    special = SpecialTokens.from_tokenizer(small_tokenizer())
    assert (special.pad, special.eos, special.bos) == (0, 1, 3)
    assert special.prefixes == {"[R]": 4, "[S]": 5, "[X]": 6}
    assert special.sentinels == tuple(range(7, 263))


def test_descending_sentinels_of_t5_are_looked_up_by_token():
    """Pitfall: sentinels reversed, or computed from the vocabulary's size."""
    tokenizer = unigram_tokenizer([f"<extra_id_{i}>" for i in range(99, -1, -1)])
    last = len(tokenizer) - 1
    tokenizer.add_tokens(["<mot>"])
    special = SpecialTokens.from_tokenizer(tokenizer, prefixes=())
    assert special.sentinels == tuple(range(last, last - 100, -1))
    assert tokenizer.convert_ids_to_tokens(special.sentinels[0]) == "<extra_id_0>"
    assert (special.bos, special.prefixes) == (None, {})


def test_sentinels_of_mt5_carry_its_word_mark():
    tokenizer = unigram_tokenizer([f"\u2581<extra_id_{i}>" for i in range(4, -1, -1)])
    special = SpecialTokens.from_tokenizer(tokenizer, prefixes=())
    assert [tokenizer.convert_ids_to_tokens(i) for i in special.sentinels[:2]] == [
        "\u2581<extra_id_0>",
        "\u2581<extra_id_1>",
    ]


def test_what_is_missing_is_named():
    with pytest.raises(DataError, match="has no sentinel '<extra_id_0>'"):
        SpecialTokens.from_tokenizer(unigram_tokenizer([]), prefixes=())
    with pytest.raises(DataError, match=r"no denoiser prefix '\[R\]', '\[X\]'"):
        SpecialTokens.from_tokenizer(unigram_tokenizer(["<extra_id_0>"]), prefixes=("[R]", "[X]"))
    for token, name in (("pad_token", "padding"), ("eos_token", "end-of-sequence")):
        tokenizer = unigram_tokenizer(["<extra_id_0>"])
        setattr(tokenizer, token, None)
        with pytest.raises(DataError, match=f"has no {name} token"):
            SpecialTokens.from_tokenizer(tokenizer, prefixes=())


def test_pretraining_text_never_becomes_a_special_token():
    tokenizer = small_tokenizer()
    ids = encoded(tokenizer, SPELLED)
    assert min(ids) >= 263
    assert tokenizer.decode(ids) == SPELLED
    assert 1 in tokenizer(SPELLED, add_special_tokens=False).input_ids


def test_special_pieces_of_a_unigram_model_are_out_of_reach_of_text():
    tokenizer = unigram_tokenizer([f"<extra_id_{i}>" for i in range(9, -1, -1)])
    special = set(tokenizer.all_special_ids)
    text = "a</s>b <extra_id_3>c"
    assert special & set(tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids)
    ids = encoded(tokenizer, text)
    assert not special & set(ids)
    assert tokenizer.decode(ids) == text


def test_ordinary_text_gets_the_ids_of_the_tokenizer_itself():
    texts = [text for text in [*HARD_TEXTS, *random_texts(30)] if text and not text.isspace()]
    tokenizer = small_tokenizer()
    batch = encoder(tokenizer).encode(texts)[0]
    expected = tokenizer(texts, add_special_tokens=False).input_ids
    assert batch.lengths.tolist() == [len(ids) for ids in expected]
    assert batch.tokens.tolist() == [token for ids in expected for token in ids]
    t5 = unigram_tokenizer(["<extra_id_0>"])
    assert encoded(t5, "la table est la") == t5("la table est la", add_special_tokens=False).input_ids
