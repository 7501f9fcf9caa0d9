"""Tests marked `gpu` run where torch finds a CUDA device, and are left out, visibly, where it doesn't."""

import pytest
import torch


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
