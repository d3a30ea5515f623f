"""The search for the fastest plan under a budget: the policies `auto`, `auto-offload` and `prefix-cut`."""
