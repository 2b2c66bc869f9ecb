"""Finetuning and evaluation: one file a task behind one registry."""
