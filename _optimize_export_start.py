"""The entry point of the command `optimize-export`.

`optimizer` is a common name: with PYTHONPATH=. in a folder that holds an `optimizer.py`, importing it would find that file.
The name of this module isn't, and it takes the package from this installation.
"""

import sys

from optimize_export.errors import missing_package
from optimize_export.shadowing import own_package


def main() -> int:
    """Run the command and return its exit code."""
    own_package("optimizer")
    try:
        from optimizer.command.cli import main as run
    except ModuleNotFoundError as error:
        if (sentence := missing_package(error)) is None:
            raise
        sys.stderr.write(f"optimize-export: error: {sentence}\n")
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(main())
