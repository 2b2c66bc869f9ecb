"""From texts to texts: loading a checkpoint, generating by batches, and filling the sentinels of masked texts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from fat5.data.hub import local_files_only, may_be_on_hub
from fat5.data.text_files import without_surrogates
from fat5.data.tokenizer import load_tokenizer
from fat5.errors import CheckpointError, ConfigError, DataError, nearest, nearest_path
from fat5.models import FAT5Config, FAT5ForConditionalGeneration
from fat5.training.fill import fill_sentinels, has_sentinels, masked_input

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_WINDOW = 32  # batches whose texts are sorted by length together


@dataclass(frozen=True)
class GenerationSettings:
    """How to generate; what is not given is as the checkpoint's own generation settings have it.

    Attributes:
        max_new_tokens: Most tokens of an output.
        num_beams: Beams of a beam search; 1 for none.
        do_sample: Draw tokens at random rather than take the likeliest.
        temperature: With --do-sample, divide the logits by this.
        top_k: With --do-sample, draw from this many of the likeliest tokens.
        top_p: With --do-sample, draw from the likeliest tokens that make up this share of the probability.
        repetition_penalty: Divide the scores of tokens that are there already; above 1 to repeat less.
        length_penalty: With beams, above 0 favours long outputs, below 0 short ones.
        num_return_sequences: Outputs of each text, from beams or from drawing several times.
        batch_size: Texts that are generated from together.
        prefix: Put before each text; by default [R], a denoiser of the pretraining, where a text has sentinels and the
            tokenizer knows it, else nothing.
        max_input_tokens: Refuse texts that are longer in tokens, rather than take the time and memory for them.
        seed: Of the random numbers, with --do-sample.
        cuda_graph: Run each step of the decoder as a CUDA graph: faster from the second batch of a size on.

    Raises:
        ConfigError: A value that cannot be, or a setting that would do nothing.
    """

    max_new_tokens: int = 128
    num_beams: int | None = None
    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    length_penalty: float | None = None
    num_return_sequences: int | None = None
    batch_size: int = 16
    prefix: str | None = None
    max_input_tokens: int | None = None
    seed: int | None = None
    cuda_graph: bool = False

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "num_beams", "num_return_sequences", "batch_size", "max_input_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"got {name}={value}; expected at least 1")
        for name in ("temperature", "repetition_penalty"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"got {name}={value}; expected a number above 0")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"got top_p={self.top_p}; expected a number in (0, 1]")
        idle = [name for name in ("temperature", "top_k", "top_p", "seed") if getattr(self, name) is not None]
        if idle and not self.do_sample:
            raise ConfigError(f"got {idle[0]} without do_sample, where it does nothing; set do_sample, or leave it out")
        outputs, beams = self.num_return_sequences or 1, self.num_beams or 1
        if outputs > beams and not self.do_sample:
            raise ConfigError(
                f"got num_return_sequences={outputs} with num_beams={beams}; expected at least as many beams, or "
                "do_sample"
            )

    def options(self) -> dict[str, Any]:
        """Return the arguments of `generate`."""
        own = ("batch_size", "prefix", "max_input_tokens", "seed")
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in own}
        return {name: value for name, value in given.items() if value not in (None, False)}


@dataclass(frozen=True)
class Generated:
    """A text and what a model makes of it.

    Attributes:
        input: The text.
        outputs: What was generated; for a text with sentinels, the text with each filled in.
    """

    input: str
    outputs: list[str]


def load_model(
    checkpoint: str | os.PathLike[str], *, device: str | None = None, dtype: str | None = None
) -> tuple[FAT5ForConditionalGeneration, PreTrainedTokenizerBase]:
    """Load a model with its tokenizer, ready to generate.

    Args:
        checkpoint: Folder or hub name of a FAT5, T5, mT5 or UMT5 model.
        device: Where to run it; a GPU if there is one by default.
        dtype: A name in `DTYPES`; the checkpoint's by default.

    Raises:
        FileNotFoundError: There is no such folder, or no model or tokenizer in it.
        CheckpointError: It is the checkpoint of something else, or cannot be read.
        ConfigError: An unknown type, or a device that is not there.
    """
    name = os.fspath(checkpoint)
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"got dtype={dtype!r}; expected one of {sorted(DTYPES)}{nearest(dtype, DTYPES)}")
    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"got device={device!r}, which does not work here: {str(error).splitlines()[0]}") from error
    folder = Path(name)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{name} holds no model: it has no config.json")
    if not folder.is_dir() and not may_be_on_hub(name):
        raise FileNotFoundError(f"there is no folder {name}{nearest_path(name, folder=True)}")
    tokenizer = load_tokenizer(name)
    try:
        here: dict[str, Any] = {"local_files_only": local_files_only(name)}
        config = FAT5Config.from_pretrained(name, **here)
        _check_decoder(config, name)
        model = FAT5ForConditionalGeneration.from_pretrained(
            name, config=config, dtype="auto" if dtype is None else DTYPES[dtype], **here
        )
    except CheckpointError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the model in {name} could not be loaded: {str(error).splitlines()[0]}") from error
    model.to(place)  # type: ignore[arg-type]  # the wrapper of Transformers' method hides its self
    return model.eval(), tokenizer


def _check_decoder(config: FAT5Config, name: str) -> None:
    """Raise for what `fat5 finetune` makes of the encoder alone, before Transformers prints a table of its weights."""
    written = (config.architectures or [""])[0]
    if written.startswith("FAT5For") and written != FAT5ForConditionalGeneration.__name__:
        raise CheckpointError(f"got a {written} in {name}, which has no decoder; expected FAT5ForConditionalGeneration")


def generate_texts(
    model: FAT5ForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str] | Iterator[str],
    settings: GenerationSettings,
    *,
    show_progress: bool = True,
) -> Iterator[Generated]:
    """Generate from each text, in order.

    Texts of similar lengths share a batch, so that there is little padding. A text with sentinels comes back with each
    of them filled in.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        texts: The texts.
        settings: How to generate.
        show_progress: Draw a progress bar, where the output is a terminal.

    Raises:
        DataError: A text is longer than `max_input_tokens`, its sentinels are not in order, or the model cannot
            generate this way; the message names the text.
    """
    if settings.seed is not None:
        torch.manual_seed(settings.seed)
    total = len(texts) if isinstance(texts, Sequence) else None
    source, first = iter(texts), 0
    with tqdm(
        desc="generating", total=total, unit="text", dynamic_ncols=True, disable=None if show_progress else True
    ) as bar:
        while window := list(islice(source, _WINDOW * settings.batch_size)):
            ids = [_encode(tokenizer, text, settings, first + i) for i, text in enumerate(window)]
            by_length = sorted(range(len(window)), key=lambda i: -len(ids[i]))
            results: dict[int, Generated] = {}
            for start in range(0, len(window), settings.batch_size):
                rows = by_length[start : start + settings.batch_size]
                outputs = _generate_batch(model, tokenizer, [ids[i] for i in rows], settings)
                for i, row_outputs in zip(rows, outputs, strict=True):
                    results[i] = Generated(window[i], [_decode(tokenizer, window[i], out) for out in row_outputs])
                bar.update(len(rows))
            yield from (results[i] for i in range(len(window)))
            first += len(window)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, settings: GenerationSettings, number: int) -> list[int]:
    prefix = settings.prefix or ""
    if without_surrogates(text) != text:  # bytes of an argument that are not UTF-8 arrive like this
        raise DataError(f"text {number + 1:,} is not UTF-8: {text[:40]!r}")
    try:
        text = masked_input(tokenizer, text, settings.prefix) if has_sentinels(text) else prefix + text
    except DataError as error:
        raise DataError(f"text {number + 1:,}: {error}") from error
    ids: list[int] = tokenizer(text, verbose=False).input_ids
    if settings.max_input_tokens is not None and len(ids) > settings.max_input_tokens:
        raise DataError(
            f"text {number + 1:,} has {len(ids):,} tokens, more than max_input_tokens={settings.max_input_tokens:,}; "
            f"it begins {text[:40]!r}"
        )
    return ids


@torch.no_grad()
def _generate_batch(
    model: FAT5ForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    ids: list[list[int]],
    settings: GenerationSettings,
) -> list[list[list[int]]]:
    """Return the outputs of each row, as token ids."""
    padded = tokenizer.pad({"input_ids": ids}, return_tensors="pt").to(model.device)
    try:
        outputs = model.generate(input_ids=padded.input_ids, attention_mask=padded.attention_mask, **settings.options())
    except ValueError as error:  # such as positions beyond those that an encoding has
        raise DataError(f"the model cannot generate this: {error}") from error
    count = len(outputs) // len(ids)
    rows = outputs.tolist()
    return [rows[i * count : (i + 1) * count] for i in range(len(ids))]


def _decode(tokenizer: PreTrainedTokenizerBase, text: str, output: list[int]) -> str:
    if has_sentinels(text):
        return fill_sentinels(tokenizer, text, output)
    return str(tokenizer.decode(output, skip_special_tokens=True))
