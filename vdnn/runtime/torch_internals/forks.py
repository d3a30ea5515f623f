"""How often this process was forked off another: what was made before a fork is not for the child.

Read at every hook, as a number that is there: the process id would be a system call each time.
"""

from __future__ import annotations

import os

count = 0


def _forked() -> None:
    global count
    count += 1


os.register_at_fork(after_in_child=_forked)
