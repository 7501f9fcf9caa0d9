"""Tests marked `gpu` run if torch finds enough CUDA devices; otherwise they are deselected, visibly."""

import gc
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from exporters.child_process import one_child

# A shell that starts the tests in the background makes them and their child processes ignore Ctrl-C. The tests of
# interrupts need Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# pytest adds its handlers to loggers that don't propagate. torch describes each compilation in detail to this one if it
# has handlers, which takes a third of the time of a compilation.
logging.getLogger("torch.__trace").propagate = True

# Tests of the timing ask for it. All others export without it, which would take seconds each.
os.environ.setdefault("OPTIMIZE_EXPORT_NO_BENCH", "1")

# Inductor compiles a test program for each kind of vector instructions in each process and each new cache, which takes
# ten seconds. It then believes the processor's flags only.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    waiting = [item for item in items if _gpus(item) > found]
    if waiting:
        items[:] = [item for item in items if item not in waiting]
        config.hook.pytest_deselected(items=waiting)


@pytest.fixture(scope="session", autouse=True)
def _one_child() -> Iterator[None]:
    """Keep one child process for the files of all tests: its start takes half a second."""
    with one_child():
        yield


@pytest.fixture
def write(tmp_path: Path) -> Iterator[object]:
    """Writes a user's files, and forgets the modules of the user at the end."""
    from user_folder import UserFolder

    from optimizer.command.user_code import names_restored

    with names_restored():
        yield UserFolder(tmp_path)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Exempt all objects of earlier tests from garbage collection.

    torch.compile and recordings collect all garbage. A process that has run many tests holds millions of objects of
    torch's, and visiting them took most of the time of the later tests.
    """
    gc.collect()
    gc.freeze()


def _gpus(item: pytest.Item) -> int:
    """The number of GPUs that a test needs: 1 for `gpu`, 2 for `gpu(2)`, 0 without the mark."""
    mark = item.get_closest_marker("gpu")
    return 0 if mark is None else mark.args[0] if mark.args else 1


def pytest_report_header() -> str:
    found = torch.cuda.is_available()
    return f"CUDA: {torch.cuda.get_device_name() if found else 'none; tests marked gpu are deselected'}"
