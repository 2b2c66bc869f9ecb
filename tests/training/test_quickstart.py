"""The quickstart at toy size; the whole one is `make quickstart`."""

from __future__ import annotations

import json
import shlex

import pytest

from fat5.cli import main as cli
from fat5.errors import ConfigError
from fat5.training import quickstart as module
from fat5.training.config import PretrainConfig
from fat5.training.config_file import load_settings
from fat5.training.quickstart import MASKED_SENTENCES, QuickstartSummary, quickstart, quickstart_config_path

TINY = (
    "model.d_model=32",
    "model.d_kv=8",
    "model.d_ff=32",
    "model.num_heads=4",
    "model.num_layers=1",
    "training.max_steps=12",
    "training.eval_every=12",
    "training.eval_batches=2",
    "training.log_every=4",
    "optimizer.lr=0.05",
)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    root = tmp_path_factory.mktemp("quick") / "start"
    lines: list[str] = []
    return quickstart(root, overrides=TINY, report=lines.append), root, lines


def test_everything_is_there_at_the_end(outcome):
    summary, root, _ = outcome
    assert isinstance(summary, QuickstartSummary)
    saved = json.loads((root / "summary.json").read_text())
    assert saved == {**saved, "eval_loss": summary.eval_loss, "filled": summary.filled, "steps": 12}
    for file in ("tokenizer/tokenizer.json", "tokens/train/manifest.json", "run/model.safetensors", "run/loss.png"):
        assert (root / file).is_file(), file
    assert set(saved["seconds"]) == {"tokenizer", "tokens", "training", "baselines and sentences"}


def test_losses_are_compared_on_the_same_targets(outcome):
    summary, _, _ = outcome
    assert summary.eval_loss < summary.untrained_loss
    # A uniform guess costs ln 4096 = 8.32; frequencies alone know much better, and an untrained model a bit worse.
    assert 5 < summary.unigram_loss < 8 < summary.untrained_loss < 9.5


def test_each_masked_sentence_is_completed_around_its_mask(outcome):
    summary, _, _ = outcome
    assert tuple(summary.filled) == MASKED_SENTENCES
    for sentence, filled in summary.filled.items():
        before, after = sentence.split(" <extra_id_0>")
        assert filled.startswith(before)
        assert filled.endswith(after)


def test_the_commands_it_prints_are_those_a_user_types(outcome):
    _, root, lines = outcome
    commands = [shlex.split(line.strip().removeprefix("$ ")) for line in lines if line.startswith("\n$")]
    assert [command[1] for command in commands] == ["train-tokenizer", "pretokenize", "pretrain"]
    _, _, path, *overrides = commands[-1]
    config = load_settings(PretrainConfig, path, overrides)
    assert config == load_settings(PretrainConfig, root / "run" / "pretrain.yaml")


def test_a_second_run_is_refused_unless_told_to_replace_it(outcome, tmp_path):
    _, root, _ = outcome
    with pytest.raises(FileExistsError, match="holds an earlier quickstart; pass --overwrite"):
        quickstart(root)
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / "run").mkdir()
    with pytest.raises(FileExistsError, match=r"holds 'thesis.tex', which no quickstart made"):
        quickstart(tmp_path, overwrite=True)
    assert (tmp_path / "thesis.tex").exists()
    assert (tmp_path / "run").exists()


def test_an_earlier_quickstart_is_replaced_when_told_to(tmp_path, monkeypatch):
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "tokens").mkdir()

    class Reached(Exception):  # noqa: N818
        pass

    def stop(*_, **__):
        raise Reached

    monkeypatch.setattr(module, "train_tokenizer", stop)
    with pytest.raises(Reached):
        quickstart(tmp_path, overwrite=True)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_setting_is_found_before_anything_is_replaced(tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(ValueError, match=r"did you mean training\.max_steps"):
        quickstart(tmp_path, overwrite=True, overrides=["training.max_stepz=3"])
    assert (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("override", ["data.validation=null", "training.eval_at_start=false"])
def test_the_evaluation_cannot_be_taken_away(tmp_path, override):
    with pytest.raises(ConfigError, match="the quickstart compares losses"):
        quickstart(tmp_path / "start", overrides=[override])


def test_the_shipped_settings_promise_a_cpu_run_of_a_few_million_parameters():
    config = load_settings(PretrainConfig, quickstart_config_path())
    assert (config.training.device, config.denoising.denoisers) == ("cpu", "fat5")
    assert config.training.eval_at_start


def test_the_command_prints_the_comparison(outcome, monkeypatch, capsys):
    summary, _, _ = outcome
    given = {}

    def fake(output_dir, **settings):
        given.update(settings, output_dir=output_dir)
        return summary

    monkeypatch.setattr(module, "quickstart", fake)
    assert cli.main(["quickstart", "--output-dir", "here", "training.max_steps=3"]) == 0
    assert (given["output_dir"], given["overwrite"], given["overrides"]) == ("here", False, ["training.max_steps=3"])
    text = capsys.readouterr().out
    for expected in (f"{summary.eval_loss:.3f}", f"{summary.unigram_loss:.3f}", *summary.filled.values()):
        assert expected in text
