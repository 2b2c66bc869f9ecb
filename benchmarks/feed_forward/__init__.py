"""The fused kernel of the gated feed-forward layer, tile by tile, beside a product of cuBLAS and one more kernel."""
