"""Benchmarks of the native core and the hooks: copies, bookkeeping, the pool, a save and its use."""
