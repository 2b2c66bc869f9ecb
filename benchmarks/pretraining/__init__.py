"""The whole pretraining step of FAT5 and of Transformers' T5."""
