"""Token files as training reads them, and what is refused."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pyarrow as pa
import pytest

from fat5.data.manifest import Manifest
from fat5.data.pretokenize import PretokenizeConfig, pretokenize
from fat5.data.token_dataset import TokenDataset, token_dtype
from fat5.errors import DataError

from .small_tokenizer import small_tokenizer

DOCUMENTS = [f"Article {i}. Le travail de l'employeur numéro {i * i}." * (1 + i % 7) for i in range(60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens") / "data"
    pretokenize(DOCUMENTS, small_tokenizer(), path, PretokenizeConfig(), show_progress=False)
    return path


@pytest.fixture
def own_folder(tmp_path):
    path = tmp_path / "data"
    pretokenize(DOCUMENTS, small_tokenizer(), path, PretokenizeConfig(), show_progress=False)
    return path


def edit_manifest(folder, **changes):
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_documents_come_back_as_they_were_encoded(folder):
    dataset = TokenDataset(folder)
    expected = small_tokenizer()(DOCUMENTS, add_special_tokens=False).input_ids
    assert len(dataset) == len(DOCUMENTS)
    assert [dataset.tokens(i).tolist() for i in range(len(dataset))] == expected
    assert dataset.lengths.dtype == np.int64
    assert dataset.lengths.tolist() == [len(ids) for ids in expected]
    for index in (-1, len(dataset)):
        with pytest.raises(IndexError, match=f"document {index} of a data set of 60"):
            dataset.tokens(index)


def test_flat_shards_hold_the_same_tokens_without_a_copy(folder):
    dataset = TokenDataset(folder)
    ((flat, offsets),) = dataset.flat_shards()
    assert (flat.dtype, offsets.dtype) == (np.uint16, np.int32)
    assert np.array_equal(np.diff(offsets), dataset.lengths)
    assert dataset.tokens(5).tolist() == flat[offsets[5] : offsets[6]].tolist()
    assert np.shares_memory(dataset.tokens(5), flat)
    assert not flat.flags.writeable


def test_files_open_as_plain_arrow(folder):
    with pa.memory_map(str(folder / "tokens-00000.arrow")) as mapped:
        table = pa.ipc.open_file(mapped).read_all()
    assert table.schema.names == ["input_ids"]
    assert table.schema.field("input_ids").type == pa.list_(pa.uint16())
    assert table.num_rows == len(DOCUMENTS)


def test_a_data_set_travels_to_a_process_as_its_path(folder):
    dataset = TokenDataset(folder)
    packed = pickle.dumps(dataset)
    assert len(packed) < 500
    assert pickle.loads(packed).tokens(7).tolist() == dataset.tokens(7).tolist()


def test_only_the_tokenizer_of_the_data_passes(folder):
    dataset = TokenDataset(folder)
    dataset.check_tokenizer(small_tokenizer())
    other = copy.deepcopy(small_tokenizer())
    other.add_tokens(["<mot>"])
    with pytest.raises(
        DataError, match=r"made with another tokenizer: .*1024 ids.*got .*1025 ids.*run `fat5 pretokenize`"
    ):
        dataset.check_tokenizer(other)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, np.uint16), (65_537, np.uint32)])
def test_the_smallest_type_that_fits(vocab_size, dtype):
    assert token_dtype(vocab_size) == dtype
    highest = vocab_size - 1
    dataset = TokenDataset.from_lists([[0, highest], [], [5]], vocab_size=vocab_size)
    assert dataset.tokens(0).tolist() == [0, highest]
    assert dataset.tokens(0).dtype == dtype
    assert dataset.lengths.tolist() == [2, 0, 1]
    again = pickle.loads(pickle.dumps(dataset))
    assert again.tokens(2).tolist() == [5]


def test_data_in_memory_refuses_ids_out_of_range_and_small_tokenizers():
    for wrong in ([-1], [10]):
        with pytest.raises(DataError, match=r"token ids must be in 0\.\.9"):
            TokenDataset.from_lists([[1], wrong], vocab_size=10)
    assert len(TokenDataset.from_lists([], vocab_size=10)) == 0
    TokenDataset.from_lists([[1]], vocab_size=1024).check_tokenizer(small_tokenizer())
    with pytest.raises(DataError, match="2000 ids, the tokenizer 1024"):
        TokenDataset.from_lists([[1]], vocab_size=2000).check_tokenizer(small_tokenizer())


def test_a_missing_folder_or_manifest_is_told_apart(own_folder):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        TokenDataset(own_folder / "nowhere")
    (own_folder / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"no manifest\.json: .* pretokenisation did not finish"):
        TokenDataset(own_folder)


def test_the_parent_of_splits_names_them(tmp_path):
    config = PretokenizeConfig(validation_fraction=0.3)
    pretokenize(DOCUMENTS, small_tokenizer(), tmp_path / "data", config, show_progress=False)
    with pytest.raises(DataError, match="holds the splits train, validation: name one"):
        TokenDataset(tmp_path / "data")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 99}, "format version 99, this fat5 reads 1"),
        ({"format": "other"}, "not the manifest of token files"),
        ({"dtype": "uint32"}, "of uint32, the file has 60 and .* of uint16"),
        ({"shards": [{"file": "tokens-00000.arrow"}]}, "is damaged: field"),
        ({"shards": [{"file": "tokens-00000.arrow", "documents": 61, "tokens": 1}]}, "says 61 documents and 1 tokens"),
        ({"shards": [{"file": "tokens-00001.arrow", "documents": 60, "tokens": 1}]}, "tokens-00001.arrow is missing"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(own_folder, changes, message):
    edit_manifest(own_folder, **changes)
    with pytest.raises(DataError, match=message):
        TokenDataset(own_folder)


def test_a_manifest_cut_short_is_refused(own_folder):
    path = own_folder / "manifest.json"
    path.write_text(path.read_text()[:100])
    with pytest.raises(DataError, match=r"manifest\.json is damaged"):
        TokenDataset(own_folder)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_truncated_file_is_refused(own_folder, share):
    path = own_folder / "tokens-00000.arrow"
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(DataError, match=r"tokens-00000\.arrow cannot be read, it is truncated or damaged"):
        TokenDataset(own_folder)


def test_the_manifest_reads_back_as_it_was_written(folder, tmp_path):
    manifest = Manifest.read(folder)
    manifest.write(tmp_path)
    assert Manifest.read(tmp_path) == manifest
