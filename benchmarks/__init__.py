"""Measure what brim costs and what its losses equal. Run from the repository's root: python -m benchmarks.NAME."""
