"""What is generated: a T5 of random weights, as Transformers and as FAT5 have it, and inputs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from fat5 import FAT5Config, FAT5ForConditionalGeneration

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SIZES: dict[str, dict[str, Any]] = {
    "147M": {"vocab_size": 32768, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 12, "num_heads": 8},
    "tiny": {"vocab_size": 128, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2},
}


@dataclass(frozen=True)
class Workload:
    """One batch to generate from.

    Attributes:
        size: A name in `SIZES`.
        batch: Rows.
        length: Encoder tokens of each row, all real.
        beams: 1 for greedy search.
        new_tokens: Tokens that every row gets, whatever they are.
        dtype: A name in `DTYPES`.
        encode: Include the encoder; without it its states are given, as random numbers.
    """

    size: str
    batch: int
    length: int
    beams: int
    new_tokens: int
    dtype: str
    encode: bool

    def columns(self) -> dict[str, Any]:
        """Return the columns that name the workload."""
        return dataclasses.asdict(self)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        """Return what `generate` is given: the encoder's tokens or states, and settings."""
        generator = torch.Generator().manual_seed(0)
        settings = {"max_new_tokens": self.new_tokens, "num_beams": self.beams, "do_sample": False,
                    "eos_token_id": None}  # fmt: skip
        sizes = SIZES[self.size]
        if self.encode:
            ids = torch.randint(2, sizes["vocab_size"], (self.batch, self.length), generator=generator)
            return settings | {"input_ids": ids.to(device)}
        states = torch.randn(self.batch, 1, sizes["d_model"], generator=generator)
        noise = torch.randn(1, self.length, sizes["d_model"], generator=generator)
        states = (states + noise).to(device, DTYPES[self.dtype])  # rows differ, without a large draw on the host
        return settings | {"encoder_outputs": BaseModelOutput(last_hidden_state=states)}


class Models:
    """The same weights as two models, on one device, in any type."""

    def __init__(self, size: str, device: torch.device) -> None:
        torch.manual_seed(0)
        sizes = SIZES[size]
        config = T5Config(
            **sizes, feed_forward_proj="gated-gelu", dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0
        )
        theirs = T5ForConditionalGeneration(config).eval()
        # Transformers 5 ties whatever it is told.
        head = torch.randn(sizes["vocab_size"], sizes["d_model"]) * sizes["d_model"] ** -0.5
        theirs.lm_head.weight = torch.nn.Parameter(head)
        theirs.config.scale_decoder_outputs = False
        with torch.no_grad():
            for name, weight in theirs.named_parameters():
                # With its initial weights a T5 repeats one token, and shows nothing of its attention.
                if name.endswith(("o.weight", "wo.weight")):
                    weight.mul_(4)
                elif "relative_attention_bias" in name:
                    weight.normal_()
            for weight in theirs.parameters():
                weight.copy_(weight.bfloat16())  # so that a change of type and back changes nothing
        ours = FAT5ForConditionalGeneration(FAT5Config(**sizes)).eval()
        ours.load_state_dict(theirs.state_dict(), strict=True)
        self._models: dict[str, PreTrainedModel] = {"transformers": theirs.to(device), "fat5": ours.to(device)}

    def get(self, library: str, dtype: torch.dtype) -> PreTrainedModel:
        """Return a library's model in a type; earlier returns become of that type, too."""
        return self._models[library].to(dtype)


def generated(model: PreTrainedModel, inputs: dict[str, Any], **options: Any) -> Tensor:
    """Return what the model generates, on the host: all work is done."""
    # A copy: `generate` keeps the object that holds the encoder's states, and may change it.
    inputs = {k: BaseModelOutput(**v) if isinstance(v, BaseModelOutput) else v for k, v in inputs.items()}
    return model.generate(**inputs, **options).cpu()
