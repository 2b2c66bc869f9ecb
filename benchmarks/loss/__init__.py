"""The cases `cross_entropy` and `linear_cross_entropy`: workloads, gate, implementations, tables."""
