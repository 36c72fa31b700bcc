"""`python -m ds_toolkit.guardian ARENA_FOLDER`: start the guardian of an arena."""

from __future__ import annotations

import sys

from ds_toolkit.guardian.process import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
