"""Counts the forks that led to this process: a child must not use the devices and threads of its parent.

Every hook compares the count with that of its session. The process id would need a system call each time.
"""

from __future__ import annotations

import os

count = 0


def _forked() -> None:
    global count
    count += 1


os.register_at_fork(after_in_child=_forked)
