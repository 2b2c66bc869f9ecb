"""Memory and rate of a planned training step, from sizes alone: an estimate to plan with, not a measurement."""

from __future__ import annotations

from dataclasses import dataclass

from fat5.models import FAT5Config

# Bytes a parameter: weight, gradient, two moments (the second in float32), and in bf16 the compensation.
_STATE_BYTES = {"bf16": 2 + 2 + 2 + 4 + 2, "bf16-mixed": 4 + 4 + 4 + 4, "fp32": 4 + 4 + 4 + 4}
_ACTIVATION_BYTES = {"bf16": 2, "bf16-mixed": 2, "fp32": 4}
_GIB = 2**30


@dataclass(frozen=True)
class Estimate:
    """What a step on one device takes.

    Attributes:
        parameters: Of the model; those of position encodings other than T5's own, a handful, are left out.
        state_gib: Weights, gradients and optimiser state.
        activations_gib: What the forward keeps for the backward.
        slots: Token slots of a batch, both sides.
        flops: Matrix operations of forward and backward, recomputation not counted.
    """

    parameters: int
    state_gib: float
    activations_gib: float
    slots: int
    flops: float

    @property
    def memory_gib(self) -> float:
        """State and activations; kernels' scratch and what the allocator loses come on top."""
        return self.state_gib + self.activations_gib

    def slots_per_second(self, peak_tflops: float = 990.0, utilisation: float = 0.4) -> float:
        """Return the rate at a share of a device's peak.

        Args:
            peak_tflops: Of the device in bf16; 990 is an H100's or H200's, 312 an A100's.
            utilisation: Share of it that the step reaches.
        """
        return self.slots / (self.flops / (peak_tflops * 1e12 * utilisation))


def estimate_step(
    config: FAT5Config,
    encoder_slots: int,
    decoder_slots: int,
    max_length: int,
    *,
    precision: str = "bf16",
    gradient_checkpointing: bool = False,
    shard_degree: int = 1,
) -> Estimate:
    """Estimate a training step on a packed batch.

    Operations: 6 a weight and token, where the encoder's weights and the keys and values of cross-attention see the
    encoder's tokens and all others the decoder's, and attention at 3.5 times its forward, all documents taken to be
    `max_length` long. Activations: the inputs of each norm and each matrix product, once; with gradient checkpointing
    the inputs of each layer, and one layer's.

    Args:
        config: The model.
        encoder_slots: Token slots of the encoder in a batch.
        decoder_slots: Those of the decoder.
        max_length: Longest document.
        precision: "bf16", "bf16-mixed" or "fp32", as in `training.precision`.
        gradient_checkpointing: As in `training.gradient_checkpointing`.
        shard_degree: Devices that share one copy of the state.
    """
    d, ff, inner = config.d_model, config.d_ff, config.num_heads * config.d_kv
    layers, decoder_layers = config.num_layers, int(config.num_decoder_layers or 0)
    matrices = 3 if config.is_gated else 2
    encoder_layer, decoder_layer = 4 * d * inner + matrices * d * ff, 6 * d * inner + matrices * d * ff
    parameters = layers * (encoder_layer + 2 * d) + decoder_layers * (decoder_layer + 2 * d * inner + 3 * d) + 2 * d
    parameters += config.vocab_size * d * (1 if config.tie_word_embeddings else 2)
    if config.position_encoding == "relative":
        parameters += 2 * config.relative_attention_num_buckets * config.num_heads
    weights = layers * encoder_layer * encoder_slots + decoder_layers * decoder_layer * decoder_slots
    weights += decoder_layers * 2 * d * inner * encoder_slots + config.vocab_size * d * decoder_slots
    pairs = layers * encoder_slots + decoder_layers * (0.5 * decoder_slots + decoder_slots)
    flops = 6.0 * weights + 3.5 * 4 * inner * pairs * max_length

    size = _ACTIVATION_BYTES[precision]
    # Residual stream and norm of each sublayer; q, k, v and the result; of the feed-forward layer its first projection
    # and what its activation makes of it, or where it is gated both projections: the rest is made again.
    kept_encoder = size * encoder_slots * (4 * d + 4 * inner + 2 * ff)
    kept_decoder = size * decoder_slots * (6 * d + 6 * inner + 2 * ff) + size * encoder_slots * 2 * inner
    if gradient_checkpointing:
        activations = size * d * (layers * encoder_slots + decoder_layers * decoder_slots)
        activations += max(kept_encoder, kept_decoder)
    else:
        activations = layers * kept_encoder + decoder_layers * kept_decoder
    return Estimate(
        parameters=parameters,
        state_gib=parameters * _STATE_BYTES[precision] / shard_degree / _GIB,
        activations_gib=activations / _GIB,
        slots=encoder_slots + decoder_slots,
        flops=flops,
    )
