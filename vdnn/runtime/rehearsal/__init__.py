"""Rehearses one step on a virtual machine, with tensors without data, and plans it."""
