"""A runtime that crashes, hangs or is killed ends a child process, not this one, and is named in a sentence."""

import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path

import crashing_runtimes as runtimes
import pytest
import torch

from exporters import child_process
from exporters.child_process import InChild, OwnChild
from exporters.errors import RuntimeCrashed


def opened(kind: type[runtimes.Runs], folder: Path) -> InChild:
    return InChild(folder / "model.onnx", partial(kind, "model.onnx"), "onnxruntime 1.31")


def test_a_file_that_runs_returns_the_runtimes_outputs(tmp_path: Path) -> None:
    loaded = opened(runtimes.Runs, tmp_path)
    assert (loaded.device, loaded.settings, loaded.placement) == ("cpu", {}, None)
    rows = torch.arange(6.0).view(2, 3)
    # A view with strides, and types that numpy has and hasn't.
    inputs = (rows.t(), torch.tensor([True, False]), torch.tensor([1.5, float("nan")], dtype=torch.bfloat16))
    first, second, third = loaded(inputs[0], inputs[1].int(), inputs[2])
    assert torch.equal(first, rows.t() + 1)
    assert second.dtype == torch.int32
    assert third.dtype == torch.bfloat16
    assert third[0] == 1.5
    assert third[1].isnan()


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (runtimes.CrashesAtLoad, "onnxruntime 1.31 crashes (SIGSEGV) while it loads the file"),
        (
            runtimes.RunsOutOfMemory,
            "onnxruntime 1.31 is killed (SIGKILL, mostly because the memory is exhausted) while it loads the file",
        ),
        (runtimes.Exits, "onnxruntime 1.31 ends its process (exit code 3) while it loads the file"),
        (runtimes.Hangs, "onnxruntime 1.31 hangs (it didn't answer in 0.5 seconds) while it loads the file"),
    ],
)
def test_a_crash_is_an_error_that_names_it(
    kind: type[runtimes.Runs], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = opened(runtimes.Runs, tmp_path)
    other.close()
    with monkeypatch.context() as patched:
        if kind is runtimes.Hangs:
            patched.setattr(child_process, "_LONGEST", 0.5)
        with pytest.raises(RuntimeCrashed) as error:
            opened(kind, tmp_path)
    assert str(error.value) == sentence
    # The next file gets a new child.
    (output,) = opened(runtimes.Runs, tmp_path)(torch.zeros(2))
    assert output.tolist() == [1, 1]


def test_exceptions_of_the_runtime_pass_and_its_prints_do_no_harm(tmp_path: Path) -> None:
    loaded = opened(runtimes.PrintsAndRaises, tmp_path)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^Got invalid dimensions$"):
            loaded(torch.zeros(2))
    with pytest.raises(RuntimeError, match="OfExtensionError: not a runtime's own name"):
        opened(runtimes.RaisesWhatCannotBePickled, tmp_path)(torch.zeros(2))


def test_a_file_of_the_user_that_is_called_like_a_module_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wave.py").write_text("raise SystemExit")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=re.escape(os.path.join(os.path.dirname(os.__file__), "wave.py"))):
        opened(runtimes.ImportsWave, tmp_path)(torch.zeros(1))


def test_threads_may_use_one_child(tmp_path: Path) -> None:
    loaded = [opened(runtimes.Runs, tmp_path) for _ in range(4)]
    found: dict[int, float] = {}

    def run(number: int) -> None:
        for _ in range(20):
            found[number] = loaded[number](torch.full((2,), float(number)))[0][0].item()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: number + 1.0 for number in range(4)}


def run_program(text: str, **keywords: object) -> subprocess.CompletedProcess[str]:
    root = Path(child_process.__file__).parents[1]
    paths = os.pathsep.join([str(root), str(root / "tests" / "support")])
    environment = {**os.environ, "PYTHONPATH": paths}
    program = textwrap.dedent(text)
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        [sys.executable, "-W", "error", "-c", program], env=environment, capture_output=True, text=True, **keywords
    )


@pytest.mark.slow
def test_the_child_ends_with_the_context_or_the_process_and_after_an_interrupt(tmp_path: Path) -> None:
    done = run_program(
        """
        import os, signal, sys, threading, time
        from functools import partial
        from pathlib import Path
        import crashing_runtimes as runtimes, torch
        from exporters import child_process
        from exporters.child_process import InChild, one_child

        def pid():
            return child_process._child._process.pid

        with one_child():
            with one_child():
                InChild(Path("m"), partial(runtimes.Runs, "m"), "onnxruntime")
                inner = pid()
            loaded = InChild(Path("m"), partial(runtimes.Runs, "m"), "onnxruntime")
            assert pid() == inner
            # A fork of this process gets a child of its own.
            fork = os.fork()
            if fork == 0:
                same = InChild(Path("m"), partial(runtimes.Runs, "m"), "onnxruntime")
                os._exit(0 if pid() != inner and same(torch.zeros(1))[0].item() == 1 else 1)
            assert os.waitpid(fork, 0)[1] == 0
            assert loaded(torch.zeros(1))[0].item() == 1
        assert child_process._child is None
        assert not os.path.exists(f"/proc/{inner}")
        threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
        try:
            InChild(Path("m"), partial(runtimes.Hangs, "m"), "onnxruntime")
        except KeyboardInterrupt:
            print("interrupted")
        InChild(Path("m"), partial(runtimes.Runs, "m"), "onnxruntime")
        print(pid())
        """
        # Python 3.12 warns at a fork with threads; torch has some.
        .replace("fork = os.fork()", "import warnings; warnings.simplefilter('ignore'); fork = os.fork()"),
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    said, last = done.stdout.split()
    assert said == "interrupted"
    assert not os.path.exists(f"/proc/{last}")
    assert list(tmp_path.iterdir()) == []


def test_without_an_interpreter_to_start_files_run_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    child_process.can_start.cache_clear()
    try:
        assert not child_process.can_start()
    finally:
        monkeypatch.undo()
        child_process.can_start.cache_clear()
    assert child_process.can_start()


def test_an_own_child_calls_an_object_and_ends_when_it_hangs() -> None:
    child = OwnChild(partial(partial, pow, 2), "the service")
    assert child(5, longest=60) == 32
    child.close()
    child = OwnChild(partial(partial, time.sleep, 600), "the service")
    with pytest.raises(RuntimeCrashed, match=r"the service hangs \(it didn't answer in 0.5 seconds\)"):
        child(longest=0.5)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_busy_child_ends_after_its_parent() -> None:
    code = "import os, threading, time; from functools import partial; from exporters.child_process import OwnChild\n"
    code += "child = OwnChild(partial(partial, time.sleep, 600), 'it'); print(child.pid, flush=True)\n"
    code += "threading.Timer(0.2, os._exit, [0]).start(); child(longest=600)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    place, end = Path(f"/proc/{int(done.stdout)}/cmdline"), time.monotonic() + 60
    # The process may stay in the table until its new parent asks for its exit code.
    while place.exists() and place.read_bytes():
        assert time.monotonic() < end
        time.sleep(0.05)
