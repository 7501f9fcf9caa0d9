"""`python -m optimizer`, the same as the command `optimize-export`."""

import sys

from _optimize_export_start import main

if __name__ == "__main__":
    sys.exit(main())
