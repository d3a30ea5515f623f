"""Runs one step on tensors without data, on a virtual machine, and plans it."""
