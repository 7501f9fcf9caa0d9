"""The entry point of the command `optimize-export`.

`optimizer` is a common name: with PYTHONPATH=. in a folder that holds an `optimizer.py`, importing it would find that file.
The name of this module isn't, and it takes the package from next to itself.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path


def main() -> int:
    """Run the command and return its exit code."""
    spec = PathFinder.find_spec("optimizer", [str(Path(__file__).resolve().parent)])
    if spec is None or spec.loader is None:
        raise ImportError("The installation of optimize-export is incomplete: install it again.", name="optimizer")
    package = module_from_spec(spec)
    sys.modules["optimizer"] = package
    spec.loader.exec_module(package)
    from optimize_export.errors import missing_package

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
