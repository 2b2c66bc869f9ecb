"""The completion script of `fat5 --print-completion`, in a real shell."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from fat5.cli import main as cli

pytest.importorskip("shtab")


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    capture = subprocess.run(
        [sys.executable, "-m", "fat5", "--print-completion", "bash"], capture_output=True, text=True, check=True
    )
    path = tmp_path_factory.mktemp("completion") / "fat5.bash"
    path.write_text(capture.stdout)
    return path


def complete(script, *words: str) -> set[str]:
    """Return what bash would offer for the last of the words."""
    code = (
        f'source "{script}"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); '
        'COMPREPLY=(); _shtab_fat5; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", code, "bash", *words], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_and_options(script):
    assert complete(script, "fat5", "pre") == {"pretokenize", "pretrain"}
    assert set(cli.COMMANDS) <= complete(script, "fat5", "")
    assert complete(script, "fat5", "export", "--t") == {"--to"}
    assert {"--vocab-size", "--output"} <= complete(script, "fat5", "train-tokenizer", "--")
    assert complete(script, "fat5", "doctor", "--vocab") == set()


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_get_every_command(shell, capsys):
    assert cli.main(["--print-completion", shell]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in cli.COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fish"], "got the shell 'fish'; expected one of bash, zsh, tcsh"),
        ([], "--print-completion expects one of bash, zsh, tcsh, got nothing"),
    ],
)
def test_another_shell_is_one_clear_error(arguments, message, capsys):
    assert cli.main(["--print-completion", *arguments]) == 2
    assert capsys.readouterr().err == f"fat5: error: {message}\n"


def test_without_shtab_the_error_names_the_extra(monkeypatch, capsys):
    monkeypatch.setattr("fat5.cli.completion.find_spec", lambda name: None)
    assert cli.main(["--print-completion", "bash"]) == 2
    assert "pip install 'fat5[completion]'" in capsys.readouterr().err
