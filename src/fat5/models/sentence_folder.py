"""The files that make a folder with a model and its tokenizer one that sentence-transformers loads."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fat5.files import atomic_file

if TYPE_CHECKING:
    from fat5.models.configuration import FAT5Config

_MODULES = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
# Their names of the poolings. A text's EOS is its last token wherever the tokenizer adds it.
_POOLINGS = {"mean": "mean_tokens", "first": "cls_token", "eos": "lasttoken"}


def write_sentence_files(
    folder: str | os.PathLike[str], config: FAT5Config, *, max_seq_length: int | None = None
) -> None:
    """Write `modules.json` and what it names: the encoder, the configuration's pooling, normalisation.

    `import fat5` has to come before sentence-transformers loads the folder, so that Transformers knows the model.

    Args:
        folder: Where weights, `config.json` and tokenizer are, or will be.
        config: The model's.
        max_seq_length: Tokens after which texts are cut; None for the tokenizer's own limit.
    """
    root = Path(folder)
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(_MODULES)
    ]
    pooling: dict[str, Any] = {"word_embedding_dimension": config.d_model}
    pooling |= {f"pooling_mode_{mode}": name == config.pooling for name, mode in _POOLINGS.items()}
    files = {
        "modules.json": modules,
        "1_Pooling/config.json": pooling,
        "2_Normalize/config.json": {},
        "sentence_bert_config.json": {"max_seq_length": max_seq_length, "do_lower_case": False},
        "config_sentence_transformers.json": {"similarity_fn_name": "cosine"},
    }
    for name, content in files.items():
        with atomic_file(root / name) as staging:
            staging.write_text(json.dumps(content, indent=2), encoding="utf-8")
