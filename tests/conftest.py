"""Tests marked `gpu` run where torch finds a CUDA device, and are left out, visibly, where it doesn't."""

import signal

import pytest
import torch

# A shell that starts the tests in the background makes them ignore Ctrl-C, and with them the programs that they start:
# the tests of interrupts need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    waiting = [item for item in items if item.get_closest_marker("gpu")]
    if waiting:
        items[:] = [item for item in items if item not in waiting]
        config.hook.pytest_deselected(items=waiting)


def pytest_report_header() -> str:
    found = torch.cuda.is_available()
    return f"CUDA: {torch.cuda.get_device_name() if found else 'none; tests marked gpu are deselected'}"
