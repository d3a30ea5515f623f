"""One saved storage: on the device, on the host, in flight or discarded, and what identifies it."""
