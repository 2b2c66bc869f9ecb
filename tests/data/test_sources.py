"""Reading documents: formats, units, caps, and one clear error for each kind of damage."""

from __future__ import annotations

import gzip
import json

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fat5.data.sample import sample_documents
from fat5.data.sources import TextSource, expected_bytes, parse_bytes, read_documents
from fat5.errors import ConfigError, DataError

DOCUMENTS = ["Première ligne\nseconde ligne", "Deuxième document", "  troisième : «été»"]


def read(*paths, **settings) -> list[str]:
    return list(read_documents(TextSource([str(path) for path in paths], **settings)))


def write_text(path, text=None):
    path.write_text("\n\n".join(DOCUMENTS) + "\n" if text is None else text, encoding="utf-8")
    return path


def write_parquet(path, column="text", documents=DOCUMENTS):
    pq.write_table(pa.table({"id": range(len(documents)), column: documents}), path)
    return path


def write_jsonl(path, rows=None):
    rows = [{"id": i, "text": text} for i, text in enumerate(DOCUMENTS)] if rows is None else rows
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return path


def compressed(path, method):
    target = path.with_name(path.name + {"gzip": ".gz", "zstd": ".zst"}[method])
    with pa.output_stream(target, compression=method) as stream:
        stream.write(path.read_bytes())
    path.unlink()
    return target


def test_all_formats_give_the_same_documents(tmp_path):
    files = [
        write_text(tmp_path / "a.txt"),
        compressed(write_text(tmp_path / "b.txt"), "gzip"),
        compressed(write_text(tmp_path / "c.txt"), "zstd"),
        write_jsonl(tmp_path / "d.jsonl"),
        compressed(write_jsonl(tmp_path / "e.jsonl"), "gzip"),
        compressed(write_jsonl(tmp_path / "f.jsonl"), "zstd"),
        write_parquet(tmp_path / "g.parquet"),
    ]
    for file in files:
        assert read(file) == DOCUMENTS, file.name
    (tmp_path / "notes.md").write_text("not text to train on")
    (tmp_path / ".unfinished").mkdir()
    write_text(tmp_path / ".unfinished" / "a.txt")
    assert read(tmp_path) == DOCUMENTS * len(files)
    assert read(tmp_path / "*.jsonl*", files[0]) == DOCUMENTS * 4


def test_units_of_plain_text(tmp_path):
    text = "\ufeffun\r\ndeux\r\n \r\n\r\ntrois\r\n"
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    assert read(path) == ["un\ndeux", "trois"]
    assert read(path, documents="line") == ["un", "deux", " ", "", "trois"]
    assert read(path, documents="file") == [text.removeprefix("\ufeff")]


def test_only_line_feeds_end_a_line(tmp_path):
    path = write_text(tmp_path / "a.txt", "un\u2028deux\x0ctrois\n\nquatre")
    assert read(path) == ["un\u2028deux\x0ctrois", "quatre"]


def test_the_sample_has_its_1718_documents():
    documents = read("fat5:sample")
    assert len(documents) == 1718
    assert documents == list(sample_documents())
    assert sum(len(document.encode()) for document in documents) > 1_490_000


def test_a_cap_ends_after_the_document_that_reaches_it(tmp_path):
    path = write_text(tmp_path / "a.txt")
    first = len(DOCUMENTS[0].encode())
    assert read(path, max_bytes=first) == DOCUMENTS[:1]
    assert read(path, max_bytes=first + 1) == DOCUMENTS[:2]
    assert read(path, max_bytes="1GB") == DOCUMENTS


def test_sizes_and_their_units():
    assert [parse_bytes(size) for size in (7, "7", "1.5kB", "500MB", "2 GiB", "1e6")] == [
        7,
        7,
        1500,
        500 * 10**6,
        2 * 2**30,
        10**6,
    ]
    for wrong in ("5XB", "MB", "-1", 0, "0.1"):
        with pytest.raises(ConfigError, match="expected a size such as 500MB"):
            TextSource(["a.txt"], max_bytes=wrong)


def test_the_expected_size_is_known_without_reading(tmp_path):
    text, table = write_text(tmp_path / "a.txt"), write_parquet(tmp_path / "b.parquet", documents=DOCUMENTS * 50)
    size = sum(len(document.encode()) for document in DOCUMENTS)
    assert expected_bytes(TextSource([str(text)])) == text.stat().st_size
    assert expected_bytes(TextSource([str(text)], max_bytes=10)) == 10
    assert 0 < expected_bytes(TextSource([str(table)])) <= 60 * size
    packed = compressed(text, "gzip")
    assert expected_bytes(TextSource([str(packed)])) is None
    assert expected_bytes(TextSource([str(packed)], max_bytes=10)) == 10


def test_null_text_is_empty_and_lone_surrogates_are_replaced(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": null}\n{"text": "a\\ud800b \\ud83d\\ude00"}\n\n{"text": ""}\n')
    assert read(path) == ["", "a\ufffdb 😀", ""]


def test_missing_files_name_the_nearest(tmp_path):
    write_text(tmp_path / "corpus.txt")
    with pytest.raises(FileNotFoundError, match=r"corpsu\.txt does not exist; did you mean '.*/corpus\.txt'"):
        read(tmp_path / "corpsu.txt")
    with pytest.raises(FileNotFoundError, match=rf"did you mean '{tmp_path}/corpus\.txt'"):
        read(tmp_path.with_name(f"{tmp_path.name}x") / "corpus.tx")
    with pytest.raises(FileNotFoundError, match="no file matches"):
        read(tmp_path / "*.jsonl")


def test_folders_and_files_of_unknown_kinds_name_the_known_ones(tmp_path):
    (tmp_path / "a.csv").write_text("text\nun\n")
    with pytest.raises(DataError, match=r"no file of a known kind: expected \.txt, \.jsonl or \.parquet"):
        read(tmp_path)
    with pytest.raises(DataError, match=r"a\.csv is of an unknown kind"):
        read(tmp_path / "a.csv")


@pytest.mark.parametrize("content", ["", "\n \n\n"])
def test_an_empty_file_is_an_error(tmp_path, content):
    write_text(tmp_path / "a.txt")
    write_text(tmp_path / "b.txt", content)
    with pytest.raises(DataError, match=r"b\.txt holds no document"):
        read(tmp_path)


@pytest.mark.parametrize("compress", [False, True])
def test_text_that_is_not_utf8_names_the_byte(tmp_path, compress):
    content = "première\n".encode() + "été".encode("latin-1") + b"\n"
    path = tmp_path / ("a.txt.gz" if compress else "a.txt")
    path.write_bytes(gzip.compress(content) if compress else content)
    with pytest.raises(DataError, match=r"a\.txt.* is not UTF-8: byte 0xe9 at offset 10.*iconv -f ISO-8859-1"):
        read(path)


def test_utf16_is_recognised(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("été".encode("utf-16"))
    with pytest.raises(DataError, match="byte 0xff at offset 0; if it is UTF-16"):
        read(path)


@pytest.mark.parametrize("method", ["gzip", "zstd"])
def test_truncated_compression_is_an_error(tmp_path, method):
    path = compressed(write_text(tmp_path / "a.txt", "\n\n".join(map(str, range(10_000)))), method)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(DataError, match=f"no complete {method} file"):
        read(path)


def test_text_that_is_no_gzip_is_an_error(tmp_path):
    path = write_text(tmp_path / "a.txt.gz")
    with pytest.raises(DataError, match="no complete gzip file"):
        read(path)


def test_truncated_or_damaged_parquet_is_an_error(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", documents=[f"document {i}" for i in range(2000)])
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"a\.parquet is no complete Parquet file"):
        read(path)
    a, b = len(whole) // 2, 3 * len(whole) // 4  # inside the text column, which follows the ids
    path.write_bytes(whole[:a] + bytes(b - a) + whole[b:])
    with pytest.raises(DataError, match=r"a\.parquet is damaged near row"):
        read(path)


def test_parquet_text_that_is_not_utf8_is_an_error(tmp_path):
    offsets = np.array([0, 3, 6], dtype=np.int32)
    column = pa.StringArray.from_buffers(2, pa.py_buffer(offsets), pa.py_buffer(b"bon\xe9t\xe9"))
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="text that is not UTF-8"):
        read(tmp_path / "a.parquet")


def test_a_missing_column_names_those_present(tmp_path):
    with pytest.raises(DataError, match=r"no column 'text'; columns: id, texte; did you mean 'texte'"):
        read(write_parquet(tmp_path / "a.parquet", column="texte"))
    with pytest.raises(DataError, match=r"b\.jsonl, line 2: no column 'text'; columns: content"):
        read(write_jsonl(tmp_path / "b.jsonl", [{"text": "un"}, {"content": "deux"}]))
    assert read(tmp_path / "a.parquet", text_column="texte") == DOCUMENTS


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ', "line 2: no JSON object"),
        ("[1]", "expected a JSON object, got list"),
        ('{"text": 3}', "holds int"),
    ],
)
def test_damaged_json_lines_name_the_line(tmp_path, line, message):
    path = write_text(tmp_path / "a.jsonl", f'{{"text": "un"}}\n{line}\n')
    with pytest.raises(DataError, match=message):
        read(path)


def test_settings_that_contradict_the_source_are_errors(tmp_path):
    path = write_text(tmp_path / "a.txt")
    for settings in ({"name": "fr"}, {"split": "train"}):
        with pytest.raises(ConfigError, match=f"{next(iter(settings))} applies to"):
            read(path, **settings)
    with pytest.raises(ConfigError, match="did you mean 'paragraph'"):
        TextSource([str(path)], documents="paragraphs")
    with pytest.raises(ConfigError, match="must be a list"):
        TextSource(str(path))


def test_a_folder_of_datasets_is_read_by_split(tmp_path):
    def make(texts):
        return datasets.Dataset.from_dict({"id": list(range(len(texts))), "text": texts})

    make(DOCUMENTS).save_to_disk(tmp_path / "one")
    assert read(tmp_path / "one") == DOCUMENTS
    with pytest.raises(ConfigError, match="has no splits"):
        read(tmp_path / "one", split="train")
    datasets.DatasetDict({"train": make(DOCUMENTS), "test": make(["fin"])}).save_to_disk(tmp_path / "two")
    assert read(tmp_path / "two") == DOCUMENTS
    assert read(tmp_path / "two", split="test") == ["fin"]
    with pytest.raises(DataError, match="no split 'tests'; splits: train, test; did you mean 'test'"):
        read(tmp_path / "two", split="tests")
    with pytest.raises(DataError, match="no column 'texte'; columns: id, text"):
        read(tmp_path / "one", text_column="texte")
