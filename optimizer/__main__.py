"""`python -m optimizer`, the same as the command `optimize-export`."""

import sys

from optimizer.command.cli import main

if __name__ == "__main__":
    sys.exit(main())
