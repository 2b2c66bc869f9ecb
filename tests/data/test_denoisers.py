"""Mixtures of denoisers and the settings of the pipeline: what they contain and what they refuse."""

from __future__ import annotations

import jsonargparse
import pytest

from fat5.data.denoisers import PRESETS, Denoiser, resolve_denoisers
from fat5.data.denoising_config import DenoisingConfig
from fat5.errors import ConfigError


def settings(preset: str) -> list[tuple[str | None, float | None, float, float]]:
    mixture = resolve_denoisers(preset)
    total = sum(denoiser.weight for denoiser in mixture)
    return [
        (denoiser.prefix, denoiser.mean_noise_span_length, denoiser.noise_density, round(denoiser.weight / total, 6))
        for denoiser in mixture
    ]


def test_fat5_mixture_is_the_stated_one():
    assert settings("fat5") == [
        ("[R]", 3, 0.15, 0.165),
        ("[R]", 8, 0.15, 0.165),
        ("[S]", None, 0.75, 0.34),
        ("[X]", 3, 0.5, 0.0825),
        ("[X]", 8, 0.15, 0.0825),
        ("[X]", 64, 0.15, 0.0825),
        ("[X]", 64, 0.5, 0.0825),
    ]


def test_ul2_mixture_is_the_papers_table_in_equal_parts():
    seventh = round(1 / 7, 6)
    assert settings("ul2") == [
        ("[R]", 3, 0.15, seventh),
        ("[R]", 8, 0.15, seventh),
        ("[S]", None, 0.25, seventh),
        ("[X]", 3, 0.5, seventh),
        ("[X]", 8, 0.5, seventh),
        ("[X]", 64, 0.15, seventh),
        ("[X]", 64, 0.5, seventh),
    ]


def test_t5_and_prefix_lm_need_no_prefix_token():
    assert settings("t5") == [(None, 3, 0.15, 1.0)]
    assert settings("prefix-lm") == [(None, None, 0.5, 1.0)]


def test_names_are_unique_and_say_what_they_are():
    assert [denoiser.name for denoiser in PRESETS["fat5"]] == [
        "R-mu3-r0.15",
        "R-mu8-r0.15",
        "S-r0.75",
        "X-mu3-r0.5",
        "X-mu8-r0.15",
        "X-mu64-r0.15",
        "X-mu64-r0.5",
    ]
    for mixture in PRESETS.values():
        assert len({denoiser.name for denoiser in mixture}) == len(mixture)
    assert Denoiser(name="mine").name == "mine"


def test_mixture_can_be_a_list_in_a_configuration_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "denoising:\n"
        "  denoisers:\n"
        "  - {noise_density: 0.3, mean_noise_span_length: 5, prefix: '[X]', weight: 2}\n"
        "  - {noise_density: 0.5, mean_noise_span_length: null, use_sentinels: false, name: continuation}\n"
    )

    def read(denoising: DenoisingConfig) -> DenoisingConfig:
        return denoising

    mixture = jsonargparse.CLI(read, args=[f"--config={file}"], as_positional=False).mixture
    assert [denoiser.name for denoiser in mixture] == ["X-mu5-r0.3", "continuation"]
    assert mixture[0].weight == 2
    assert not mixture[1].use_sentinels


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"noise_density": 0.0}, "noise_density must lie strictly between 0 and 1, got 0.0"),
        ({"noise_density": 1.0}, "strictly between 0 and 1"),
        ({"mean_noise_span_length": 0.5}, "mean_noise_span_length must be 1 or more, got 0.5"),
        ({"weight": 0.0}, "weight must be positive, got 0.0"),
        ({"weight": -1.0}, "weight must be positive"),
        ({"weight": float("nan")}, "weight must be positive"),
        ({"use_sentinels": False}, "needs mean_noise_span_length=null"),
    ],
)
def test_wrong_denoiser_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Denoiser(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"denoisers": "ull2"}, "unknown denoisers 'ull2'; did you mean 'ul2'"),
        ({"denoisers": []}, "empty list"),
        ({"denoisers": [Denoiser(), Denoiser(weight=2.0)]}, "2 denoisers are named 'span-mu3-r0.15'"),
        ({"layout": "packd"}, "layout must be one of packed, padded, concat, got 'packd'; did you mean 'packed'"),
        ({"pad_to": "longst", "layout": "padded"}, "pad_to must be max_length or longest, got 'longst'"),
        (
            {"batch_size": 8},
            "batch_size belongs to layout 'padded', but layout is 'packed', which takes encoder_budget",
        ),
        ({"layout": "padded", "look_ahead": 8}, "look_ahead belongs to layout 'packed'"),
        ({"max_input_length": 3}, "max_input_length = 3 is too short for denoiser 'R-mu3-r0.15'.*need 4"),
        ({"max_target_length": 2}, "max_target_length = 2 is too short.*need 3"),
        ({"encoder_budget": 1000}, "encoder_budget = 1000 is smaller than max_input_length = 1024"),
        ({"decoder_budget": 1000}, "decoder_budget = 1000 is smaller than max_target_length = 1024"),
        ({"max_documents": 0}, "max_documents must be 1 or more, got 0"),
        ({"layout": "padded", "batch_size": -2}, "batch_size must be 1 or more, got -2"),
        ({"look_ahead": -1}, "look_ahead must be 0 or more, got -1"),
        ({"seed": -1}, "seed must lie in"),
    ],
)
def test_wrong_configuration_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        DenoisingConfig(**arguments)


def test_shortest_limits_are_accepted():
    DenoisingConfig(max_input_length=4, max_target_length=3)
    DenoisingConfig(denoisers="t5", max_input_length=3, max_target_length=3)
    DenoisingConfig(denoisers="prefix-lm", max_input_length=2, max_target_length=2)
