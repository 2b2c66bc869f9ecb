"""A step of AdamWScale beside PyTorch's AdamW and Adafactor: tensors, implementations, gate of the case `optimizer`."""
