"""Planning: decides which storages to keep, offload or recompute. Plain data in and out; never imports torch."""
