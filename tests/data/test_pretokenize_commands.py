"""`fat5 train-tokenizer` and `fat5 pretokenize` from the command line."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from fat5.cli.main import main
from fat5.data.token_dataset import TokenDataset
from fat5.data.tokenizer import load_tokenizer, save_tokenizer

from .small_tokenizer import small_tokenizer


def test_text_to_token_files(tmp_path, capsys):
    tokenizer, tokens = str(tmp_path / "tok"), str(tmp_path / "tokens")
    text = ["fat5:sample", "--max-bytes", "200kB"]
    assert main(["train-tokenizer", *text, "--vocab-size", "1024", "--add-bos", "--output", tokenizer]) == 0
    assert load_tokenizer(tokenizer)("").input_ids == [3, 1]
    assert "1,024 pieces" in capsys.readouterr().out
    command = ["pretokenize", *text, "--tokenizer", tokenizer, "--output", tokens, "--min-tokens", "200"]
    assert main([*command, "--validation-fraction", "0.2"]) == 0
    train, validation = (TokenDataset(tmp_path / "tokens" / split) for split in ("train", "validation"))
    train.check_tokenizer(load_tokenizer(tokenizer))
    assert train.lengths.min() >= 200
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{tokens}/train: {len(train)} documents, {train.manifest.tokens:,} tokens (uint16)")
    assert lines[0].endswith(f"skipped: {train.manifest.skipped['fewer than min_tokens']} fewer than min_tokens")
    assert f"{len(validation)} documents" in lines[1]
    assert main([*command, "--overwrite"]) == 0
    assert len(TokenDataset(tokens)) == len(train) + len(validation)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train-tokenizer", "fat5:sample", "--vocab-size", "4000"], "nearest: 3968 and 4032"),
        (["train-tokenizer", "fat5:sample"], "holds only"),
        (["train-tokenizer", "fat5:sample", "--vocab_size", "4096"], "did you mean '--vocab-size'"),
        (["train-tokenizer", "fat5:sample", "--max-bytes", "5XB"], "expected a size such as 500MB"),
        (["train-tokenizer", "fat5:sample", "--vocab-size", "big"], "--vocab-size is 'big', expected int"),
        (["train-tokenizer"], "required: source"),
        (["pretokenize", "nowhere.txt"], "nowhere.txt does not exist"),
        (
            ["pretokenize", "fat5:sample", "--documents", "row"],
            "--documents is 'row', expected paragraph | line | file",
        ),
        (["pretokenize", "fat5:sample", "--min-tokens", "100000"], "no document is left of 1,718 read"),
        (["pretokenize", "fat5:sample", "--num-proc", "0"], "num_proc must be at least 1"),
    ],
)
def test_user_errors_are_one_line_and_leave_nothing(tmp_path, capfd, arguments, message):
    save_tokenizer(small_tokenizer(), tmp_path / "tok")
    tokenizer = ["--tokenizer", str(tmp_path / "tok")] if arguments[0] == "pretokenize" else []
    assert main([*arguments, *tokenizer, "--output", str(tmp_path / "out")]) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.startswith("fat5: error: ")
    assert message in error
    assert [path.name for path in tmp_path.iterdir()] == ["tok"]


@pytest.mark.parametrize("command", ["train-tokenizer", "pretokenize"])
def test_help_describes_every_option(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "500MB" in text
    assert {"train-tokenizer": "a multiple of 64", "pretokenize": "chosen by a hash of their text"}[command] in text


@pytest.mark.slow
def test_a_kill_leaves_no_process_and_nothing_to_trust(tmp_path):
    save_tokenizer(small_tokenizer(), tmp_path / "tok")
    (tmp_path / "a.txt").write_text(("le travail de nuit " * 50 + "\n\n") * 100_000)
    command = ["pretokenize", "a.txt", "--tokenizer", "tok", "--output", "out", "--num-proc", "2"]
    program = f"import sys; sys.argv[0] = 'fat5'; from fat5.cli.main import main; main({command!r})"
    process = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stderr=subprocess.DEVNULL)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_until(
        lambda: (
            list(tmp_path.glob(".out.unfinished/tokenizer/tokenizer.json")) and len(children.read_text().split()) > 2
        )
    )
    workers = [Path("/proc") / pid for pid in children.read_text().split()]
    process.kill()
    process.wait()
    wait_until(lambda: not any(worker.exists() for worker in workers))
    assert not (tmp_path / "out").exists()


def wait_until(condition, timeout: float = 60.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)
