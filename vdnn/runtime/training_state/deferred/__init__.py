"""Optimizer steps that run in the next forward pass."""
