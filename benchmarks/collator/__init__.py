"""The data pipeline's speed: documents, the gate and the measurements of the case `collator`."""
