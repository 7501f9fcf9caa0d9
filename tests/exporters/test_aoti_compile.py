"""Compiling with a time limit in a child process, and the options of AOTInductor."""

import contextlib
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from exportable_models import Mlp, floats, mlp_calls
from tiny_models import enliven
from torch import nn

from exporters import Adapter, AotiExporter, ExportError, ExportRequest, aoti_compile, exporter_named
from exporters.aoti_compile import Compilation
from exporters.base import Captures
from exporters.errors import RouteRefused

# A process that starts another one, as a compiler does, and writes the ids of both.
_BUSY = """
import os, pathlib, subprocess, sys, time
folder = pathlib.Path({folder!r})
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(folder / "ids.tmp").write_text(f"{{os.getpid()}} {{other.pid}}")
(folder / "ids.tmp").rename(folder / "ids")
{end}
"""


@pytest.fixture
def program():
    return torch.export.export(nn.Linear(3, 2), (floats(2, 3),))


@pytest.fixture
def child(monkeypatch, tmp_path):
    """A function that sets what the child process runs in place of the compilation."""
    start = subprocess.Popen

    def runs(end):
        def started(command, **options):
            return start([*command[:3], _BUSY.format(folder=str(tmp_path), end=end)], **options)

        monkeypatch.setattr(aoti_compile.subprocess, "Popen", started)

    return runs


def ids(folder):
    until = time.monotonic() + 60
    while not (folder / "ids").exists() and time.monotonic() < until:
        time.sleep(0.01)
    return [int(each) for each in (folder / "ids").read_text().split()]


def has_ended(process):
    """Whether a process is gone, or only waits for its new parent to notice that it ended."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_when_the_time_is_up_the_child_and_what_it_started_are_ended(child, program, tmp_path):
    child("time.sleep(600)")
    with pytest.raises(RouteRefused, match=r"^compiling takes longer than the 3 s that were left for it$"):
        Compilation(program, (), tmp_path).wait(time.monotonic() + 3)
    assert all(map(has_ended, ids(tmp_path)))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_interrupt_ends_the_child_too(child, program, tmp_path, monkeypatch):
    wait = subprocess.Popen.wait

    def interrupted(process, timeout=None):
        if timeout is None:
            return wait(process)
        ids(tmp_path)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    child("time.sleep(600)")
    with pytest.raises(KeyboardInterrupt):
        Compilation(program, (), tmp_path).wait(time.monotonic() + 600)
    assert all(map(has_ended, ids(tmp_path)))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("end", "sentence"),
    [
        ("os.kill(os.getpid(), 9)", r"is killed \(SIGKILL, mostly because the memory is exhausted\)"),
        ("os.abort()", r"crashes \(SIGABRT\)"),
        ("sys.exit(3)", r"ends its process \(exit code 3\)"),
    ],
)
def test_a_child_that_dies_is_a_refusal(child, program, tmp_path, end, sentence):
    child(end)
    with pytest.raises(RouteRefused, match=f"^AOTInductor {sentence}$"):
        Compilation(program, (), tmp_path).wait(time.monotonic() + 60)
    assert all(map(has_ended, ids(tmp_path)))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_child_ends_with_its_parent(tmp_path):
    code = _BUSY.format(
        folder=str(tmp_path),
        end="from exporters import aoti_compile\nimport threading\n"
        "threading.Thread(target=aoti_compile._end_with_parent, daemon=True).start()\ntime.sleep(600)",
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, start_new_session=True)
    started = ids(tmp_path)
    process.stdin.close()
    process.wait(60)
    assert all(map(has_ended, started))


@torch.library.custom_op("aoti_test::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)


@pytest.mark.slow
def test_operators_of_this_process_cannot_be_compiled_in_another(tmp_path):
    class Own(nn.Module):
        def forward(self, x):
            return doubled(x) + 1

    exporter = AotiExporter()
    exporter.until = time.monotonic() + 600.0
    with pytest.raises(
        ExportError,
        match=r"aotinductor: another process doesn't know its operator aoti_test::doubled: to compile it in this process, without a time limit, name aoti among the formats; "
        "aotinductor-strict: not tried, because",
    ):
        exporter.export(ExportRequest(Own(), tuple(((floats(size, 3),), {}) for size in (2, 3, 5))), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_time_nothing_is_compiled_and_nothing_is_left(tmp_path):
    exporter = AotiExporter()
    exporter.until = time.monotonic() + 0.0
    with pytest.raises(ExportError, match=r"aotinductor: compiling takes longer than the 0 s that were left for it; "):
        exporter.export(ExportRequest(enliven(Mlp()), mlp_calls(2, 3, 5)), tmp_path)
    assert list(tmp_path.iterdir()) == []


class Pairs(nn.Module):
    """Adds rows in pairs, which only even batches allow."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 6)

    def forward(self, x):
        return self.linear(x).view(-1, 2, 6).sum(1)


@pytest.mark.slow
def test_a_child_compiles_the_same_file_from_the_shared_capture_and_may_begin_early(tmp_path, monkeypatch):
    start, capture, done = subprocess.Popen, torch.export.export, []

    def started(command, **options):
        # The process for ONNX Runtime, which all tests share, may start now too.
        done.extend(["compile"] if "aoti_compile" in command[-1] else [])
        return start(command, **options)

    def captured(*given, **options):
        done.append("capture")
        return capture(*given, **options)

    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    monkeypatch.setattr(aoti_compile.subprocess, "Popen", started)
    monkeypatch.setattr(torch.export, "export", captured)
    model = enliven(Pairs()).eval()
    calls = tuple(((floats(size, 3),), {}) for size in (4, 6, 2))
    request = ExportRequest(model, calls, captures=Captures(Adapter(model, calls[0][0])))
    begun, bundle = tmp_path / "begun", tmp_path / "bundle"
    begun.mkdir()
    bundle.mkdir()
    exporter = AotiExporter()
    exporter.until = time.monotonic() + 600.0
    with contextlib.closing(exporter.begin(request, begun)):
        made = exporter.export(request, bundle)
    exporter_named("pt2").export(request, begun)
    assert done == ["capture", "compile"]
    assert list(bundle.iterdir()) == [made.path]
    x = floats(8, 3)
    assert torch.allclose(made.load()(x)[0], model(x), atol=1e-5)
    # The condition of the capture is in force in this file too.
    with pytest.raises(ValueError, match="wasn't compiled for inputs of these sizes"):
        made.load()(floats(5, 3))


@pytest.mark.gpu
def test_a_child_compiles_for_the_gpu(tmp_path):
    model = enliven(nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))).eval().cuda().half()
    calls = tuple(((floats(size, 8, 4, 4).cuda().half(),), {}) for size in (4, 6, 2))
    exporter = AotiExporter()
    exporter.until = time.monotonic() + 600.0
    made = exporter.export(ExportRequest(model, calls), tmp_path)
    assert f"CUDA {torch.version.cuda}" in made.notes[-1]
    x = floats(5, 8, 4, 4).cuda().half()
    assert torch.allclose(made.load("cuda")(x)[0], model(x), atol=2e-2)


@pytest.mark.parametrize(
    ("dtype", "device", "shares", "epoch", "expected"),
    [
        (torch.float32, "cpu", True, None, {"max_autotune_gemm": True}),
        (torch.float32, "cpu", True, "0", {"max_autotune_gemm": False}),
        (torch.float32, "cpu", False, None, {"max_autotune_gemm": False}),
        (torch.float32, "cuda", True, None, {"force_layout_optimization": False}),
        (torch.float16, "cuda", True, None, {"force_layout_optimization": True}),
    ],
)
def test_options_by_device_and_build(monkeypatch, dtype, device, shares, epoch, expected):
    class Weight(torch.Tensor):
        is_cuda = device == "cuda"

    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    if epoch is not None:
        monkeypatch.setenv("SOURCE_DATE_EPOCH", epoch)
    monkeypatch.setattr(aoti_compile, "gemm_templates_share_their_work", lambda: shares)
    weight = torch.zeros(1, 1, 1, 1, dtype=dtype).as_subclass(Weight)
    assert aoti_compile._for_speed(SimpleNamespace(state_dict={"weight": weight})) == expected
