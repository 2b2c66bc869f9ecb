"""Pretraining by several processes beside one."""
