"""Pretraining for minutes, then every task on the pretrained model and on a random twin."""
