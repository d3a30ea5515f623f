"""The parts of `make gpu-proof` that are not the sweep's: what it runs, the link, what a GPU saves."""
