"""The whole model as its formulas say, for one document: every score in float64, positions by code of its own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.t5.modeling_t5 import T5Attention

from fat5 import FAT5Config, FAT5ForConditionalGeneration
from fat5.ops.rotary.reference import rotary_reference
from tests.nn.test_position_alibi import published_slopes


def norm(x: Tensor, module) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + module.eps).sqrt() * module.weight


def position_bias(config: FAT5Config, first, positions: Tensor, causal: bool) -> Tensor:
    """The bias [H, L, L] of tokens at these positions; `first` is the attention that holds its parameters."""
    distance = positions[None, :] - positions[:, None]
    if config.position_encoding == "relative":
        buckets = T5Attention._relative_position_bucket(
            distance, not causal, config.relative_attention_num_buckets, config.relative_attention_max_distance
        )
        return first.relative_attention_bias.weight[buckets].permute(2, 0, 1)
    if config.position_encoding == "alibi":
        one_sided = not config.alibi_symmetric and not causal
        back = -(-config.num_heads // 2)
        groups = (back, config.num_heads - back) if one_sided else (config.num_heads,)
        slopes = torch.tensor([s for n in groups for s in published_slopes(n)], dtype=torch.float64)
        slopes = 2**first.alibi.log2_slopes if config.alibi_learned_slopes else slopes
        bias = -slopes[:, None, None] * distance.abs()
        if one_sided:
            bias[:back] = bias[:back].masked_fill(distance > 0, -torch.inf)
            bias[back:] = bias[back:].masked_fill(distance < 0, -torch.inf)
        return bias
    if config.position_encoding == "fire":
        fire, reach = first.fire, torch.maximum(positions[:, None], positions[None, :]).double()
        threshold = fire.threshold_factor * config.fire_threshold
        share = (fire.scale * distance.abs() + 1).log() / ((fire.scale * reach.maximum(threshold) + 1).log() + 1e-6)
        hidden = (share[..., None] * fire.hidden.weight[:, 0] + fire.hidden.bias).clamp_min(0)
        return torch.einsum("ijw,hw->hij", hidden, fire.output.weight) + fire.output.bias[:, None, None]
    return torch.zeros(config.num_heads, len(positions), len(positions), dtype=torch.float64)


def rotate(config: FAT5Config, x: Tensor, positions: Tensor, causal: bool, is_key: bool) -> Tensor:
    dim = int(config.d_kv * config.rotary_fraction) // 2 * 2
    base = config.rotary_scale_base if causal else None
    return rotary_reference(
        x, positions, dim, theta=config.rotary_theta, interleaved=config.rotary_interleaved, scale_base=base,
        is_key=is_key,
    )  # fmt: skip


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float) -> Tensor:
    weights = (torch.einsum("ihd,jhd->hij", q, k) + bias).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, v).flatten(1)


def heads(x: Tensor, config: FAT5Config) -> Tensor:
    return x.unflatten(-1, (config.num_heads, config.d_kv))


def states(model, stack, ids: Tensor, positions: Tensor, source: Tensor | None, mask: Tensor) -> Tensor:
    config, causal = model.config, stack.is_decoder
    x = stack.embed_tokens.weight[ids]
    bias = position_bias(config, stack.block[0].layer[0].SelfAttention, positions, causal)
    bias = bias.masked_fill(~mask, -torch.inf)
    if causal:
        bias = bias.masked_fill(torch.ones(len(ids), len(ids)).triu(1).bool(), -torch.inf)
    for block in stack.block:
        own, y = block.layer[0].SelfAttention, norm(x, block.layer[0].layer_norm)
        q, k, v = (heads(y @ p.weight.T, config) for p in (own.q, own.k, own.v))
        if config.position_encoding == "rotary":
            q, k = (rotate(config, t, positions, causal, is_key) for t, is_key in ((q, False), (k, True)))
        x = x + attend(q, k, v, bias) @ own.o.weight.T
        if source is not None:
            cross, y = block.layer[1].EncDecAttention, norm(x, block.layer[1].layer_norm)
            q, k, v = (heads(t @ p.weight.T, config) for t, p in ((y, cross.q), (source, cross.k), (source, cross.v)))
            x = x + attend(q, k, v, 0.0) @ cross.o.weight.T
        ffn, y = block.layer[-1].DenseReluDense, norm(x, block.layer[-1].layer_norm)
        inner = F.gelu(y @ ffn.wi_0.weight.T, approximate="tanh") * (y @ ffn.wi_1.weight.T)
        x = x + inner @ ffn.wo.weight.T
    return norm(x, stack.final_layer_norm)


@torch.no_grad()
def reference_logits(
    model: FAT5ForConditionalGeneration, ids: Tensor, decoder_ids: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Return the logits [L, vocab_size] of one document by a model in float64; cross-attention sees all real tokens."""
    mask = torch.ones(len(ids), dtype=torch.bool) if mask is None else mask.bool()
    encoded = states(model, model.encoder, ids, torch.arange(len(ids)), None, mask)[mask]
    everything = torch.ones(len(decoder_ids), dtype=torch.bool)
    decoded = states(model, model.decoder, decoder_ids, torch.arange(len(decoder_ids)), encoded, everything)
    return decoded @ model.lm_head.weight.T
