"""The `generation` case: greedy search and beams beside Transformers' T5."""
