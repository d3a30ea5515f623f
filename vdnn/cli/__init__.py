"""The command line: one module per command, and `main`, which dispatches to them."""
