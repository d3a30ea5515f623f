"""The public face of the runtime: the session, its saved-tensor hooks, and its report."""
