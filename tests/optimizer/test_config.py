"""Models of a config, each by its name or all side by side."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from user_folder import INPUTS, NET

from optimizer.command import build, cli

ROOT = Path(cli.__file__).parent.parent.parent
CONFIG = """
[tool.optimize-export]
formats = ["onnx", "pt2"]
seed = 7

[tool.optimize-export.models.resnet]
model = "nets/resnet.py:build"
input = ["2x3x224x224"]
batch-sizes = [1, 2]
atol = 1e-3
strict = true

[tool.optimize-export.models.bert-tiny]
model = "nets.bert"
formats = "torchscript"
output = "out/bert"
dynamic = ["ids:0=batch", "mask:0=batch"]
tune = true
accuracy = 0.999
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(text: str, name: str = "pyproject.toml") -> None:
    Path(name).write_text(text)


def parsed(*arguments: str):
    return cli.parse(list(arguments))


def refused(capfd, *arguments: str, code: int = 2) -> str:
    assert cli.main(arguments) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("optimize-export: error: ")
    assert err.count("\n") == 1
    return err.removeprefix("optimize-export: error: ").strip()


@pytest.mark.timeout(60)
@pytest.mark.skipif(os.name != "posix", reason="files of POSIX")
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: Path(path).symlink_to("/dev/zero")])
def test_a_config_that_is_no_file_is_refused(capfd, make):
    make("models.toml")
    assert refused(capfd, "build", "--config", "models.toml", "net") == (
        "The config models.toml can't be read: it is not a regular file."
    )


def test_a_tilde_is_the_home_folder(folder, monkeypatch):
    monkeypatch.setenv("HOME", "/home/jane")
    config(CONFIG.replace('"out/bert"', '"~/bert"').replace('"nets/resnet.py:build"', '"~/nets/resnet.py:build"'))
    assert parsed("build", "bert-tiny").output == Path("/home/jane/bert")
    assert parsed("build", "resnet").model == "/home/jane/nets/resnet.py:build"
    assert parsed("net.py", "--output=~/x", "--weights=./~/w.pt").output == Path("/home/jane/x")
    assert parsed("net.py", "--weights=./~/w.pt").weights == Path("~/w.pt")


def test_a_model_has_its_own_options_and_the_defaults():
    config(CONFIG)
    bert = parsed("build", "bert-tiny")
    assert (bert.model, bert.output, bert.formats) == ("nets.bert", Path("out/bert"), ("torchscript",))
    assert (bert.dynamic, bert.tune, bert.accuracy) == ({"ids": {0: "batch"}, "mask": {0: "batch"}}, True, "0.999")


def test_a_config_records_the_options_that_the_command_line_would_have():
    config(CONFIG)
    named = parsed("build", "resnet")
    options = (
        "--formats onnx,pt2 --seed 7 --input 2x3x224x224 --batch-sizes 1,2 --atol 0.001 --strict --output dist/resnet"
    )
    plain = parsed("nets/resnet.py:build", *options.split())
    assert (named, named.given) == (plain, plain.given)


def test_the_command_line_takes_precedence():
    config(CONFIG)
    options = parsed(
        "build", "resnet", "--input", "1x3x8x8", "--formats", "onnx", "--seed", "0", "--output", "o", "--if-changed"
    )
    assert (options.inputs, options.formats, options.seed, options.output) == (("1x3x8x8",), ("onnx",), 0, Path("o"))
    assert options.strict
    assert options.if_changed


@pytest.mark.parametrize(
    "flag",
    ["require-gpu", "static-batch", "row-independence", "quick", "thorough", "strict", "force", "if-changed", "tune"],
)
def test_a_flag_of_the_config_is_switched_off(flag):
    config(f'[tool.optimize-export]\n{flag} = true\n[tool.optimize-export.models.net]\nmodel = "net.py"')
    config(f'[models.net]\nmodel = "net.py"\n{flag} = false', "off.toml")
    plain = parsed("build", "net", "--config", "off.toml")
    assert parsed("build", "net") != plain
    assert parsed("build", "net", f"--no-{flag}") == plain
    assert parsed("build", "net", f"--no-{flag}", f"--{flag}") == parsed("build", "net")
    [arguments] = parsed("build", "--all", f"--no-{flag}").commands.values()
    assert arguments == ["build", "--config=pyproject.toml", "--json", f"--no-{flag}", "net"]


@pytest.mark.parametrize(
    "text", [CONFIG, CONFIG.replace("[tool.optimize-export.models.", "[models.").replace("[tool.optimize-export]", "")]
)
def test_another_file_has_the_table_or_is_the_table(text):
    config("not toml")
    config(text, "ci.toml")
    assert parsed("build", "resnet", "--config", "ci.toml").formats == ("onnx", "pt2")


def test_each_model_has_its_own_folders_of_profiles_and_differences():
    config(CONFIG)
    commands = parsed("build", "--all", "--profile-dir", "p", "--debug-dir", "d/e").commands
    assert {"--profile-dir=p/resnet", "--debug-dir=d/e/resnet"} <= set(commands["resnet"])
    assert {"--profile-dir=p/bert-tiny", "--debug-dir=d/e/bert-tiny"} <= set(commands["bert-tiny"])
    config(CONFIG.replace("seed = 7", 'profile-dir = "p"'))
    assert parsed("build", "resnet").profile_dir == Path("p/resnet")


def test_a_file_isnt_a_name_and_reads_no_config():
    config("not toml")
    assert parsed("resnet.py").model == "resnet.py"
    assert parsed("a.b:c").model == "a.b:c"
    config(CONFIG)
    assert parsed("resnet.py").formats == ("torchscript", "onnx")
    assert parsed("transformers").model == "transformers"


# The text of a config with its mistake.
WHOLE = [
    ("not toml", "The config pyproject.toml is not valid TOML: Expected '=' after a key"),
    ("\ufeff\x00", "The config pyproject.toml is not valid TOML: "),
    pytest.param("x = " + "[" * 100_000, "The config pyproject.toml is not valid TOML: ", id="deep"),
    ('tool = "x"', 'pyproject.toml: tool is "x"; it must be a table, such as [tool].'),
    ("[tool]\noptimize-export = 1", "pyproject.toml: tool.optimize-export is 1; it must be a table"),
    (
        "[tool.optimize-export.models.--version]\nmodel = 'x'",
        "'--version' is not a name for a model; use letters, digits",
    ),
    ("[tool.optimize-export.models.'a b']\nmodel = 'x'", "'a b' is not a name for a model"),
    ("[tool.optimize-export]\nmodels = 1", "tool.optimize-export.models is 1; it must be a table"),
    ("[tool.optimize-export.models]\nresnet = 1", "tool.optimize-export.models.resnet is 1; it must be a table"),
    (
        "[tool.optimize-export.models.resnet]\nmodel = 3",
        "model in [tool.optimize-export.models.resnet] is 3; it must be a text",
    ),
    (
        "[tool.optimize-export.models.resnet]\nseed = 1",
        'models.resnet] has no model; add one, such as model = "net.py:build".',
    ),
]
# What is replaced in `CONFIG`, by what, and the mistake.
REPLACED = [
    ("strict", "strickt", "no option strickt (= true) in [tool.optimize-export.models.resnet]; did you mean strict?"),
    ("seed = 7", 'zzz = "x"', "; the keys are model and the options of an export."),
    ("seed = 7", 'verify = "x"', "there is no option verify"),
    ("seed = 7", "json = true", "there is no option json"),
    ("strict = true", 'strict = "yes"', '[tool.optimize-export.models.resnet] is "yes"; it must be true or false.'),
    ("seed = 7", "seed = true", "seed in [tool.optimize-export] is true; it must be a text or a number."),
    ("seed = 7", "seed = [7]", "seed in [tool.optimize-export] is [7]; it must be a text or a number."),
    ("seed = 7", "seed = 1979-05-27", 'is "1979-05-27"; it must be a text or a number.'),
    (
        '["onnx", "pt2"]',
        "[{}]",
        "formats in [tool.optimize-export] is [{}]; it must be a text, a number or a list of them.",
    ),
    ("seed = 7", 'device = "tpu"', 'device in [tool.optimize-export] is "tpu"; it must be one of auto, cpu, cuda.'),
    (
        "strict = true",
        "batch_sizes = 1",
        "batch_sizes is in [tool.optimize-export.models.resnet] twice, with - and with _.",
    ),
    ("seed = 7", "models = 1", "not valid TOML"),
    *(
        ("seed = 7", f"resources = {value}", "it must be a table of amounts, such as {GPU = 1, CPU = 8}: whole numbers")
        for value in ("1", "'GPU'", "{GPU = true}", "{GPU = -1}", "{GPU = 1.5}", "{GPU = nan}", "{GPU = inf}")
    ),
    ("seed = 7", "seed = -1", "pyproject.toml, model resnet: --seed: '-1' is not a whole number from 0 to"),
    ("seed = 7", "require-gpu = true\ndevice = 'cpu'", "--require-gpu and --device cpu contradict"),
]
WRONG = [*WHOLE, *((CONFIG.replace(old, new), sentence) for old, new, sentence in REPLACED)]


@pytest.mark.parametrize(("text", "sentence"), WRONG)
def test_a_mistake_is_named_with_its_place(capfd, text, sentence):
    config(text)
    assert sentence in refused(capfd, "build", "resnet")
    assert sentence in refused(capfd, "build", "--all")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["build", "resnett"], "pyproject.toml has no model resnett; its models are: resnet, bert-tiny."),
        (["build"], "NAME is missing: name models of pyproject.toml (resnet, bert-tiny), or pass --all."),
        (["build", "resnet", "--config", "no.toml"], "The config no.toml can't be read: No such file or directory."),
        (["build", "resnet", "--config", "."], "The config . can't be read: it is not a regular file."),
        (["build", "resnet", "-j", "2"], "--jobs goes with --all or several names only."),
        (["build", "resnet", "--shard", "1/2"], "--shard goes with --all or several names only."),
        (["resnet.py", "--all"], "There is no option --all here: it goes with optimize-export build."),
        (["resnet.py", "-j", "2"], "There is no option -j here: it goes with optimize-export build."),
        (["build", "resnet", "--all"], "--all builds all models of the config: leave out resnet, or --all."),
        (["build", "--all", "-j", "0"], "--jobs: '0' is not a whole number from 1 to 9999; use for example"),
        (["build", "--all", "--jobs", "two"], "--jobs: 'two' is not a whole number"),
        (["build", "--all", "--shard", "3/2"], "--shard: '3/2' is not I/N with I from 1 to N; use for example"),
        (["build", "--all", "--on", "ray", "-j", "2"], "--jobs and --on contradict each other: Ray starts as many"),
        (["resnet.py", "--on", "ray"], "There is no option --on here: it goes with optimize-export build."),
        *(
            (["build", "--all", "--on", text], f"--on: {text!r} is neither ray nor the address of a cluster")
            for text in ("dask", "ray:", "ray://", "ray://host", "http://host:1", "ray://host:1/x")
        ),
        *((["build", "--all", "--shard", text], f"--shard: {text!r} is not I/N") for text in ("0/2", "1", "-1/2")),
        (["build", "--all", "--output", "o"], "the models resnet and bert-tiny have the same output, o: give one"),
        (["build", "--all", "--seed", "x"], "pyproject.toml, model resnet: --seed: 'x' is not a whole number"),
    ],
)
def test_wrong_options(capfd, arguments, sentence):
    config(CONFIG)
    assert sentence in refused(capfd, *arguments)


@pytest.mark.parametrize("text", ["", "[tool.ruff]\nx = 1", "[tool.optimize-export]\nseed = 1"])
def test_all_without_models_is_refused(capfd, text):
    config(text)
    assert refused(capfd, "build", "--all") == (
        "pyproject.toml has no models for --all: add a table such as [tool.optimize-export.models.net], or name another "
        "file with --config."
    )
    Path("pyproject.toml").unlink()
    assert refused(capfd, "build", "--all") == "The config pyproject.toml can't be read: No such file or directory."


def test_two_models_with_the_same_output_are_refused(capfd):
    config(CONFIG.replace('"out/bert"', '"./dist/../dist/resnet"'))
    assert "the models resnet and bert-tiny have the same output, dist/resnet" in refused(capfd, "build", "--all")
    for inside in ("dist", "dist/resnet/bert"):
        config(CONFIG.replace('"out/bert"', f'"{inside}"'))
        assert "the models resnet and bert-tiny have outputs inside each other" in refused(capfd, "build", "--all")
    assert parsed("build", "resnet").output == Path("dist/resnet")


def test_each_model_gets_the_options_of_the_command_line():
    config(CONFIG)
    arguments = "build --all -j 3 --if-changed --quiet --passes none --metadata a=b --metadata c=--d --json --details"
    options = parsed(*arguments.split())
    given = ["build", "--config=pyproject.toml", "--json", "--passes=none", "--metadata=a=b", "--metadata=c=--d"]
    given += ["--if-changed", "--quiet"]
    assert options.jobs == 3
    assert list(options.commands) == ["resnet", "bert-tiny"]
    assert {name: sorted(each) for name, each in options.commands.items()} == {
        name: sorted([name, *given]) for name in options.commands
    }
    assert parsed(*options.commands["resnet"]).metadata == {"a": "b", "c": "--d"}
    assert list(parsed("build", "bert-tiny", "resnet", "-j", "2").commands) == ["bert-tiny", "resnet"]


def test_a_shard_has_every_nth_model():
    names = [f"m{number}" for number in range(5)]
    config("".join(f'[models.{name}]\nmodel = "net.py"\n' for name in names), "ci.toml")
    shards = [list(parsed("build", "--all", "--config", "ci.toml", "--shard", f"{i}/3").commands) for i in (1, 2, 3)]
    assert shards == [["m0", "m3"], ["m1", "m4"], ["m2"]]
    assert parsed("build", "--all", "--config", "ci.toml", "--shard", "9/9").commands == {}


def test_a_model_asks_for_its_own_resources_or_those_of_all():
    config(CONFIG.replace("seed = 7", "resources = {CPU = 2, tpu = 0.5}").replace("strict = true", "resources = {}"))
    assert parsed("build", "--all").resources == {"resnet": {}, "bert-tiny": {"CPU": 2, "tpu": 0.5}}
    options = parsed("build", "resnet", "--on", "ray://head:10001")
    assert (options.on, list(options.commands)) == ("ray://head:10001", ["resnet"])
    # The process of the build ignores them.
    assert parsed(*options.commands["resnet"]).model == "nets/resnet.py:build"


FAKE = """
import json, os, signal, subprocess, sys, time
name = sys.argv[-1]
open(name + ".started", "w").close()
print("log of " + name, file=sys.stderr)
if name == "timed":
    print(os.environ.get("OPTIMIZE_EXPORT_NO_BENCH"), file=sys.stderr)
if name == "slow":
    signal.signal(signal.SIGTERM, lambda *_: (open("ended", "w").close(), sys.exit(143)))
    time.sleep(60)
if name == "parent":
    subprocess.Popen(["sleep", "20"])
if name == "both":
    while not os.path.exists("other.started"):
        time.sleep(0.01)
if name == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if name == "garbled":
    print("no json")
    sys.exit(0)
if name == "failed":
    message = "the\\x1bmodel"
    print(json.dumps({"ok": False, "exit_code": 4, "bundle": "dist/failed", "error": {"message": message}}))
    sys.exit(4)
print(json.dumps({"ok": True, "exit_code": 0, "bundle": "dist/" + name, "up_to_date": True}))
"""


@pytest.fixture
def fake(folder, monkeypatch):
    """Runs `--all` with models of these names, whose commands are a fake program."""
    (folder / "_optimize_export_start.py").write_text(FAKE)
    monkeypatch.setattr(build, "ROOT", folder)

    def run(*names: str, more: tuple[str, ...] = ()) -> int:
        config("".join(f'[tool.optimize-export.models.{name}]\nmodel = "net.py"\n' for name in names))
        return cli.main(["build", "--all", *more])

    return run


def test_the_summary_and_the_logs_name_the_models_and_the_worst_exit_code_is_returned(fake, capfd):
    assert fake("fine", "failed", more=("-j", "2")) == 4
    out, err = capfd.readouterr()
    rows = [line.split(None, 4) for line in out.splitlines()]
    assert [row[0] for row in rows] == ["model", "fine", "failed"]
    assert out.splitlines()[1].endswith("dist/fine")
    assert rows[1][1:4] == ["up", "to", "date"]
    assert "exit 4" in out.splitlines()[2]
    assert out.splitlines()[2].endswith("the\\x1bmodel")
    assert "fine: log of fine\n" in err
    assert "failed: log of failed\n" in err
    assert "optimize-export: building fine\n" in err


def test_one_document_has_those_of_all_models(fake, capfd):
    assert fake("killed", "garbled", "fine", "failed", more=("-j", "4", "--json")) == 137
    document = json.loads(capfd.readouterr().out)
    assert (document["ok"], document["exit_code"]) == (False, 137)
    codes = {name: each["exit_code"] for name, each in document["models"].items()}
    assert list(codes.items()) == [("killed", 137), ("garbled", 1), ("fine", 0), ("failed", 4)]
    assert document["models"]["killed"]["error"]["message"] == "The build was killed by signal 9."
    assert document["models"]["garbled"]["error"]["message"] == "The build ended without a result."


@pytest.mark.parametrize(("jobs", "value"), [("1", "None"), ("2", "1")])
def test_builds_side_by_side_do_not_time_their_files_and_quiet_prints_the_bundles(
    fake, capfd, monkeypatch, jobs, value
):
    monkeypatch.delenv("OPTIMIZE_EXPORT_NO_BENCH", raising=False)
    assert fake("timed", "killed", more=("-j", jobs, "--quiet")) == 137
    out, err = capfd.readouterr()
    assert out == "dist/timed\n"
    assert sorted(err.splitlines()) == ["killed: log of killed", f"timed: {value}", "timed: log of timed"]


def test_a_shard_without_models_does_nothing(fake, capfd):
    assert fake("fine", more=("--shard", "2/2", "--json")) == 0
    assert json.loads(capfd.readouterr().out) == {"ok": True, "exit_code": 0, "models": {}}
    assert fake("fine", more=("--shard", "2/2")) == 0
    assert not Path("fine.started").exists()


def test_models_run_side_by_side_and_a_process_that_a_build_leaves_running_is_not_waited_for(fake):
    started = time.monotonic()
    assert fake("both", "other", "parent", more=("-j", "2")) == 0
    assert time.monotonic() - started < 15


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_the_builds(folder, fake, number, code):
    config('[tool.optimize-export.models.slow]\nmodel = "net.py"\n')
    program = (
        "import sys\nfrom pathlib import Path\nfrom optimizer.command import build, cli\n"
        "build.ROOT = Path()\nsys.exit(cli.main(['build', '--all']))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen([sys.executable, "-c", program], env=environment, stderr=subprocess.PIPE, text=True)
    while not Path("slow.started").exists():
        time.sleep(0.02)
    time.sleep(0.2)
    child.send_signal(number)
    assert child.wait(timeout=20) == code
    assert Path("ended").exists()
    child.stderr.close()


@pytest.mark.slow
def test_the_models_of_a_real_config(folder):
    Path("net.py").write_text(NET + INPUTS)
    config(
        "[tool.optimize-export]\nformats = 'torchscript'\nmodel = 'net.py'\nno-bench = true\n"
        "[tool.optimize-export.models.a]\n[tool.optimize-export.models.b]\nweights = 'missing.pt'\n"
    )

    def run(*more: str) -> tuple[int, dict]:
        command = [sys.executable, "-m", "optimizer", "build", "--all", "-j", "2", "--json", *more]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, check=False)
        return done.returncode, json.loads(done.stdout)

    code, document = run()
    assert code == 3
    assert document["models"]["a"]["ok"]
    assert document["models"]["b"]["error"]["message"] == "The weights file missing.pt doesn't exist."
    config(Path("pyproject.toml").read_text().replace("weights = 'missing.pt'", "seed = 2"))
    code, document = run("--if-changed")
    assert code == 0
    assert [document["models"][name]["up_to_date"] for name in ("a", "b")] == [True, False]
    assert document["models"]["b"]["changed"] == ["there is no bundle at dist/b"]
    assert json.loads((folder / "dist" / "b" / "manifest.json").read_text())["seed"] == 2
