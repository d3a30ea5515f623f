"""The runtime: what drives devices. For now it holds the link probe only; it grows floor by floor."""
