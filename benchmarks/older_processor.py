"""Run a command as on a processor with AVX2, but without AVX-512, VNNI, bfloat16 and AMX, such as AMD's before Zen 4.

    python benchmarks/older_processor.py python benchmarks/accuracy.py --json build/accuracy_avx2.json

Libraries choose their kernels by the instruction `cpuid`, which no environment variable changes for onnxruntime and
OpenVINO. So this copies torch, onnxruntime and OpenVINO to build/older_processor, with each `cpuid` replaced by an
instruction that doesn't exist. A small library, loaded before all others, catches these, runs `cpuid`, and hides the
instructions that such a processor lacks. It hides them in /proc/cpuinfo too, where the name of the processor then says so.
Inductor compiles for Haswell.

This hides instructions, it doesn't make another processor: the rest, such as caches and the speed of AVX2, is this one's.
It needs Linux on x86-64, objdump and a C compiler, and takes two minutes the first time; delete the folder after an update.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "build" / "older_processor"
PACKAGES = ("torch", "onnxruntime", "openvino")
_CPUID = b"\x0f\xa2"
# Not ud2, which compilers put where a program must end.
_INVALID = b"\x0f\x04"
_CATCHER = r"""
#define _GNU_SOURCE
#include <cpuid.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <ucontext.h>

static struct sigaction before;

static void catch(int number, siginfo_t *info, void *context) {
    greg_t *at = ((ucontext_t *)context)->uc_mcontext.gregs;
    if (memcmp((void *)at[REG_RIP], "\x0f\x04", 2)) {
        sigaction(SIGILL, &before, 0);
        return;
    }
    unsigned leaf = at[REG_RAX], sub = at[REG_RCX], a, b, c, d;
    __cpuid_count(leaf, sub, a, b, c, d);
    if (leaf == 7 && sub == 0) {
        b &= ~0xdc230000u;  /* avx512 f, dq, ifma, pf, er, cd, bw, vl */
        c &= ~0x00005842u;  /* avx512 vbmi, vbmi2, vnni, bitalg, vpopcntdq */
        d &= ~0x03c0010cu;  /* avx512 4vnniw, 4fmaps, vp2intersect, fp16; amx bf16, tile, int8 */
    } else if (leaf == 7 && sub == 1) {
        a &= ~0x00a00030u;  /* avx-vnni, avx512 bf16, amx fp16, avx-ifma */
        d &= ~0x00080530u;  /* avx-vnni-int8, avx-ne-convert, amx complex, avx-vnni-int16, avx10 */
    } else if (leaf == 0x1d || leaf == 0x1e || leaf == 0x24) {
        a = b = c = d = 0;  /* amx, avx10 */
    }
    at[REG_RAX] = a, at[REG_RBX] = b, at[REG_RCX] = c, at[REG_RDX] = d;
    at[REG_RIP] += 2;
}

__attribute__((constructor)) static void start(void) {
    struct sigaction action = {.sa_sigaction = catch, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGILL, &action, &before);
}

static int opened(const char *name, const char *path, int flags, va_list rest) {
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, name);
    if (path && !strcmp(path, "/proc/cpuinfo"))
        path = CPUINFO;
    return real(path, flags, flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0);
}

#define OPEN(name) int name(const char *path, int flags, ...) { \
    va_list rest; va_start(rest, flags); int file = opened(#name, path, flags, rest); va_end(rest); return file; }
OPEN(open)
OPEN(open64)
"""


def made() -> dict[str, str]:
    """Make the folder if it is missing; return the environment in which a command sees the older processor."""
    catcher, compiler, cpuinfo = FOLDER / "catch.so", FOLDER / "c++", FOLDER / "cpuinfo"
    if not catcher.exists():
        shutil.rmtree(FOLDER, ignore_errors=True)
        for package in PACKAGES:
            _copy(package)
        told = re.sub(r"\b(avx512\w*|avx_vnni\w*|amx_\w+) ?", "", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
        cpuinfo.write_text(re.sub(r"(?m)^(model name.*)", r"\1 with AVX-512 hidden", told), encoding="utf-8")
        compiler.write_text('#!/bin/bash\nexec c++ "${@/-march=native/-march=haswell}"\n', encoding="utf-8")
        compiler.chmod(0o755)
        arguments = ["-shared", "-fPIC", "-O2", f'-DCPUINFO="{cpuinfo}"', "-xc", "-", "-ldl", "-o", str(catcher)]
        subprocess.run(["cc", *arguments], input=_CATCHER, text=True, check=True)
    paths = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "LD_PRELOAD": str(catcher),
        "PYTHONPATH": f"{FOLDER}{os.pathsep}{paths}" if paths else str(FOLDER),
        "CXX": str(compiler),
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    }


def _copy(package: str) -> None:
    """Copy a package with links to its files, except for those with the instruction, which become files of their own."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return
    target = FOLDER / package
    shutil.copytree(Path(spec.origin).parent, target, copy_function=os.symlink)
    for path in target.rglob("*.so*"):
        data = bytearray(path.read_bytes())
        if _CPUID not in data or not data.startswith(b"\x7fELF"):
            continue
        if not (places := _instructions(path, bytes(data))):
            continue
        for place in places:
            assert data[place : place + 2] == _CPUID
            data[place : place + 2] = _INVALID
        path.unlink()
        path.write_bytes(data)
        print(f"{path.relative_to(FOLDER)}: {len(places)} times cpuid", file=sys.stderr, flush=True)


def _instructions(path: Path, data: bytes) -> list[int]:
    """The offsets of `cpuid` in a file. The two bytes alone occur in other instructions, too."""
    start, size, count = *struct.unpack_from("<Q", data, 0x20), *struct.unpack_from("<HH", data, 0x36)
    segments = [struct.unpack_from("<IIQQQQ", data, start + size * number) for number in range(count)]
    found = []
    with subprocess.Popen(["objdump", "-d", "--no-show-raw-insn", path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.rstrip().endswith("\tcpuid"):
                address = int(line.partition(":")[0], 16)
                found += [
                    offset + address - at
                    for kind, _, offset, at, _, length in segments
                    if kind == 1 and at <= address < at + length
                ]
    return found


if __name__ == "__main__":
    os.execvpe(sys.argv[1], sys.argv[1:], made())
