"""How long tests wait for what only a hanging program never does.

Long, because a busy machine can be ten times slower than a free one. A test that hangs ends at this limit, with a
message of its own, before pytest's limit for a test (pyproject.toml).
"""

PATIENCE_S = 900.0
