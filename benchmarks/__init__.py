"""Benchmarks of FAT5 and its peers: `python -m benchmarks --help`."""
