"""`python -m vdnn`: hands over to vdnn.cli.main."""

from __future__ import annotations

import sys

from vdnn.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
