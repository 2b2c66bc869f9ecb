"""The nearest path that an error names, whatever was asked for."""

from __future__ import annotations

import pytest

from fat5.errors import nearest_path


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("corpsu/trian/texts.txt", "corpus/train/texts.txt"),
        ("corpus/train/texst.txt", "corpus/train/texts.txt"),
        ("corpus/train/texts.txt/inner", None),
        ("elsewhere/texts.txt", None),
        ("x" * 300, None),
        ("x" * 300 + "/texts.txt", None),
        ("co\0rpus/texts.txt", None),
        ("", None),
    ],
)
def test_nearest_path(tmp_path, monkeypatch, name, meant):
    (tmp_path / "corpus/train").mkdir(parents=True)
    (tmp_path / "corpus/train/texts.txt").touch()
    monkeypatch.chdir(tmp_path)
    assert nearest_path(name) == ("" if meant is None else f"; did you mean {meant!r}?")
