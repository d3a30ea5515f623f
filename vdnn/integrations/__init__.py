"""vdnn where people train: callbacks for trainers, and what several ranks need. Importing this imports no library.

`huggingface` and `lightning` need the libraries of their names, and say which extra brings them. `ranks` needs torch
alone. What works with what, and the test that holds it, is in docs/integrations.md.
"""
