"""`python -m vdnn`: calls vdnn.cli.main."""

from __future__ import annotations

import sys

from vdnn.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
