"""What processes that are ranks share: the messages that they log, and how they end."""

import logging
import os
import sys
from typing import NoReturn

from torch import distributed


class Logged(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def leave() -> NoReturn:
    """End the process at once, with success.

    The threads of gloo may hold tensors after their work is done. They crash while the interpreter shuts down, with
    "terminate called without an active exception" (pytorch/pytorch, pull request 179291).
    """
    distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
