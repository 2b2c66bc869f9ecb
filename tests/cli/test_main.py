"""The `fat5` command: its table, its errors of one line, and its exit codes."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from fat5.cli import main as cli
from fat5.errors import DataError
from fat5.version import __version__


def test_help_lists_every_command(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert f"  {name} " in text
        assert command.help in text
    assert cli.main([]) == 0


def test_help_and_version_need_no_torch():
    command = [sys.executable, "-X", "importtime", "-m", "fat5", "--help"]
    started = time.perf_counter()
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert finished.stdout.startswith("usage: fat5")
    imported = {line.rsplit("|", 1)[-1].strip() for line in finished.stderr.splitlines()}
    assert "fat5.cli.main" in imported
    assert not imported & {"torch", "transformers", "jsonargparse"}
    # Half a second on a quiet machine; the margin is for a busy one.
    assert time.perf_counter() - started < 5


def test_module_is_the_command():
    finished = subprocess.run(
        [sys.executable, "-m", "fat5", "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (finished.returncode, finished.stdout) == (0, f"fat5 {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pretrian"], "unknown command 'pretrian'; did you mean 'pretrain'?"),
        (["--colour"], "unknown option '--colour'"),
        (["quickstart", "--overwrit"], "unrecognized arguments: --overwrit; did you mean '--overwrite'?"),
        (["doctor", "--loud"], "unrecognized arguments: --loud"),
        (["doctor", "--loud.er"], "unrecognized arguments: --loud.er; `fat5 doctor --help`"),
        (["finetune", "--training.epochs", "3"], "have no dashes: training.epochs=VALUE"),
        (["pretrain", "--data.train", "x"], "settings of a configuration have no dashes: data.train=VALUE"),
        (["export", "a", "--to", "t5"], "required: output"),
        (["pretokenize", "a.txt", "--output", "b"], "required: --tokenizer"),
        (["pretokenize", "a.txt", "--tokenizer", "b", "--output", "c"], "a.txt does not exist"),
        (["cost"], "required: --tokens"),
        (["cost", "--tokens", "1"], "expected a rate (tokens per second) or accounts"),
        (["cost", "--tokens", "1", "--prices", "a=1"], "--prices is 'a=1', expected dict[str, float] | null"),
        (["pretrain", "missing.yaml"], "there is no file missing.yaml"),
        (["pretrain", "conf.yml"], "there is no file conf.yml; did you mean 'config.yaml'?"),
        (["pretrain", "config/smal.yaml"], "there is no file config/smal.yaml; did you mean 'configs/small.yaml'?"),
        (["export", "config", "b", "--to", "t5"], "there is no folder config; did you mean 'configs'?"),
        (["pretrain", "model.d_modle=3"], "unknown setting model.d_modle; did you mean model.d_model?"),
        (["pretrain"], "missing settings: training.output_dir"),
    ],
)
def test_a_user_error_is_one_line_and_exit_code_2(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    for name in ("config.yaml", "configs/small.yaml"):
        (tmp_path / name).touch()
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("fat5: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (DataError("the text\nis odd"), 2, "the text is odd"),
        (FileExistsError("runs/a already exists"), 2, "runs/a already exists"),
        (PermissionError(13, "Permission denied", "/srv/x"), 2, "/srv/x: Permission denied"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_of_a_command_end_as_one_line(error, code, message, capsys, monkeypatch):
    def fail(_: object) -> int:
        raise error

    command = SimpleNamespace(add_arguments=lambda parser: None, run=fail)
    monkeypatch.setattr(importlib, "import_module", lambda name: command)
    assert cli.main(["doctor"]) == code
    assert capsys.readouterr().err == f"fat5: error: {message}\n"


def test_a_fault_of_the_program_keeps_its_traceback(monkeypatch):
    command = SimpleNamespace(add_arguments=lambda parser: None, run=lambda args: {}["bug"])
    monkeypatch.setattr(importlib, "import_module", lambda name: command)
    with pytest.raises(KeyError):
        cli.main(["doctor"])


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: fat5 {name}")
    assert "--help" in text
