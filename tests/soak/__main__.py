"""Runs the slow tests in parts: python -m tests.soak [PART ...]."""

import sys

from tests.soak.parts import main

if __name__ == "__main__":
    sys.exit(main())
