"""The peak memory of a block, whatever the system tells about the process."""

from pathlib import Path

import pytest

from optimize_export.runtime import cpus
from optimize_export.runtime.cpus import available_memory
from optimizer.tuning import benchmark
from optimizer.tuning.benchmark import PeakMemory


@pytest.fixture
def told(tmp_path, monkeypatch):
    """The folder that stands for /proc; `self/clear_refs` can be written."""
    real = Path
    for module in (benchmark, cpus):
        monkeypatch.setattr(module, "Path", lambda path: real(str(path).replace("/proc", str(tmp_path))))
    (tmp_path / "self").mkdir()
    return tmp_path


def tell(told: Path, **fields: int) -> None:
    lines = [b"Name:\tp\xff\xfe", *(f"{name}:\t{size} kB".encode() for name, size in fields.items())]
    (told / "self" / "status").write_bytes(b"\n".join(lines))


@pytest.mark.parametrize(("peak", "rise"), [(160, 60 * 1024), (100, 0), (72, 0)])
def test_a_peak_below_the_level_at_the_start_is_no_rise(told, peak, rise):
    tell(told, VmRSS=100, VmHWM=100)
    with PeakMemory() as found:
        tell(told, VmRSS=50, VmHWM=peak)
    assert (found.bytes, found.before, found.exact) == (rise, 100 * 1024, True)


@pytest.mark.parametrize("before", [{}, {"VmRSS": 100}, None], ids=["no fields", "no peak", "no file"])
def test_a_system_that_tells_nothing_gives_no_exact_peak(told, before):
    if before is not None:
        tell(told, **before)
    with PeakMemory() as found:
        pass
    assert not found.exact
    assert found.bytes >= 0


def test_the_status_may_be_lost_during_the_block(told):
    tell(told, VmRSS=100, VmHWM=100)
    with PeakMemory() as found:
        (told / "self" / "status").unlink()
    assert not found.exact


def test_the_free_memory_is_unknown_where_the_system_tells_nothing(told):
    assert available_memory() is None
    (told / "meminfo").write_text("MemTotal: 8 kB\nMemAvailable: 5 kB\n")
    assert available_memory() == 5 * 1024
    (told / "meminfo").write_text("MemTotal: 8 kB\n")
    assert available_memory() is None
