"""Training, encoding, saving and loading of tokenizers."""

from __future__ import annotations

import copy
import errno
import socket
from itertools import islice

import pytest
from transformers import AutoTokenizer

from fat5.data.sample import sample_documents
from fat5.data.special_tokens import SpecialTokens, special_token_texts
from fat5.data.tokenizer import load_tokenizer, save_tokenizer, tokenizer_fingerprint
from fat5.data.tokenizer_training import TokenizerConfig, train_tokenizer
from fat5.errors import ConfigError, DataError

from .small_tokenizer import HARD_TEXTS, random_texts, small_tokenizer

EOS, BOS = 1, 3


def plain_ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids


def test_special_tokens_come_first_in_their_order_and_the_vocabulary_has_the_size_asked_for():
    tokenizer = small_tokenizer()
    assert len(tokenizer) == 1024
    assert tokenizer.convert_ids_to_tokens(range(263)) == special_token_texts()
    assert special_token_texts()[:8] == ["<pad>", "</s>", "<unk>", "<s>", "[R]", "[S]", "[X]", "<extra_id_0>"]
    assert special_token_texts()[-1] == "<extra_id_255>"
    assert sorted(tokenizer.all_special_ids) == list(range(263))


@pytest.mark.parametrize("text", [*HARD_TEXTS, *random_texts(20)])
def test_any_text_comes_back_unchanged(text):
    tokenizer = small_tokenizer()
    assert tokenizer.decode(plain_ids(tokenizer, text)) == text


def test_composed_and_decomposed_letters_are_kept_apart():
    tokenizer = small_tokenizer()
    assert plain_ids(tokenizer, "\u00e9") != plain_ids(tokenizer, "e\u0301")


def test_digits_are_pieces_of_their_own():
    tokens = small_tokenizer().tokenize("le 12 juillet 2024 et 1000")
    digits = [token for token in tokens if any(letter.isdigit() for letter in token)]
    assert digits == list("1220241000")


def test_elisions_end_at_the_apostrophe():
    tokenizer = small_tokenizer()
    alone = plain_ids(tokenizer, "employeur")
    assert plain_ids(tokenizer, "l'employeur")[-len(alone) :] == alone


def test_eos_is_added_exactly_once_and_bos_on_request():
    """Pitfall: no EOS or BOS without a post-processor."""
    plain, with_bos = small_tokenizer(), small_tokenizer(add_bos=True)
    for text in ("Bonjour le monde.", ""):
        ids = plain_ids(plain, text)
        assert EOS not in ids
        assert plain(text).input_ids == [*ids, EOS]
        assert with_bos(text).input_ids == [BOS, *ids, EOS]
    first, second = plain_ids(plain, "un"), plain_ids(plain, "deux")
    assert plain("un", "deux").input_ids == [*first, EOS, *second, EOS]
    assert with_bos("un", "deux").input_ids == [BOS, *first, EOS, *second, EOS]
    assert set(plain("un", "deux")) == {"input_ids", "attention_mask"}


def test_long_text_is_not_truncated():
    tokenizer = small_tokenizer()
    assert len(tokenizer("1" * 5000, truncation=True).input_ids) == 5001


def test_sentinels_and_prefixes_are_atomic_and_leave_no_stray_space():
    """Pitfall: sentinels split into pieces, or followed by a space in decoding."""
    tokenizer = small_tokenizer()
    special = SpecialTokens.from_tokenizer(tokenizer)
    text = "[R]Le<extra_id_0>travail <extra_id_1> dure<extra_id_255>."
    ids = tokenizer(text).input_ids
    assert ids[0] == special.prefixes["[R]"]
    assert [i for i in ids if i in special.sentinels] == [
        special.sentinels[0],
        special.sentinels[1],
        special.sentinels[255],
    ]
    assert tokenizer.decode(ids) == text + "</s>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Letravail  dure."


def test_save_and_load_give_an_equal_tokenizer(tmp_path):
    """Pitfall: special tokens or the post-processor lost by saving."""
    for add_bos in (False, True):
        tokenizer = small_tokenizer(add_bos=add_bos)
        first, second = tmp_path / f"first{add_bos}", tmp_path / f"second{add_bos}"
        save_tokenizer(tokenizer, first)
        loaded = AutoTokenizer.from_pretrained(first)
        save_tokenizer(loaded, second)
        again = load_tokenizer(second)
        for other in (loaded, again):
            texts = [*HARD_TEXTS, "a<extra_id_7>b [S]", *islice(sample_documents(), 20)]
            assert other(texts).input_ids == tokenizer(texts).input_ids
            assert other.get_vocab() == tokenizer.get_vocab()
            assert other.all_special_tokens == tokenizer.all_special_tokens
            assert (other.pad_token_id, other.eos_token_id, other.unk_token_id, other.bos_token_id) == (0, 1, 2, 3)
            assert other.model_max_length == tokenizer.model_max_length
            assert tokenizer_fingerprint(other) == tokenizer_fingerprint(tokenizer)
            decoded = other.batch_decode(other(texts).input_ids, skip_special_tokens=True)
            assert decoded == tokenizer.batch_decode(tokenizer(texts).input_ids, skip_special_tokens=True)


def test_tokens_added_later_keep_the_sentinels(tmp_path):
    """Pitfall: adding a token drops the sentinels."""
    tokenizer = copy.deepcopy(small_tokenizer())
    before = SpecialTokens.from_tokenizer(tokenizer)
    tokenizer.add_tokens(["<mot>"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<role>"]})
    save_tokenizer(tokenizer, tmp_path / "added")
    for candidate in (tokenizer, load_tokenizer(tmp_path / "added")):
        assert len(candidate) == 1026
        assert SpecialTokens.from_tokenizer(candidate) == before
        ids = candidate("a<extra_id_0><mot><role>b").input_ids
        assert ids[1:4] == [before.sentinels[0], 1024, 1025]
        assert ids.count(EOS) == 1
        assert candidate.decode(ids, skip_special_tokens=True) == "a<mot>b"


def test_training_twice_gives_the_same_tokenizer():
    documents = list(islice(sample_documents(), 100))
    config = TokenizerConfig(vocab_size=768)
    first, second = (train_tokenizer(documents, config, show_progress=False) for _ in range(2))
    assert tokenizer_fingerprint(first) == tokenizer_fingerprint(second)


def test_fingerprint_tells_tokenizers_apart_but_ignores_padding_and_truncation():
    tokenizer = copy.deepcopy(small_tokenizer())
    fingerprint = tokenizer_fingerprint(tokenizer)
    tokenizer(["un", "deux trois"], padding=True, truncation=True, max_length=4)
    assert tokenizer_fingerprint(tokenizer) == fingerprint
    other_text = train_tokenizer(
        islice(sample_documents(), 300, 500), TokenizerConfig(vocab_size=1024), show_progress=False
    )
    tokenizer.add_tokens(["<mot>"])
    others = [tokenizer, other_text, small_tokenizer(add_bos=True)]
    assert len({fingerprint, *map(tokenizer_fingerprint, others)}) == 4


@pytest.mark.parametrize(("size", "nearest"), [(4000, "3968 and 4032"), (1, "576"), (577, "576 and 640")])
def test_a_vocabulary_size_that_does_not_fit_names_the_nearest(size, nearest):
    with pytest.raises(ConfigError, match=f"got {size}; nearest: {nearest}"):
        TokenizerConfig(vocab_size=size)


def test_too_little_text_says_how_many_merges_it_holds_and_what_fits():
    documents = list(islice(sample_documents(), 3))
    with pytest.raises(
        DataError, match=r"holds only (\d+) merges .* of the 32768 asked for; .*vocab_size (\d+)"
    ) as caught:
        train_tokenizer(documents, show_progress=False)
    fitting = int(str(caught.value).rsplit(" ", 1)[1])
    assert len(train_tokenizer(documents, TokenizerConfig(vocab_size=fitting), show_progress=False)) == fitting


def test_an_error_of_the_text_source_ends_training():
    def documents():
        yield "un texte"
        raise DataError("file x is damaged")

    with pytest.raises(DataError, match="file x is damaged"):
        train_tokenizer(documents(), show_progress=False)


def test_saving_keeps_what_is_there_and_overwrites_only_a_tokenizer(tmp_path):
    folder = tmp_path / "model"
    save_tokenizer(small_tokenizer(), folder)
    with pytest.raises(FileExistsError, match="--overwrite"):
        save_tokenizer(small_tokenizer(), folder)
    save_tokenizer(small_tokenizer(add_bos=True), folder, overwrite=True)
    assert load_tokenizer(folder)("x").input_ids[0] == BOS
    (folder / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(FileExistsError, match=r"model\.safetensors"):
        save_tokenizer(small_tokenizer(), folder, overwrite=True)
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    "failure", [OSError(errno.ENOSPC, "No space left on device"), Exception("No space left on device (os error 28)")]
)
def test_a_full_disk_leaves_nothing_and_keeps_the_old_tokenizer(tmp_path, monkeypatch, failure):
    tokenizer = copy.deepcopy(small_tokenizer())
    save_tokenizer(tokenizer, tmp_path / "old")
    before = tokenizer_fingerprint(load_tokenizer(tmp_path / "old"))

    def half_written(folder):
        folder.mkdir(exist_ok=True)
        (folder / "tokenizer.json").write_text("{")
        raise failure

    monkeypatch.setattr(tokenizer, "save_pretrained", half_written)
    for name in ("old", "new"):
        with pytest.raises(OSError, match=f"nothing was kept of .*{name}.*No space left"):
            save_tokenizer(tokenizer, tmp_path / name, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert tokenizer_fingerprint(load_tokenizer(tmp_path / "old")) == before


def test_loading_names_what_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"no tokenizer_config\.json"):
        load_tokenizer(tmp_path)
    save_tokenizer(small_tokenizer(), tmp_path / "cut")
    whole = (tmp_path / "cut" / "tokenizer.json").read_text()
    (tmp_path / "cut" / "tokenizer.json").write_text(whole[:5000])
    with pytest.raises(DataError, match=r"the tokenizer in .*cut could not be loaded"):
        load_tokenizer(tmp_path / "cut")


def test_a_typo_without_a_network_is_an_error_at_once(tmp_path, monkeypatch):
    """No host means no waiting for the hub, but a tokenizer in its cache; a proxy may know the host."""
    asked = []

    def unreachable(*_):
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    def from_pretrained(name, *, local_files_only):
        asked.append(local_files_only)
        raise OSError("couldn't connect")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokens").mkdir()
    monkeypatch.setattr("socket.getaddrinfo", unreachable)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_pretrained)
    monkeypatch.setattr("fat5.data.hub.getproxies", dict)
    near = (
        r"there is no folder tokenz; did you mean 'tokens'\? No tokenizer of that name on the hub .*: couldn't connect"
    )
    with pytest.raises(DataError, match=near):
        load_tokenizer("tokenz")
    monkeypatch.setattr("fat5.data.hub.getproxies", lambda: {"https": "proxy:3128"})
    with pytest.raises(DataError, match="couldn't connect"):
        load_tokenizer("tokenz")
    assert asked == [True, False]
