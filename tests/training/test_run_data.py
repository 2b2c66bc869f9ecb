"""Data and tokenizer must belong together, and sizes must fit, before any work starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from fat5.data.budgets import resolve_budgets
from fat5.data.pretokenize import pretokenize
from fat5.data.sample import sample_documents
from fat5.data.tokenizer import save_tokenizer
from fat5.data.tokenizer_training import TokenizerConfig, train_tokenizer
from fat5.errors import ConfigError, DataError
from fat5.training.pretrain import pretrain
from fat5.training.run_data import open_run_data


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """Token files and a tokenizer from other text."""
    root = tmp_path_factory.mktemp("other")
    documents = [text for _, text in zip(range(40), sample_documents(), strict=False)][20:]
    tokenizer = train_tokenizer(documents, TokenizerConfig(vocab_size=576), show_progress=False)
    save_tokenizer(tokenizer, root / "tokenizer")
    pretokenize(documents, tokenizer, root / "tokens", show_progress=False)
    return root


@pytest.mark.parametrize("part", ["train", "validation", "tokenizer"])
def test_text_of_another_tokenizer_is_refused(make_config, other, tmp_path, part):
    change = {
        "train": {"data__train": str(other / "tokens")},
        "validation": {"data__validation": str(other / "tokens")},
        "tokenizer": {"data__tokenizer": str(other / "tokenizer")},
    }[part]
    if part == "train":
        change["data__validation"] = make_config().data.validation
    with pytest.raises(DataError, match="was made with another tokenizer"):
        pretrain(make_config(**change))
    assert not (tmp_path / "run").exists(), "work was started before the check"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"denoising__encoder_budget": 64}, "encoder_budget = 64 is smaller than max_input_length = 96"),
        ({"model__vocab_size": 128}, "model.vocab_size is 128, expected at least 640"),
        ({"data__train": "nowhere"}, "nowhere"),
        ({"denoising__denoisers": [{"prefix": "[Q]"}]}, r"no denoiser prefix '\[Q\]'"),
        ({"schedule__warmup_steps": 9}, "warm"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_any_work(make_config, tmp_path, changes, message):
    with pytest.raises((ConfigError, DataError, FileNotFoundError), match=message):
        pretrain(make_config(**changes))
    assert not (tmp_path / "run").exists(), "work was started before the check"


def test_the_tokenizer_beside_the_text_is_found_or_asked_for(make_config, other, tmp_path):
    config = make_config(data__train=str(other / "tokens"), data__validation=None)
    assert len(open_run_data(config.data, config.denoising).tokenizer) == 576
    lonely = tmp_path / "lonely"
    lonely.mkdir()
    for file in (other / "tokens").iterdir():
        if file.is_file():
            (lonely / file.name).write_bytes(file.read_bytes())
    config = make_config(data__train=str(lonely), data__validation=None)
    with pytest.raises(ConfigError, match=r"data\.tokenizer is null and there is no tokenizer beside"):
        open_run_data(config.data, config.denoising)


def test_evaluation_runs_in_the_shapes_of_training_and_sees_every_window_once(make_config):
    config = make_config(denoising__encoder_budget=4000)
    data = open_run_data(config.data, config.denoising)
    evaluation = data.evaluation_set()
    assert evaluation is not None
    assert evaluation.budgets == data.training_set().budgets
    own = resolve_budgets(config.denoising, data.validation.lengths, len(data.special_tokens.sentinels))
    assert own != evaluation.budgets, "the test needs validation text that would ask for other sizes"
    batches = list(evaluation)
    assert sum(batch["num_input_tokens"] for batch in batches) == evaluation.statistics().input_tokens
    again = [batch["labels"].tolist() for batch in evaluation]
    assert again == [batch["labels"].tolist() for batch in batches]
