"""Compare a bundle with itself in other versions of its runtimes, and with another bundle."""

from optimizer.comparing.bundles import compare_bundles
from optimizer.comparing.upgrading import verify_with

__all__ = [
    "compare_bundles",
    "verify_with",
]
