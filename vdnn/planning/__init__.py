"""The half that decides: plain data in, plain data out. Never imports torch."""
