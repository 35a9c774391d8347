"""Benchmarks: of MoE layers (``python -m fp4_inductor bench``) and of recognition (a module to run)."""
