"""Benchmarks: run from the repository's root, for example ``python -m benchmarks.step_time --help``."""
