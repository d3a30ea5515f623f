"""The runtime: saved-tensor hooks that record steps, follow plans, and offload, reload and recompute storages."""
