"""Benchmarks, each runnable as ``python -m fp4_inductor.bench.<name>``."""
