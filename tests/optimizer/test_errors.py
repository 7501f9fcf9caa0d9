"""Errors as the user of the command sees them: an exit code, one sentence, and no partial files."""

import importlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
import torch
from safetensors.torch import save_file

from exporters.onnx import OnnxExporter
from exporters.onnx_session import judge_placement
from optimize_export.errors import Terminated
from optimizer.command import cli
from optimizer.exporting import artifact_parity
from optimizer.exporting.artifact_parity import FileProof
from optimizer.parity import judge

ROOT = Path(cli.__file__).parent.parent.parent
NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.norm.running_mean.uniform_(-0.5, 0.5)
        self.norm.running_var.uniform_(0.5, 2.0)
    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)))
"""
INPUTS = "\nexample_inputs = (torch.randn(2, 3, 8, 8),)\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(text: str = "", name: str = "model.py", *, whole: bool = False) -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = textwrap.dedent(text)
    path.write_text(text if whole else NET + text + INPUTS, encoding="utf-8")
    return name


@pytest.fixture
def run(folder, capfd):
    """Runs the command in this process."""

    def run(*arguments: str):
        code = cli.main(arguments)
        out, err = capfd.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return run


@pytest.fixture
def refused(run, folder):
    """Runs the command, which must fail with this code and one line, and must leave no files behind."""

    def refused(code: int, *arguments: str) -> str:
        before = sorted(folder.rglob("*"))
        done = run(*arguments, "--quiet")
        assert done.code == code, done.err
        assert done.out == ""
        assert done.err.count("\n") == 1
        assert done.err.startswith("optimize-export: error: ")
        assert "Traceback" not in done.err
        assert sorted(folder.rglob("*")) == before
        return done.err.removeprefix("optimize-export: error: ").strip()

    return refused


# Usage: errors that are found before the user's code runs -------------------------------------------------------------

UNTOUCHED = "raise AssertionError('the file was run')"


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--passes", "fold-conv-bn:speed=3"], "speed"),
        (["--passes", "torch-compile,fold-conv-bn"], "fold-conv-bn can't come after torch-compile"),
        (["--input", "2xx3"], "'2xx3'"),
        (["--model", "a b"], "'a b'"),
    ],
)
def test_usage(refused, options, part):
    assert part in refused(2, write(UNTOUCHED, whole=True), *options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("options", [["--require-gpu"], ["--device", "cuda"], ["--reference-device", "cuda"]])
def test_a_missing_gpu(refused, options):
    assert "needs a GPU, but torch finds none" in refused(5, write(UNTOUCHED, whole=True), *options)


def test_an_output_folder_that_cant_be_written(refused):
    write(UNTOUCHED, whole=True)
    Path("file").write_text("x")
    Path("full").mkdir()
    Path("full/mine.txt").write_text("x")
    assert "file" in refused(8, "model.py", "--output", "file")
    assert "file" in refused(8, "model.py", "--output", "file/below")
    assert "full" in refused(8, "model.py", "--output", "full")
    assert "full" in refused(8, "model.py", "--output", "full", "--force")
    assert "/proc" in refused(8, "model.py", "--output", "/proc/bundle")


# The model ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "class Bad(Net):\n    def forward(self, x):\n        if len(x) != 2: raise SystemExit(4)\n        return x * 2\n"
            "model = Bad()",
            "The model called sys.exit(4) while it ran: remove the call.",
        ),
        ("class Gone(BaseException): ...\nraise Gone('early')", "couldn't be loaded: Gone: early (model.py line 16)."),
        (
            "def __getattr__(name): raise ValueError(name)\nmodel = Net()",
            "example_kwargs in model.py couldn't be read:",
        ),
        (
            "class Greedy(Net):\n    def forward(self, x):\n        return torch.empty(2**55, dtype=torch.uint8)\n"
            "model = Greedy()",
            "failed on its inputs (float32[2, 3, 8, 8]): out of memory while allocating 33,554,432.0 GiB (model.py line",
        ),
        (
            "class Alone(Net):\n    def __deepcopy__(self, memo): raise ValueError('no')\nmodel = Alone()",
            "copy.deepcopy of the model's Alone failed: ValueError: no. Passes and exporters work on a copy: fix its ",
        ),
        (
            "class Lost(Net):\n    def __deepcopy__(self, memo): return None\nmodel = Lost()",
            "copy.deepcopy of the model's Lost returned None. Passes and exporters work on a copy: fix its ",
        ),
        (
            "model = Net()\nmodel.norm.parent = model",
            "The Net is its own descendant, by its attribute `norm`: torch can't go through such modules. Hold the one",
        ),
    ],
)
def test_models_that_dont_work(refused, text, sentence):
    assert sentence in refused(3, write(text))


# End to end -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_whole_way_and_back(run, folder):
    write("print('hello from the file')")
    done = run("model.py", "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert "hello from the file" in done.err
    assert document["ok"]
    assert document["bundle"] == str(Path("dist/model"))
    assert {artifact["format"] for artifact in document["artifacts"]} == {"torchscript", "onnx"}
    assert all(artifact["parity"]["ok"] for artifact in document["artifacts"])
    assert any(record["status"] == "applied" for record in document["passes"])
    assert (folder / "dist/model/manifest.json").is_file()
    assert str(folder) not in (folder / "dist/model/manifest.json").read_text()

    assert run("verify", "dist/model", "--expect", document["sha256sums"]).code == 0
    unrun = run("verify", "dist/model", "--no-run")
    assert unrun.code == 0
    assert "the files are those that SHA256SUMS lists; no artifact was loaded or run" in unrun.out
    other = run("verify", "dist/model", "--expect", "0" * 64)
    assert other.code == 8
    assert "This is not the expected bundle" in other.err
    assert json.loads(run("verify", "dist/model", "--json").out)["ok"]

    again = run("model.py", "--quiet")
    assert again.code == 8
    assert "force" in again.err
    shown = run("model.py", "--force", "--formats", "torchscript")
    assert shown.code == 0
    assert "model.torchscript.pt" in shown.out
    sha, report, bundle = shown.out.splitlines()[-3:]
    assert sha.startswith("SHA-256 for verify --expect: ")
    assert report == f"report: {Path('dist/model/report.html')}"
    assert bundle == "bundle: dist/model"
    assert run("model.py", "--force", "--quiet").out == "dist/model\n"

    (folder / "dist/model/model.torchscript.pt").write_bytes(b"damaged")
    damaged = run("verify", "dist/model")
    assert (damaged.code, "model.torchscript.pt" in damaged.err, "Traceback" in damaged.err) == (8, True, False)


@pytest.mark.slow
def test_a_file_and_a_class_may_have_names_in_any_letters(run, folder):
    source = """
    import torch
    class Nétz(torch.nn.Linear):
        def forward(self, entrée):
            return {"é": super().forward(entrée)}
    model, example_inputs = Nétz(4, 3), (torch.ones(2, 4) / 3,)
    """
    done = run(write(source, "modèle.py", whole=True), "--metadata", "clé=日本", "--quiet")
    assert (done.code, done.out) == (0, f"{Path('dist/modèle')}\n")
    assert (
        (folder / "dist/modèle/README.md").read_text(encoding="utf-8").partition("\n---\n\n")[2].startswith("# Nétz\n")
    )
    assert run("verify", "dist/modèle", "--quiet").code == 0


def test_weights_whose_keys_are_no_names(refused):
    write()
    torch.save({1: torch.ones(3), "conv.bias": torch.ones(4)}, "w.pt")
    assert refused(3, "model.py", "--weights", "w.pt").startswith(
        "The weights w.pt contain no state dict; use a file written by torch.save("
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.load` is deprecated")
@pytest.mark.parametrize("name", ["class", 'say "x"', "model", "é😀`|"])
def test_the_code_of_the_readme_works_for_every_name_of_an_input(run, folder, monkeypatch, name):
    done = run(write(), "--quiet", "--input-names", name)
    assert done.code == 0, done.err
    monkeypatch.chdir(folder / "dist/model")
    parts = Path("README.md").read_text(encoding="utf-8").split("```")
    examples = [part.removeprefix("python\n") for part in parts if part.startswith("python\n")]
    assert len(examples) == 2
    for example in examples:
        found: dict[str, object] = {}
        exec(compile(example, "README.md", "exec"), found)
        assert "outputs" in found


def test_a_file_that_changes_the_current_folder_moves_no_path(run, folder):
    write("import os\nos.chdir(os.path.dirname(os.getcwd()))\nmodel = Net()")
    torch.save({"conv.weight": torch.ones(4, 3, 3, 3)}, "part.pt")
    save_file({"x": torch.randn(2, 3, 8, 8)}, "x.safetensors")
    (folder.parent / "out").mkdir()
    arguments = ("model.py", "--formats", "torchscript", "--output", "out/net", "--quiet")
    done = run(*arguments, "--inputs", "x.safetensors")
    os.chdir(folder)
    assert (done.code, done.out) == (0, "out/net\n"), done.err
    assert (folder / "out/net/manifest.json").is_file()
    assert list((folder.parent / "out").iterdir()) == []
    done = run(*arguments, "--force", "--weights", "part.pt")
    os.chdir(folder)
    assert "The weights part.pt don't fit the model: missing conv.bias" in done.err


def test_outputs_without_signal_are_told_before_any_pass_runs(run, folder):
    text = "model = nn.Sequential(Net(), nn.Flatten(), nn.Linear(144, 5))\nnn.init.zeros_(model[2].weight)"
    write(text)
    done = run("model.py")
    assert (done.code, done.out) == (9, "")
    assert "error: The outputs carry no signal (output is the same for every input), so nothing could be" in done.err
    assert "optimize: " not in done.err
    assert run("model.py", "--quiet", "--atol", "1").code == 9
    assert not (folder / "dist").exists()


def test_outputs_with_signal_at_larger_batches_alone_are_exported(run):
    """In batches of up to three rows all labels are 0, so only larger batches have signal."""
    write(
        """
        class Late(nn.Module):
            def forward(self, x):
                late = torch.arange(x.shape[0], device=x.device) >= 3
                return (late & (x.mean((1, 2, 3)) > 0)).long()
        model = Late()
        """
    )
    done = run("model.py", "--quiet", "--formats", "torchscript")
    assert (done.code, done.out) == (0, "dist/model\n"), done.err


@pytest.mark.slow
def test_parity_that_fails_shows_figures_and_publishes_nothing(run, folder, monkeypatch):
    monkeypatch.setattr(artifact_parity, "judge", lambda measurement, **_: judge(measurement, atol=0.0, rtol=0.0))
    write("model = nn.Sequential(Net(), nn.Flatten(), nn.Linear(144, 50), nn.Softmax(1))")
    before = sorted(folder.rglob("*"))
    done = run("model.py", "--formats", "onnx", "--quiet")
    assert (done.code, done.out, done.err.count("\n")) == (6, "", 1)
    shown = run("model.py", "--formats", "onnx")
    assert shown.code == 6
    assert "Traceback" not in shown.err
    rows = [line.split() for line in shown.out.splitlines()]
    assert rows[:2] == [["model.onnx", "failed"], []]
    assert rows[2][:5] == ["parity", "of", "output", "error", "allowed"]
    assert (rows[3][0], rows[3][-1]) == ("onnx", "failed")
    document = json.loads(run("model.py", "--formats", "onnx", "--json").out)
    assert (document["ok"], document["error"]["code"], document["error"]["kind"]) == (False, 6, "ParityError")
    assert document["artifacts"][0]["parity"]["outputs"][0]["max_error"] > 0
    assert sorted(folder.rglob("*")) in (before, sorted([*before, folder / "dist"]))


def test_nodes_that_run_elsewhere_withhold_the_bundle(refused, monkeypatch):
    def load(path, device):
        judge_placement([("CUDAExecutionProvider", "a", "Conv"), ("CPUExecutionProvider", "b", "Add")], frozenset())

    monkeypatch.setattr(OnnxExporter, "load", staticmethod(load))
    # As on a GPU, where a file that the exporter proved on the CPU is loaded again.
    monkeypatch.setattr(FileProof, "__call__", lambda *_: False)
    assert refused(6, write(), "--formats", "onnx") == "onnxruntime runs `b` (Add) on the CPU, not on the GPU."


UNTRACED = """
class Big(Net):
    def forward(self, x):
        if torch.jit.is_tracing():
            raise RuntimeError("not while tracing")
        return super().forward(x)
model = Big()
"""


@pytest.mark.slow
def test_a_format_that_cant_be_had_leaves_the_others(run, folder):
    write(UNTRACED)
    done = run("model.py", "--passes", "none", "--quiet")
    assert (done.code, done.out, done.err.count("\n")) == (4, "dist/model\n", 1)
    assert "error: torchscript is missing from the bundle, and onnx is published at dist/model: The model" in done.err
    document = json.loads(run("model.py", "--passes", "none", "--json", "--force").out)
    assert (document["ok"], document["exit_code"], document["bundle"]) == (False, 4, "dist/model")
    assert [artifact["format"] for artifact in document["artifacts"]] == ["onnx"]
    assert document["artifacts"][0]["parity"]["ok"]
    assert list(document["missing"]) == ["torchscript"]
    assert document["unproven"] == []
    error = document["error"]
    assert (error["code"], error["kind"]) == (4, "ExportFailed")
    assert document["missing"]["torchscript"] in error["message"]
    assert not (folder / "dist/model/model.torchscript.pt").exists()
    assert "- the format torchscript is missing: The" in (folder / "dist/model/README.md").read_text()
    before = (folder / "dist/model/manifest.json").read_bytes()
    assert run("model.py", "--passes", "none", "--force", "--formats", "torchscript").code == 4
    assert (folder / "dist/model/manifest.json").read_bytes() == before


def test_a_format_that_is_missing_withholds_all_with_strict(refused):
    assert "torchscript" in refused(4, write(UNTRACED), "--passes", "none", "--strict")


@pytest.mark.slow
def test_a_file_that_isnt_proven_is_missing_with_its_figures(run, folder, monkeypatch):
    wrong_onnx(monkeypatch)
    done = run(write(), "--json")
    document = json.loads(done.out)
    assert (done.code, document["exit_code"]) == (4, 4)
    assert [artifact["format"] for artifact in document["artifacts"]] == ["torchscript"]
    (figures,) = document["unproven"]
    assert (figures["format"], figures["parity"]["ok"]) == ("onnx", False)
    assert figures["parity"]["outputs"][0]["max_error"] > figures["parity"]["outputs"][0]["tolerance"]
    assert document["missing"]["onnx"].startswith(
        "The onnx artifact isn't proven to compute the same as the original: "
    )
    assert sorted(path.name for path in (folder / "dist/model").glob("model*")) == ["model.torchscript.pt"]
    assert run("verify", "dist/model", "--quiet").code == 0
    before = (folder / "dist/model/manifest.json").read_bytes()
    strict = run("model.py", "--strict", "--force", "--json")
    document = json.loads(strict.out)
    assert (strict.code, document["error"]["kind"]) == (6, "ParityError")
    assert [artifact["parity"]["ok"] for artifact in document["artifacts"]] == [True, False]
    assert (folder / "dist/model/manifest.json").read_bytes() == before


def wrong_onnx(monkeypatch):
    class Off:
        device, placement, settings = "cpu", None, {}

        def __init__(self, loaded):
            self.loaded = loaded

        def __call__(self, *tensors):
            return tuple(tensor * 1.01 for tensor in self.loaded(*tensors))

    export = OnnxExporter.export

    def wrong(self, request, directory):
        made = export(self, request, directory)
        return replace(made, loader=lambda path, device: Off(OnnxExporter.load(path, device)))

    monkeypatch.setattr(OnnxExporter, "export", wrong)


def test_a_deleted_current_folder_is_named(folder, refused, monkeypatch):
    (folder / "gone").mkdir()
    monkeypatch.chdir(folder / "gone")
    (folder / "gone").rmdir()
    assert "The current folder was deleted: change to another one." in refused(2, f"{folder}/model.py")


def test_a_lack_of_memory_is_no_defect(refused, monkeypatch):
    def fail(*_):
        raise ImportError("libtorch_cpu.so: failed to map segment from shared object")

    monkeypatch.setattr(cli, "_work", fail)
    assert "Out of memory: this machine, or a limit such as ulimit -v" in refused(1, "model.py")


@pytest.mark.parametrize(
    ("error", "code", "how"), [(Terminated(), 143, "terminated"), (KeyboardInterrupt(), 130, "interrupted")]
)
def test_an_interrupt_after_the_exchange_says_that_the_bundle_is_there(folder, capfd, monkeypatch, error, code, how):
    exchange = importlib.import_module("optimizer.bundle.exchange")

    def work(*_):
        with exchange.replacement(folder / "new", lambda standing: None):
            pass
        raise error

    monkeypatch.setattr(cli, "_work", work)
    assert cli.main(["model.py"]) == code
    assert capfd.readouterr().err == f"optimize-export: {how}, after the new bundle was put in place: {folder}/new\n"
    monkeypatch.setattr(exchange, "sync_tree", lambda folder: (_ for _ in ()).throw(error))
    assert cli.main(["model.py"]) == code
    assert capfd.readouterr().err == f"optimize-export: {how}\n"


# As a process ---------------------------------------------------------------------------------------------------------


def start(folder: Path, *arguments: str, before: str = "") -> subprocess.Popen[str]:
    code = f"{before}\nimport sys\nfrom optimizer.command.cli import main\nsys.exit(main())"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=folder, env=environment, **pipes)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_in_the_middle_leaves_nothing(folder, number, code):
    write(
        """
        import pathlib, time
        runs = []
        class Slow(Net):
            def forward(self, x):
                runs.append(1)
                if torch.jit.is_tracing() and len(runs) > 3:
                    pathlib.Path("busy").touch()
                    time.sleep(60)
                return super().forward(x)
        model = Slow()
        """
    )
    before = [*folder.rglob("*"), folder / "busy"]
    with start(folder, "model.py", "--quiet", "--formats", "torchscript", "--passes", "none") as running:
        deadline = time.monotonic() + 120
        while not (folder / "busy").exists() and running.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        running.send_signal(number)
        out, err = running.communicate(timeout=60)
    assert (running.returncode, out) == (code, "")
    assert err.count("\n") == 1
    left = [path for path in sorted(folder.rglob("*")) if path not in before]
    assert left in ([], [folder / "dist"])


@pytest.mark.slow
def test_a_disk_that_is_full_while_writing(folder):
    write("model = nn.Sequential(Net(), nn.Flatten(), nn.Linear(144, 500))")
    before = sorted(folder.rglob("*"))
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))"
    with start(folder, "model.py", "--quiet", before=limit) as running:
        out, err = running.communicate(timeout=300)
    assert (running.returncode, out) == (8, ""), err
    assert err.count("\n") == 1
    left = [path for path in sorted(folder.rglob("*")) if path not in before]
    assert left in ([], [folder / "dist"])


@pytest.mark.slow
def test_a_file_that_is_written_to_after_its_proof_is_proven_again(run, folder, monkeypatch):
    export = OnnxExporter.export

    def scaled(self, request, directory):
        made = export(self, request, directory)
        model = onnx.load(made.path)
        for tensor in model.graph.initializer:
            if tensor.data_type == onnx.TensorProto.FLOAT:
                tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor) * 1.01, tensor.name))
        onnx.save(model, made.path)
        return made

    monkeypatch.setattr(OnnxExporter, "export", scaled)
    document = json.loads(run(write(), "--json").out)
    assert [artifact["format"] for artifact in document["artifacts"]] == ["torchscript"]
    assert document["missing"]["onnx"].startswith(
        "The onnx artifact isn't proven to compute the same as the original: "
    )
