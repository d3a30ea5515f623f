"""How often this process was forked off another: what was made before a fork is not for the child.

Asked at every hook; the process id would be a system call each time.
"""

from __future__ import annotations

import os

_forks = 0


def count() -> int:
    return _forks


def _forked() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_forked)
