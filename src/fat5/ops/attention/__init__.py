"""Attention with an additive bias; `fat5.ops` exports the public names."""
