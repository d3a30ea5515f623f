"""Saved storages: their identity, and their copies on the device, on the host or in flight."""
