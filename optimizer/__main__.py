"""`python -m optimizer`, the same as the command `optimize-export`."""

import sys

from optimize_export.errors import missing_package

if __name__ == "__main__":
    try:
        from optimizer.command.cli import main
    except ModuleNotFoundError as error:
        if (sentence := missing_package(error)) is None:
            raise
        sys.stderr.write(f"optimize-export: error: {sentence}\n")
        sys.exit(2)
    sys.exit(main())
