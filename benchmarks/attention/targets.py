"""The figures to reach on one H200, bf16 and fp16 alike: times relative to cuDNN without a bias, in the same run."""

from __future__ import annotations

RATIOS: dict[str, dict[tuple[int, int, str], tuple[float, float]]] = {
    "fat5-triton": {
        (1024, 64, "full"): (1.22, 1.45),
        (1024, 64, "causal"): (1.30, 1.45),
        (1024, 128, "full"): (1.58, 1.60),
        (1024, 128, "causal"): (1.70, 1.65),
        (4096, 64, "full"): (1.18, 1.42),
        (4096, 64, "causal"): (1.28, 1.48),
        (4096, 128, "full"): (1.46, 1.43),
        (4096, 128, "causal"): (1.50, 1.50),
    },
    "fat5-hopper": {
        (1024, 64, "full"): (1.16, 1.20),
        (1024, 64, "causal"): (1.06, 1.06),
        (1024, 128, "full"): (1.12, 1.20),
        (1024, 128, "causal"): (1.00, 1.12),
        (4096, 64, "full"): (1.00, 1.22),
        (4096, 64, "causal"): (1.00, 1.10),
        (4096, 128, "full"): (1.10, 1.18),
        (4096, 128, "causal"): (0.98, 1.08),
    },
}
"""Forward and backward at most this many times the yardstick, by (length, head_dim, mask); B * L = 16,384, 12 heads."""

DETERMINISTIC_BACKWARD = 1.35
"""The Hopper kernels' deterministic backward at most this many times the yardstick, at each of those shapes."""

DOCUMENTS_SHARE = 0.8
"""Packed documents of 100 to 1,024 tokens at least this share of the TFLOP/s at L = 1,024 without padding."""

SPEED_UP_OVER_MATERIALISED = (3.6, 3.2)
"""Forward and backward at least so much faster than SDPA with a materialised bias, L = 1,024, D = 64."""

MEMORY_AT_8192 = 1.10
"""Peak of forward and backward at most so many times cuDNN's without a bias, at L = 8,192."""

LINEAR_GROWTH = 1.10
"""Peak at the longest length, at most so many times what the peak at L = 8,192 grows to in proportion."""

DENSE_SPEED_UP = (2.5, 2.0)
"""Forward and backward with a dense bias at least so much faster than SDPA's."""

PACKED_SPEED_UP = 1.8
"""Forward and backward of a packed batch at least so much faster than SDPA on the padded one, half of it padding."""
