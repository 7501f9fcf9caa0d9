"""Every benchmark can be imported; its other tests take longer, and `make test-bench` runs them."""

from pathlib import Path

import pytest
from benchmark_runs import imported

NAMES = sorted(path.stem for path in (Path(__file__).parents[1] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_can_be_imported(name: str) -> None:
    with imported(name) as module:
        assert module.__doc__
