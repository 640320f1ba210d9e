"""`python -m kvlease`, the same as the command `kvlease`.

Never: holds logic of its own.
"""

from __future__ import annotations

import sys

from kvlease.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
