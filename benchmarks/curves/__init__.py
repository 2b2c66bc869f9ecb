"""Learning curves of FAT5 and of Transformers' T5 on the same batches."""
