"""Training in bf16 with and without compensation beside float32, on the shipped text: runs of the case `precision`."""
