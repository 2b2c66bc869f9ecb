"""Strict settings: every slip is one error that names the key, what was got and what was expected."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from fat5.errors import ConfigError
from fat5.models import FAT5Config, FAT5ForConditionalGeneration
from fat5.tasks.settings import load_task_config
from fat5.training.config import FREE_ON_RESUME, ModelConfig, PretrainConfig, TrainingConfig
from fat5.training.config_file import build_settings, flatten, known_keys, load_settings, to_yaml
from fat5.training.config_help import describe_settings

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.d_modle=8", "unknown setting model.d_modle; did you mean model.d_model?"),
        ("model.lr=0.1", "unknown setting model.lr; did you mean optimizer.lr?"),
        ("training.learning_rate=0.1", "unknown setting training.learning_rate; did you mean optimizer.lr?"),
        ("trainning.max_steps=1", "unknown setting trainning; did you mean training?"),
        ("denoising.denoisers=[{noise_densty: 0.1}]", r"denoisers\[0\].noise_densty; did you mean noise_density?"),
        ("model.d_model=wide", "model.d_model is 'wide', expected int"),
        ("model.d_model=1.5", "model.d_model is 1.5, expected int"),
        ("training.precision=fp16", "training.precision is 'fp16', expected auto | bf16 | bf16-mixed | fp32"),
        ("training.eval_batches=many", "training.eval_batches is 'many', expected int | null"),
        ("optimizer.betas=0.9", "optimizer.betas is 0.9, expected list"),
        (
            "data.stream={sources: [{source: [a]}], shuffle_buffer: many}",
            "data.stream.shuffle_buffer is 'many', expected",
        ),
        ("data.stream={shuffle_buffer: 5}", "missing settings: data.stream.sources"),
        ("model=small", "model is 'small', expected a section of settings"),
        ("training.max_tokens=5", "one of max_steps and max_tokens, got both"),
        ("training.log_every=0", "training.log_every is 0, expected at least 1"),
        ("training.resume=true", "training.resume is true, expected auto, false or the path"),
        ("max_steps", "'max_steps' is not a setting; expected section.key=value"),
        ("training.output_dir.deep=1", "sets a key inside training.output_dir, which is"),
        ("model.d_model=[1", "is not valid YAML"),
    ],
)
def test_a_wrong_override_is_one_error_naming_the_key(settings, tmp_path, override, message):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings()))
    with pytest.raises(ConfigError, match=message.replace("?", r"\?").replace("|", r"\|")):
        load_settings(PretrainConfig, path, [override])


def test_unknown_key_of_the_file_is_named_with_its_full_path(settings, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings(schedule__warmup=3)))
    with pytest.raises(ConfigError, match=r"unknown setting schedule\.warmup; did you mean schedule\.warmup_"):
        load_settings(PretrainConfig, path)


def test_a_section_whose_lines_are_all_comments_has_its_defaults(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "data: {train: tokens}\ntraining: {output_dir: run, max_steps: 2}\nmodel:\n  # d_model: 8\noptimizer:\n"
    )
    config = load_settings(PretrainConfig, path, ["optimizer.lr=0.5"])
    assert config.model == ModelConfig()
    assert config.optimizer.lr == 0.5


def test_overrides_win_in_order_and_keep_the_rest(settings, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings()))
    overrides = ["optimizer.lr=5e-3", "training.max_steps=7", "training.max_steps=9", "training.report_to=[]"]
    config = load_settings(PretrainConfig, path, overrides)
    assert (config.optimizer.lr, config.training.max_steps, config.training.report_to) == (5e-3, 9, [])
    assert config.model.d_model == 32


@pytest.mark.parametrize("prefix", ["résume : ", "translate English to French: ", "court"])
def test_a_text_that_ends_in_a_colon_is_a_text(prefix):
    config = load_task_config("seq2seq", None, [f"options.prefix={prefix}"])
    assert config.options.prefix == prefix


def test_a_mapping_stands_in_braces():
    overrides = ["training.output_dir=run", "training.max_steps=1", "data={train: a}", "accounts.hourly_prices={a: 2}"]
    config = load_settings(PretrainConfig, None, overrides)
    assert (config.data.train, config.accounts.hourly_prices) == ("a", {"a": 2})


def test_required_settings_are_named_when_missing():
    with pytest.raises(ConfigError, match=r"missing settings: training\.output_dir"):
        load_settings(PretrainConfig)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"- a\n- b\n", "holds a list, expected a mapping"), (b"a: [", "not valid YAML"), (b"\xff\xfe", "not UTF-8")],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, content, message):
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_settings(PretrainConfig, path)


def test_yaml_round_trip_gives_an_equal_configuration(make_config, tmp_path):
    config = make_config(denoising__denoisers=[{"noise_density": 0.2}], optimizer__betas=[0.8, 0.95])
    path = tmp_path / "again.yaml"
    path.write_text(to_yaml(config))
    assert load_settings(PretrainConfig, path) == config


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_configuration_is_valid(path):
    assert load_settings(PretrainConfig, path).model.d_model > 0


def test_the_shipped_french_model_has_147_million_parameters():
    import torch

    config = load_settings(PretrainConfig, CONFIGS / "french-small.yaml").model.build(32_768, pad=0, eos=1)
    with torch.device("meta"):
        model = FAT5ForConditionalGeneration(config)
    assert sum(weight.numel() for weight in model.parameters()) == pytest.approx(147e6, rel=5e-3)


def test_model_settings_are_those_of_the_model_with_its_defaults():
    theirs = FAT5Config()
    names = [field.name for field in dataclasses.fields(ModelConfig)]
    assert {"d_model", "num_layers", "dropout_rate", "z_loss", "tie_word_embeddings"} <= set(names)
    assert not {"pad_token_id", "is_encoder_decoder"} & set(names)
    built = ModelConfig().build(theirs.vocab_size, pad=0, eos=1)
    for name in names:
        assert getattr(built, name) == getattr(theirs, name), name
    assert ModelConfig(d_model=48).build(64, pad=0, eos=1).d_model == 48


def test_vocabulary_follows_the_tokenizer_and_may_not_be_smaller():
    assert ModelConfig().build(1000, pad=0, eos=1).vocab_size == 1024
    with pytest.raises(ConfigError, match=r"model.vocab_size is 999, expected at least 1000"):
        ModelConfig(vocab_size=999).build(1000, pad=0, eos=1)
    with pytest.raises(ConfigError, match="num_heads=0"):
        ModelConfig(num_heads=0).build(1000, pad=0, eos=1)


def test_steps_come_from_a_number_of_tokens():
    assert TrainingConfig(output_dir="run", max_tokens=1000).steps(300) == 4
    assert TrainingConfig(output_dir="run", max_steps=7).steps(300) == 7


def test_help_describes_every_setting():
    text = describe_settings(PretrainConfig)
    lines = text.splitlines()
    for key in known_keys(PretrainConfig):
        place = next(i for i, line in enumerate(lines) if line.startswith((f"  {key}  (", f"{key}:")))
        description = lines[place].partition(": ")[2] if lines[place].startswith(key) else lines[place + 1].strip()
        assert description, f"{key} has no description"


def test_no_training_setting_is_dead():
    """Each field is read somewhere outside its own definition."""
    import fat5.training as package

    sources = [path.read_text() for path in Path(package.__path__[0]).glob("*.py")]
    for field in dataclasses.fields(TrainingConfig):
        readers = sum(f".{field.name}" in source for source in sources)
        assert readers, f"training.{field.name} is never read"


def test_what_a_resumed_run_may_change_are_known_settings():
    assert set(known_keys(PretrainConfig)) >= FREE_ON_RESUME


def test_settings_are_checked_when_built_in_python(settings):
    with pytest.raises(ConfigError, match=r"unknown setting training\.stepz"):
        build_settings(PretrainConfig, settings(training__stepz=1))
    assert flatten(build_settings(PretrainConfig, settings()))["training.max_steps"] == 6
