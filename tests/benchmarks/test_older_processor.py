"""The benchmark's command that hides AVX-512: what a library and /proc/cpuinfo then say about the processor."""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from benchmark_runs import imported

# The last function has the bytes of `cpuid` in another instruction, and ends the process if it is changed.
_LIBRARY = r"""
#include <cpuid.h>
unsigned leaf7(unsigned part) { unsigned r[4]; __cpuid_count(7, 0, r[0], r[1], r[2], r[3]); return r[part]; }
unsigned constant(void) { return 0xa20fa20f; }
"""
_SEEN = """
import ctypes, tiny
library = ctypes.CDLL(tiny.__path__[0] + "/tiny.so")
library.leaf7.restype = library.constant.restype = ctypes.c_uint
print(library.leaf7(1), library.leaf7(2), library.constant())
print("avx512" in open("/proc/cpuinfo").read(), "with AVX-512 hidden" in open("/proc/cpuinfo").read())
"""
_AVX2, _AVX512F, _VNNI = 1 << 5, 1 << 16, 1 << 11


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not (shutil.which("objdump") and shutil.which("cc")),
    reason="it needs objdump and a C compiler on x86-64",
)
def test_avx512_is_hidden_from_a_library_and_nothing_else(tmp_path, monkeypatch):
    package = tmp_path / "source" / "tiny"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    arguments = ["-shared", "-fPIC", "-O2", "-xc", "-", "-o", package / "tiny.so"]
    subprocess.run(["cc", *arguments], input=_LIBRARY, text=True, check=True)
    monkeypatch.syspath_prepend(package.parent)
    with imported("older_processor") as older:
        monkeypatch.setattr(older, "FOLDER", tmp_path / "older")
        monkeypatch.setattr(older, "PACKAGES", ("tiny", "absent"))
        hidden = older.made()
        assert older.made() == hidden, "made once"

    def seen(environment: dict[str, str]) -> list[str]:
        command = [sys.executable, "-c", _SEEN]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()

    before = seen({**hidden, "LD_PRELOAD": "", "PYTHONPATH": str(package.parent)})
    after = seen(hidden)
    assert int(after[0]) & _AVX2 == int(before[0]) & _AVX2
    assert int(after[0]) & _AVX512F == int(after[1]) & _VNNI == 0
    assert after[2:] == [str(0xA20FA20F), "False", "True"]
    assert Path(hidden["CXX"]).read_text().endswith('"${@/-march=native/-march=haswell}"\n')
