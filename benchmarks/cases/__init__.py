"""One module a case, found by its name; `benchmarks.registry` says what a case has."""
