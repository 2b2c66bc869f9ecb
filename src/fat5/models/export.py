"""Checkpoints for other libraries: the weights as they are, and the files that each library reads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open

from fat5.errors import CheckpointError, ConfigError, nearest, nearest_path
from fat5.files import atomic_directory
from fat5.models.configuration import FAT5Config
from fat5.models.conversion import settings_to_t5
from fat5.models.embedding import FAT5ForTextEmbedding
from fat5.models.sentence_folder import write_sentence_files

FORMATS = ("t5", "sentence-transformers")
"""What `export_checkpoint` writes."""

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
# FAT5's classes that have the same keys as one of T5, by the class's name without the family.
_T5_CLASSES = ("ForConditionalGeneration", "EncoderModel", "ForTokenClassification")
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "spiece.model",
    "chat_template.jinja",
)  # fmt: skip


def export_checkpoint(source: str | os.PathLike[str], output: str | os.PathLike[str], *, to: str = "t5") -> str:
    """Write a FAT5 checkpoint in the format of another library, whole or not at all.

    * `t5`: a checkpoint that stock Transformers loads, `T5ForConditionalGeneration` and what reads its files. The
      weights are copied byte for byte; `config.json` is rewritten. A model with a table of biases a layer becomes a
      `UMT5ForConditionalGeneration`.
    * `sentence-transformers`: the encoder alone as an embedding model, with the pooling of the configuration. It needs
      `import fat5` where it is loaded.

    Args:
        source: Folder of a model with its tokenizer, if it has one.
        output: Folder to make.
        to: A name in `FORMATS`.

    Returns:
        Name of the class that loads the result.

    Raises:
        ConfigError: There is no such format, or the model is not one that it can express.
        CheckpointError: There is no such folder, or it has no whole weights in safetensors.
        FileExistsError: `output` is not empty.
    """
    if to not in FORMATS:
        raise ConfigError(f"got the format {to!r}; expected one of {', '.join(FORMATS)}{nearest(to, FORMATS)}")
    folder = Path(source)
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}{nearest_path(folder, folder=True)}")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} holds no model: it has no config.json")
    if to == "sentence-transformers":
        return _export_sentence(folder, output)
    settings = _own_settings(folder)
    name = (settings.get("architectures") or ["?"])[0]
    kind = name.removeprefix("FAT5")
    if not name.startswith("FAT5") or kind not in _T5_CLASSES:
        raise ConfigError(
            f"got a {name} in {folder}; expected one of {', '.join(f'FAT5{kind}' for kind in _T5_CLASSES)}: "
            "Transformers has no class of T5 with the weights of the others"
        )
    converted = settings_to_t5(FAT5Config.from_dict(dict(settings)).to_dict())
    loads_as = {"t5": "T5", "umt5": "UMT5"}[converted["model_type"]] + kind
    converted["architectures"] = [loads_as]
    _check_weights(folder, loads_as, converted)
    with atomic_directory(output) as staging:
        for path in _weight_files(folder):
            shutil.copyfile(path, staging / path.name)
        _copy(folder, staging, *_TOKENIZER_FILES, "generation_config.json")
        (staging / "config.json").write_text(json.dumps(converted, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return loads_as


def _own_settings(folder: Path) -> dict[str, Any]:
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{folder}/config.json is no JSON file: {error}") from error
    if settings.get("model_type") != "fat5":
        raise ConfigError(f"got a checkpoint of model_type={settings.get('model_type')!r} in {folder}; expected fat5")
    return settings


def _weight_files(folder: Path) -> Iterator[Path]:
    """Yield the files of the weights: one, or an index and its shards."""
    if (folder / _WEIGHTS).is_file():
        yield folder / _WEIGHTS
        return
    if not (folder / _INDEX).is_file():
        raise CheckpointError(f"{folder} has neither {_WEIGHTS} nor {_INDEX}")
    yield folder / _INDEX
    shards = set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    for name in sorted(shards):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} lacks {name}, which {_INDEX} names")
        yield folder / name


def _check_weights(folder: Path, loads_as: str, settings: dict[str, Any]) -> None:
    """Raise unless the weights are those of Transformers' class, by name and shape."""
    shapes: dict[str, list[int]] = {}
    for path in _weight_files(folder):
        if path.suffix != ".safetensors":
            continue
        try:
            with safe_open(path, framework="pt") as file:
                shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged or cut short: {error}") from error
    model_class = getattr(transformers, loads_as)
    with torch.device("meta"):
        model = model_class(model_class.config_class.from_dict(dict(settings)))
    expected = {name: list(weight.shape) for name, weight in model.state_dict().items()}
    tied = set(model.all_tied_weights_keys)
    wrong = {name for name in shapes if shapes[name] != expected.get(name)}
    wrong |= expected.keys() - shapes.keys() - tied
    if wrong:
        raise CheckpointError(
            f"the weights in {folder} are not those of a {loads_as}: {', '.join(sorted(wrong)[:4])} "
            f"{'is' if len(wrong) == 1 else 'are'} missing, unknown or of another shape"
        )


def _copy(folder: Path, target: Path, *names: str) -> None:
    for name in names:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)


def _export_sentence(folder: Path, output: str | os.PathLike[str]) -> str:
    model = FAT5ForTextEmbedding.from_pretrained(folder)
    with atomic_directory(output) as staging:
        model.transformer.save_pretrained(staging)
        write_sentence_files(staging, model.config)
        _copy(folder, staging, *_TOKENIZER_FILES)
    return "SentenceTransformer"
