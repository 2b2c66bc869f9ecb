"""Pretraining: the run's configuration, the trainer, checkpoints, evaluation and the loss curve."""
