"""The model's settings in a run: the fields of FAT5Config, so that a setting added there can be set here."""

from __future__ import annotations

import dataclasses
import typing
from typing import TYPE_CHECKING, Any

import docstring_parser
from huggingface_hub.errors import StrictDataclassError

from fat5.errors import ConfigError
from fat5.models import FAT5Config

# These follow from the tokenizer and from what the model is, or belong to heads that pretraining does not have.
_NOT_SETTINGS = (
    "pad_token_id", "eos_token_id", "decoder_start_token_id", "is_encoder_decoder", "classifier_dropout", "pooling",
)  # fmt: skip
_VOCAB_SIZE_HELP = "Rows of the embedding; null for the tokenizer's length, rounded up to a multiple of 64."


@dataclasses.dataclass(frozen=True)
class _ModelSettings:
    vocab_size: int | None = None

    def build(self, tokenizer_length: int, *, pad: int, eos: int, bos: int | None = None) -> FAT5Config:
        """Return the model's configuration for a tokenizer of this length and these special ids.

        Raises:
            ConfigError: The vocabulary is smaller than the tokenizer's, or a setting has a value no model can have.
        """
        settings: dict[str, Any] = dataclasses.asdict(self)
        settings |= {"pad_token_id": pad, "eos_token_id": eos, "bos_token_id": bos, "decoder_start_token_id": pad}
        if self.vocab_size is None:
            settings["vocab_size"] = -(-tokenizer_length // 64) * 64
        elif self.vocab_size < tokenizer_length:
            raise ConfigError(
                f"model.vocab_size is {self.vocab_size}, expected at least {tokenizer_length}, the tokenizer's length; "
                "null takes what the tokenizer needs"
            )
        try:
            return FAT5Config(**settings)
        except (ValueError, StrictDataclassError) as error:
            raise ConfigError(f"model: {' '.join(str(error.__cause__ or error).split())}") from error


def _settings_class() -> type[_ModelSettings]:
    annotations = FAT5Config.__annotations__
    # Of the class alone: some of its base's annotations are names that exist for type checkers only.
    hints = typing.get_type_hints(
        type("Own", (), {"__annotations__": annotations, "__module__": FAT5Config.__module__})
    )
    described = {entry.arg_name: entry.description for entry in docstring_parser.parse(FAT5Config.__doc__ or "").params}
    described["vocab_size"] = _VOCAB_SIZE_HELP
    own = [name for name in annotations if name not in _NOT_SETTINGS]
    cls = dataclasses.make_dataclass(
        "ModelConfig",
        [
            (name, hints[name], dataclasses.field(default=getattr(FAT5Config, name)))
            for name in own
            if name != "vocab_size"
        ],
        bases=(_ModelSettings,),
        frozen=True,
    )
    lines = (f"    {name}: {' '.join((described[name] or '').split())}" for name in own)
    cls.__doc__ = "\n".join(
        ["The model's sizes and parts; the names are FAT5Config's and T5's.", "", "Attributes:", *lines]
    )
    cls.__module__ = __name__
    return cls


if TYPE_CHECKING:
    ModelConfig = _ModelSettings
else:
    ModelConfig = _settings_class()
