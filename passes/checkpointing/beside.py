"""Calls of torch functions that are made while a forward runs, and aren't the forward's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Beside(threading.local):
    """Whether this thread makes such calls just now.

    They are those that compute again, as a gradient may be asked for in a forward, and those of who shards the module.
    """

    on = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        before, self.on = self.on, True
        try:
            yield
        finally:
            self.on = before


BESIDE = _Beside()
