"""Compare a bundle with itself in other versions of its runtimes, and with another bundle."""

from optimizer.comparing.upgrading import verify_with

__all__ = [
    "verify_with",
]
