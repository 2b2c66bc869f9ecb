"""Attention beside its peers: workloads, implementations, the gate and the tables of the case `attention`."""
