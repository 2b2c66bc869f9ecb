"""Every command of README.md and docs is one that its program takes; `make test-all` runs them, at toy size."""

from __future__ import annotations

import pytest

from .markdown import NEEDS, Block, blocks, commands, inline_commands
from .programs import check, check_inline, check_settings

LANGUAGES = {"bash", "python", "yaml", "json", "text"}


def test_every_block_has_a_language_and_known_needs():
    found = blocks()
    assert len(found) > 50
    for block in found:
        assert block.language in LANGUAGES, f"{block.place}: expected a language of {sorted(LANGUAGES)}"
        assert block.needs <= NEEDS, f"{block.place}: {sorted(block.needs)}, expected some of {sorted(NEEDS)}"


@pytest.mark.parametrize("block", blocks("bash"), ids=lambda block: block.place)
def test_its_program_takes_the_command(block: Block):
    found = list(commands(block.text))
    assert found
    for parts in found:
        for words in parts:
            check(words)
            if words[0] in ("git", "make", "pip"):
                assert block.needs, f"{block.place}: {words[0]} needs a network; say so with a marker"


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: block.place)
def test_settings_are_those_of_a_pretraining(block: Block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_settings(block.text)


def test_commands_within_sentences_have_names_and_options_that_exist():
    found = list(inline_commands())
    assert len(found) > 30
    for page, text in found:
        try:
            check_inline(text)
        except AssertionError as error:
            raise AssertionError(f"{page}: `{text}`") from error


@pytest.mark.parametrize(
    "words",
    [
        "fat5 pretrian configs/minipile.yaml",
        "fat5 pretrain configs/minipile.yaml training.max_step=3",
        "fat5 export runs/a b --too t5",
        "fat5 finetune classification runs/a options.max_len=3",
        "python -m benchmarks attention --shape sweep-all",
        "python -m benchmarks attentions",
        "python examples/tutorial.py --sauce x",
        "make toast",
        "pip install fat5[toast]",
        "torchrun --nproc-per-node 2 -m fat5 pretrain nothing=3",
        "curl example",
    ],
)
def test_a_wrong_command_is_seen(words):
    with pytest.raises((Exception, SystemExit)):
        check(words.split())


def test_the_shell_text_is_read_as_a_shell_reads_it():
    text = "cat a.txt | fat5 generate runs/mine \\\n  'a b'  # why\n\ncd x && make y > z\n"
    assert list(commands(text)) == [
        [["cat", "a.txt"], ["fat5", "generate", "runs/mine", "a b"]],
        [["cd", "x"]],
        [["make", "y"]],
    ]
