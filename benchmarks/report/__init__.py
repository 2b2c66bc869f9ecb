"""One page with all figures and tables of benchmarks/results."""
