"""The parts of `make gpu-proof` besides the sweep: its steps, the link, and what a GPU saves."""
