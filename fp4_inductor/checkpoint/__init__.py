"""Readers of FP4 checkpoint layouts."""
