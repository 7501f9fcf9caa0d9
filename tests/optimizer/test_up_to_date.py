"""`--if-changed` builds a bundle again if something that it was built from changed, and only then."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from changed_bundles import edit_manifest

from optimize_export.manifest import MANIFEST, SUMS, check_manifest, file_digest, read_manifest
from optimizer.command import cli, up_to_date
from optimizer.command.up_to_date import changes, inputs_of
from optimizer.options import ExportOptions

ROOT = Path(cli.__file__).parent.parent.parent
NET = """
import torch
from torch import nn
from layers.sizes import width
from elsewhere import gain

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, width)
    def forward(self, x):
        return self.linear(x) * gain

example_inputs = (torch.randn(2, 4),)
"""
COMMAND = ["src/net.py", "--weights", "w.pt", "--formats", "torchscript", "--metadata", f"by={Path.home()}/me"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with a model, its weights and its bundle in `out`."""
    folder = tmp_path_factory.mktemp("built")
    (folder / "src" / "layers").mkdir(parents=True)
    (folder / "lib").mkdir()
    (folder / "src" / "net.py").write_text(NET)
    (folder / "src" / "layers" / "sizes.py").write_text("width = 3\n")
    (folder / "lib" / "elsewhere.py").write_text("gain = 2.0\n")
    torch.save({"linear.weight": torch.ones(3, 4), "linear.bias": torch.zeros(3)}, folder / "w.pt")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder / "lib")
        # It is still loaded if other tests ran between those of this file.
        patch.delitem(sys.modules, "elsewhere", raising=False)
        assert cli.main([*COMMAND, "--output", "out"]) == 0
    return folder


@pytest.fixture
def here(built, tmp_path, monkeypatch):
    """A copy of that folder, which is the current one."""
    folder = tmp_path / "copy"
    shutil.copytree(built, folder)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder / "lib")
    monkeypatch.delitem(sys.modules, "elsewhere", raising=False)
    return folder


def options(*more: str) -> ExportOptions:
    parsed = cli.parse([*COMMAND, "--output", "out", *more])
    assert isinstance(parsed, ExportOptions)
    return parsed


def test_the_manifest_records_what_the_bundle_was_built_from(here):
    build = read_manifest(Path("out"))["build"]
    assert build["options"] == {"model": "net.py", "formats": "torchscript", "metadata": ["by=me"]}
    assert list(build["files"]) == ["--weights", "layers/sizes.py", "module elsewhere", "net.py"]
    assert build["files"]["net.py"] == file_digest(Path("src/net.py"))
    assert build["files"]["module elsewhere"] == file_digest(Path("lib/elsewhere.py"))
    assert str(here.parent) not in json.dumps(build)


def test_a_bundle_that_is_up_to_date_stays(here, capsys, monkeypatch):
    monkeypatch.setattr(cli, "_torch_side", lambda: pytest.fail("it is built again"))
    before = (here / "out").stat().st_ino
    assert changes(options()) == []
    assert run(capsys) == (0, "up to date: out\n", "")
    assert run(capsys, "--quiet") == (0, "out\n", "")
    _, out, _ = run(capsys, "--json")
    document = json.loads(out)
    assert (document["ok"], document["exit_code"], document["up_to_date"], document["changed"]) == (True, 0, True, [])
    assert document["sha256sums"] == file_digest(Path("out", SUMS))
    assert [artifact["format"] for artifact in document["artifacts"]] == ["torchscript"]
    assert (here / "out").stat().st_ino == before


def test_an_answer_needs_no_torch(here):
    program = (
        "import sys\nfrom optimizer.command.cli import main\ncode = main(sys.argv[1:])\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'numpy', 'onnx', 'rich'}), code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *COMMAND, "--output", "out", "--if-changed"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), "lib"])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "up to date: out\n[] 0\n", done.stderr


def write(path: str, text: str):
    return lambda: Path(path).write_text(text)


def recorded(*keys: str, **values):
    """Change a table in the manifest of `out`."""

    def change(manifest):
        for key in keys:
            manifest = manifest[key]
        manifest.update(values)

    return lambda: edit_manifest(Path("out"), change)


CHANGES = {
    "net.py changed": write("src/net.py", NET + "# a comment\n"),
    "layers/sizes.py changed": write("src/layers/sizes.py", "width = 5\n"),
    "layers/sizes.py is gone": lambda: Path("src/layers/sizes.py").unlink(),
    "module elsewhere changed": write("lib/elsewhere.py", "gain = 3.0\n"),
    "module elsewhere changed ": write("src/elsewhere.py", "gain = 4.0  # found before the other\n"),
    "module elsewhere is gone": lambda: Path("lib/elsewhere.py").unlink(),
    "w.pt (--weights) changed": write("w.pt", "other weights"),
    "there is no bundle at out": lambda: shutil.rmtree("out"),
    "model.torchscript.pt was changed: it has 5 bytes": write("out/model.torchscript.pt", "short"),
    "model.torchscript.pt is missing": lambda: Path("out/model.torchscript.pt").unlink(),
    "mine is not listed in manifest.json": write("out/mine", "x"),
    "the bundle doesn't say what it was built from": lambda: edit_manifest(
        Path("out"), lambda manifest: manifest.pop("build")
    ),
    "SHA256SUMS is missing": lambda: Path("out", SUMS).unlink(),
    "the bundle lacks the format onnx": recorded("missing", onnx="why"),
    "net.py changed during the build": recorded("build", "files", **{"net.py": None}),
    "torch 2, was 1": recorded("environment", "libraries", torch="1"),
    "optimize-export 2, was 1": recorded("program", version="1"),
    "python 2, was 1": recorded("environment", python="1"),
    "timm is not installed, was 1": recorded("build", "versions", timm="1"),
}


@pytest.mark.parametrize("sentence", CHANGES)
def test_a_change_is_told(here, monkeypatch, sentence):
    written = Path("out/model.torchscript.pt").stat().st_size
    CHANGES[sentence]()
    real = up_to_date.describe_environment()
    found = changes(options())
    if sentence.endswith(" 2, was 1"):
        name = sentence.split()[0]
        now = {**real, **real["libraries"], "optimize-export": up_to_date.version_of("optimize-export")}
        sentence = f"{name} {now[name]}, was 1"
    sizes = f", and {written} were written" if sentence.endswith(" bytes") else ""
    assert found == [sentence.strip() + sizes]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--formats", "onnx"], "--formats changed from torchscript to onnx"),
        (["--formats", "torchscript,onnx,pt2", "--strict"], "--strict changed from the default to on"),
        (["--input", "2x4", "--input", "2x5"], "--input changed from the default to 2x4 2x5"),
        (["--model", "Net"], "MODEL changed from net.py to net.py:Net"),
        (["--choices", "out"], f"{Path('out', MANIFEST)} (--choices) is new"),
        (["--seed", "1"], "--seed changed from the default to 1"),
    ],
)
def test_another_option_is_a_change(here, more, sentence):
    assert sentence in changes(options(*more))


def test_an_option_that_is_left_out_is_a_change(here):
    without = cli.parse(["src/net.py", "--output", "out"])
    assert changes(without) == [
        "--formats changed from torchscript to the default",
        "--metadata changed from by=me to the default",
        "--weights is gone",
    ]


@pytest.mark.parametrize("more", [["--details"], ["--debug"], ["--debug-dir", "d"], ["--force"]])
def test_options_that_dont_shape_the_bundle_are_no_change(here, more):
    assert changes(options(*more)) == []


def test_neither_the_folder_nor_the_path_of_the_weights_nor_a_folder_of_data_counts(here, tmp_path, monkeypatch):
    Path("src/elsewhere").mkdir()
    shutil.move(here, tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved")
    monkeypatch.syspath_prepend(tmp_path / "moved" / "lib")
    shutil.move("w.pt", "other.pt")
    assert changes(options("--weights", "other.pt")) == []


def test_calibration_inputs_and_input_files_count(here):
    Path("rows").mkdir()
    for name in ("a.npz", "b.npz", "notes.txt"):
        Path("rows", name).write_text(name)
    given = options("--inputs", "x", "--inputs", "y", "--tune", "--accuracy", "0.9", "--calibration", "rows")
    names = ["net.py", "--weights", "--inputs 1", "--inputs 2", "--calibration a.npz", "--calibration b.npz"]
    assert list(inputs_of(given).files) == names


READER = """
import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
import torch

here = Path(__file__).parent
spec = spec_from_file_location("by_path", here / "by_path.py")
by_path = module_from_spec(spec)
spec.loader.exec_module(by_path)
with open(here / "text.py") as text:
    exec(text.read())
Path("cache.txt").write_text("written in each build")
Path("cache.txt").read_text()
Path("cache.tmp").write_text("written in each build")
Path("cache.tmp").replace("moved.txt")
Path("moved.txt").read_text()
for missing in ("a" * 300, "none"):
    try:
        open(missing)
    except OSError:
        pass
model = torch.nn.Linear(json.loads((here / ".." / "sizes.json").read_text()), 3).eval()
model.load_state_dict(torch.load(here / "w.pt"))
example_inputs = (torch.randn(2, 4),)
"""


def test_the_code_of_the_program_counts(here, monkeypatch):
    monkeypatch.setattr(up_to_date, "_program_digest", lambda: "0" * 64)
    assert changes(options()) == ["the code of optimize-export changed"]


def test_files_that_the_code_reads_count(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "net.py").write_text(READER)
    (tmp_path / "src" / "by_path.py").write_text("a = 1\n")
    (tmp_path / "src" / "text.py").write_text("b = 1\n")
    (tmp_path / "sizes.json").write_text("4")
    torch.save(torch.nn.Linear(4, 3).state_dict(), "src/w.pt")
    command = ["src/net.py", "--formats", "torchscript", "--output", "out", "--if-changed", "--quick", "--no-bench"]
    for _ in range(2):  # the second time, Python reads the compiled by_path
        assert cli.main([*command[:-3], "--force", *command[-2:]]) == 0
    files = read_manifest(tmp_path / "out")["build"]["files"]
    assert sorted(files) == ["../sizes.json", "by_path.py", "net.py", "text.py", "w.pt"]
    assert cli.main(command) == 0
    assert "up to date" in capsys.readouterr().out
    for name in ("sizes.json", "src/by_path.py", "src/text.py", "src/w.pt"):
        path = tmp_path / name
        before = path.read_bytes()
        path.write_bytes(before + b" ")
        options = cli.parse(command)
        (told,) = changes(options)
        assert told == f"{os.path.relpath(path, tmp_path / 'src')} changed"
        path.write_bytes(before)


@pytest.mark.parametrize(
    ("folder", "root", "read", "name"),
    [
        ("a/src", "a", "a/sizes.json", "../sizes.json"),
        ("a", "a/b", "a/b/sizes.json", "b/sizes.json"),
        ("a", "b", "b/sizes.json", "current folder: sizes.json"),
        ("a", "b", "c/sizes.json", None),
        ("a", "a", "a/.cache/sizes.json", None),
        ("a/env/lib/site-packages", "a", "a/env/lib/site-packages/x/sizes.json", None),
    ],
)
def test_the_name_of_a_file_has_no_folder_of_this_machine(tmp_path, folder, root, read, name):
    path = tmp_path / read
    path.parent.mkdir(parents=True)
    path.write_text("4")
    inputs = up_to_date.BuildInputs(tmp_path / folder, tmp_path / root, {}, {})
    files = inputs.record(dict(sys.modules), [path], time.time() + 1)["files"]
    assert list(files) == ([] if name is None else [name])
    if name is not None:
        assert inputs.path(name).resolve() == path


def test_a_container_has_its_root_as_the_current_folder(tmp_path):
    inputs = up_to_date.BuildInputs(tmp_path, Path("/"), {}, {})
    assert inputs.record(dict(sys.modules), [Path("/proc/meminfo")], time.time() + 1)["files"] == {}


def test_an_installed_or_importable_module_is_found_without_its_import(here, monkeypatch):
    monkeypatch.chdir("src")
    module = cli.parse(["layers.sizes:f"])
    assert inputs_of(module).folder == here / "src"
    assert inputs_of(module).options == {"model": "layers.sizes:f"}
    assert "layers" not in sys.modules
    monkeypatch.chdir("..")
    monkeypatch.syspath_prepend(here / "src")
    assert inputs_of(module).folder == here / "src"
    nowhere = cli.parse(["there_is_no_such"])
    assert inputs_of(nowhere).folder == here


def test_installed_packages_count_by_their_versions(here, monkeypatch):
    class Distribution:
        name = "plugin"

    class Point:
        dist = Distribution

    monkeypatch.setattr(up_to_date.metadata, "entry_points", lambda group: [Point])
    monkeypatch.setattr(up_to_date, "version_of", lambda name: f"{name} 1")
    before = {name: module for name, module in sys.modules.items() if name not in ("click", "json", "torch")}
    record = inputs_of(options()).record(before, (), started=time.time() + 1)
    assert record["versions"] == {"click": "click 1", "plugin": "plugin 1"}
    assert list(record["files"]) == ["--weights", "net.py"]


def test_a_file_that_changes_during_the_build_has_no_digest(here):
    inputs = inputs_of(options())
    record = inputs.record(dict(sys.modules), (), started=time.time() - 3600)
    assert set(record["files"].values()) == {None}
    assert inputs.record(dict(sys.modules), (), started=time.time() + 1)["files"]["net.py"] is not None
    edit_manifest(Path("out"), lambda manifest: manifest.update(build=record))
    assert "net.py changed during the build" in changes(options())
    # The time of a file may lie in the future, where clocks differ.
    os.utime("src/net.py", (time.time(), time.time() + 7 * 86400))
    record = inputs_of(options()).record(dict(sys.modules), (), started=time.time() + 1)
    assert record["files"]["net.py"] == file_digest(Path("src/net.py"))


def run(capfd, *more: str) -> tuple[int, str, str]:
    code = cli.main([*COMMAND, "--output", "out", "--if-changed", *more])
    return code, *capfd.readouterr()


def test_it_replaces_its_own_bundle_without_force(here, capfd):
    Path("src/layers/sizes.py").write_text("width = 3  # three\n")
    code, out, err = run(capfd, "--json", "--strict")
    document = json.loads(out)
    assert (code, document["up_to_date"]) == (0, False)
    assert document["changed"] == ["--strict changed from the default to on", "layers/sizes.py changed"]
    assert f"building out: {', '.join(document['changed'])}" in err
    assert changes(options("--strict")) == []
    check_manifest(read_manifest(Path("out")))


def test_a_file_of_the_users_in_the_bundle_is_never_replaced(here, capfd):
    Path("out", "mine").write_text("x")
    code, _, err = run(capfd)
    assert (code, Path("out", "mine").read_text()) == (8, "x")
    assert "contains files that this program didn't write (mine)" in err


def test_a_syntax_error_after_a_build_leaves_the_bundle(here, capfd):
    Path("src/net.py").write_text("def :")
    code, _, err = run(capfd)
    assert code == 3
    assert "building out: net.py changed" in err
    assert "net.py line 1 has a syntax error" in err
    assert read_manifest(Path("out"))["build"]["files"]["net.py"]
