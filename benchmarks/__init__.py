"""What brim costs and what its losses equal, measured. Run from the repository's root: python -m benchmarks.NAME."""
