"""What the native core and the hooks cost: copies, bookkeeping, the pool, a save and its use."""
