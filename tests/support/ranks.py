"""How a process that is one of several ranks ends."""

import os
import sys
from typing import NoReturn

from torch import distributed


def leave() -> NoReturn:
    """End the process at once, with success.

    The threads of gloo may hold tensors after their work is done. They crash while the interpreter shuts down, with
    "terminate called without an active exception" (pytorch/pytorch, pull request 179291).
    """
    distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
