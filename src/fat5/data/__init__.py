"""Data: tokenizer, pretokenised corpora, denoising and packing. Knows no model."""
