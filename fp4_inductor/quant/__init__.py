"""Quantise, pack, unpack and dequantise FP4 block formats in pure torch."""
