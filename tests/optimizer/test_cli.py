"""The command: options, exit codes, and output on stdout and stderr. A fake engine replaces the real work."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from exporters.metadata import metadata_of
from optimize_export import errors
from optimize_export.errors import LoadError, OptimizeExportError
from optimizer.command import cli
from optimizer.command import tables as result_table
from optimizer.command.commands import COMMANDS
from optimizer.command.early_checks import default_output
from optimizer.command.tables import as_text
from optimizer.options import (
    DiagnoseOptions,
    ExportOptions,
    ListOptions,
    RejudgeOptions,
    TritonOptions,
    VerifyOptions,
)

ROOT = Path(cli.__file__).parent.parent.parent
DONE = {
    "ok": True,
    "exit_code": 0,
    "bundle": "dist/net",
    "passes": [
        {
            "name": "fold-conv-bn",
            "status": "applied",
            "changes": [{"where": "c", "text": "folded"}] * 53,
            "skips": [
                {"where": "a", "text": "it is a here"},
                {"where": "b", "text": "it has a hook"},
                {"where": "b.1", "text": "it is b.1 here"},
            ],
            "seconds": 0.5,
            "reason": None,
        },
        {
            "name": "channels-last",
            "status": "rolled-back",
            "changes": [],
            "skips": [],
            "seconds": 1,
            "reason": "error 3",
        },
    ],
    "artifacts": [
        {
            "format": "onnx",
            "path": "model.onnx",
            "bytes": 2048,
            "route": "dynamo",
            "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 3, 224]}],
            "outputs": [{"name": "logits", "dtype": "float32", "shape": ["batch", 10]}],
            "placement": {"CUDAExecutionProvider": 121, "CPUExecutionProvider": 4},
            "parity": {
                "verdict": "ok",
                "factor": 4.0,
                "outputs": [{"name": "logits", "max_error": 1.23e-6, "tolerance": 4e-6, "ratio": 0.6, "problem": None}],
            },
        }
    ],
    "notes": ["[no] markup"],
    "report": {
        "before": {"parameters": 25_000_000},
        "after": {"parameters": 24_000_000},
        "coverage": {"reached": 106, "parameterised": 107, "unreached": ["head"]},
    },
}


def step(stage, done, total, text, name=""):
    return {"stage": stage, "done": done, "total": total, "text": text, "name": name}


STEPS = [
    step("load", 0, 2, "model.py"),
    step("load", 1, 2, "model.py:net"),
    step("optimize", 0, 3, "fold-conv-bn", "fold-conv-bn"),
    step("optimize", 1, 3, "channels-last", "channels-last"),
    step("optimize", 1, 3, "fold-conv-bn", "fold-conv-bn"),
    step("optimize", 2, 3, "comparing"),
    step("export", 0, 1, "onnx"),
    step("parity", 1, 2, "onnx"),
    step("export", 1, 1, ""),
    step("bundle", 0, 1, "dist/net"),
    step("bundle", 1, 1, "dist/net"),
]
STAGES = [
    ("start", "importing torch"),
    ("load", "model.py:net"),
    ("optimize", "fold-conv-bn, channels-last"),
    ("export", "onnx"),
    ("parity", "onnx"),
    ("bundle", "dist/net"),
]


class Engine:
    """A fake `optimizer.command.engine` that keeps the options of its last call."""

    def __init__(self, outcome=DONE, during=lambda: None):
        self.outcome, self.during, self.options = outcome, during, None

    def export_model(self, options, progress):
        self.options = options
        for step in STEPS:
            progress(SimpleNamespace(**step))
        self.during()
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome

    def verify(self, options):
        return self.export_model(options, lambda progress: None)

    def rejudge(self, options):
        return self.export_model(options, lambda progress: None)

    def diagnose_model(self, options, progress):
        return self.export_model(options, lambda progress: None)

    def list_passes(self, _):
        return {"ok": True, "available_passes": [{"name": "p", "summary": "Does [x].", "options": {"budget": 0.5}}]}


@pytest.fixture
def run(monkeypatch, capfd):
    """Runs the command in this process; the result has the exit code and both streams."""

    def run(*arguments, engine=None):
        engine = engine or Engine()
        monkeypatch.setattr(cli, "_torch_side", lambda: engine)
        monkeypatch.setattr(cli, "check_early", lambda options: None)
        code = cli.main(arguments)
        out, err = capfd.readouterr()
        return SimpleNamespace(code=code, out=out, err=err, options=engine.options)

    return run


def test_defaults(run):
    assert run("nets/my_model.py").options == ExportOptions(model="nets/my_model.py", output=Path("dist/my_model"))
    assert run("m.py", "--passes", "none").options.passes == ""
    assert run("m.py", "--inputs", "b.npz", "--inputs", "a").options.input_files == (Path("b.npz"), Path("a"))


def test_every_option_arrives(run):
    text = (
        "m.py --model net --input 2x3 --input ids=int64[2,3]:0..9 --weights w.pt --passes a,b:x=1 --formats onnx "
        "--output out --device cuda --require-gpu --batch-sizes 1,4 --output-names y,z --input-names a,b --strict "
        "--force --seed 7 --quiet --atol logits=1e-3 --atol a=b=0 --rtol 0.5 --row-independence --reference-device cpu "
        "--finite-inputs --debug-dir wrong --profile-dir slow --opset 17 --thorough --dynamic x:0=n --no-bench "
        "--metadata author=Jane --metadata url=a=b --metadata empty="
    )
    assert run(*text.split()).options == ExportOptions(
        model="m.py",
        output=Path("out"),
        name="net",
        inputs=("2x3", "ids=int64[2,3]:0..9"),
        weights=Path("w.pt"),
        passes="a,b:x=1",
        formats=("onnx",),
        device="cuda",
        require_gpu=True,
        batch_sizes=(1, 4),
        dynamic={"x": {0: "n"}},
        input_names=("a", "b"),
        output_names=("y", "z"),
        strict=True,
        force=True,
        debug_dir=Path("wrong"),
        profile_dir=Path("slow"),
        opset=17,
        metadata={"author": "Jane", "url": "a=b", "empty": ""},
        seed=7,
        atol={"logits": 1e-3, "a=b": 0.0},
        rtol=0.5,
        row_independence=True,
        effort="thorough",
        bench=False,
        finite_inputs=True,
        reference_device="cpu",
    )


def test_each_command_asks_for_its_work(run):
    assert run("verify", "dist/x", "--device", "cpu").options == VerifyOptions(Path("dist/x"), "cpu")
    asked = run("--json", "verify", "dist/x", "--expect", "AB" * 32, "--no-run").options
    assert asked == VerifyOptions(Path("dist/x"), "cpu", expect="ab" * 32, run=False)
    assert run("rejudge", "dist/x").options == RejudgeOptions(Path("dist/x"))
    asked = run("rejudge", "dist/x", "--atol", "y=1", "--rtol", "2", "--factor", "0.5", "--details", "--json").options
    assert asked == RejudgeOptions(Path("dist/x"), {"y": 1.0}, 2.0, 0.5)
    asked = run("diagnose", "m.py", "--input", "2x3", "--fail-on", "warning").options
    loaded = ExportOptions(model="m.py", output=Path("dist/m"), inputs=("2x3",), given={"input": ("2x3",)})
    assert asked == DiagnoseOptions(loaded, "warning")
    assert run("profile", "m.py", "--output", "out/net").options.profile_dir == Path("profile/net")
    assert run("profile", "m.py", "--profile-dir", "p").options.profile_dir == Path("p")
    asked = cli.parse(["triton", "dist/x", "--output", "models", "--format", "onnx"])
    assert asked == TritonOptions(Path("dist/x"), Path("models"), "onnx")
    assert cli.parse(["passes"]) == ListOptions()
    assert cli.parse(["export", "m.py"]) == cli.parse(["m.py"])


def test_a_module_with_the_name_of_a_command_is_reached_by_its_file(run):
    assert run("./verify.py", "--json").options.model == "./verify.py"
    assert run("verify.py").options.model == "verify.py"


def test_the_list_of_passes_is_shown(run):
    assert run("passes").out.split() == ["pass", "description", "options", "p", "Does", "[x].", "budget=0.5"]
    assert json.loads(run("passes", "--json").out)["available_passes"][0]["name"] == "p"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_each_command_fits_a_screen_and_that_of_all_options_has_them(run, name):
    words = [] if name == "export" else [name]
    short, full = run(*words, "--help").out, run(*words, "--help-all").out
    assert len(short.splitlines()) <= 42
    assert max(map(len, short.splitlines())) <= 80
    for option in COMMANDS[name].options:
        assert f"  {option.opts[0]}" in full
        assert (f"  {option.opts[0]}" in short) == option.spelled.common


FOLDERS = {
    **{"model.py": "model", "a/b/net.py:build": "net", "pkg.nets:tiny": "nets", "pkg.nets": "nets", "/x/y.py": "y"},
    "timm:resnet50": "resnet50",
    "timm:resnet50.a1_in1k": "resnet50.a1_in1k",
    "timm:hf-hub:timm/resnet50.a1_in1k": "resnet50.a1_in1k",
    "timm.models:resnet50": "models",
    "transformers:google/vit-base": "vit-base",
    "transformers:models/bert/": "bert",
    "transformers:models/..": Path.cwd().name,
}


@pytest.mark.parametrize("model", FOLDERS)
def test_the_default_folder_is_named_after_the_model(model):
    assert default_output(model) == Path("dist", FOLDERS[model])


# Each call with the words of its error.
MISTAKES = {
    "": "MODEL is missing: pass a Python file such as model.py",
    "diagnose": "MODEL is missing",
    "verify": "BUNDLE is missing: name the folder of a bundle, such as dist/net",
    "verfy b": "There is no command or file verfy: did you mean verify?",
    "m.py n.py": "unexpected extra argument (n.py)",
    "m.py --no-such": "There is no option --no-such: optimize-export --help-all lists all.",
    "m.py --wieghts x": "There is no option --wieghts: did you mean --weights?",
    "m.py --fail-on error": "There is no option --fail-on here: it goes with optimize-export diagnose.",
    "diagnose m.py --opset 17": "There is no option --opset here: it goes with optimize-export MODEL.",
    "passes --details": "There is no option --details here",
    "m.py --device tpu": "'tpu' is not one of 'auto', 'cpu', 'cuda'",
    "m.py --device cuda:1": "'cuda'; set CUDA_VISIBLE_DEVICES=1 before Python starts, and use 'cuda'.",
    "m.py --seed -1": "--seed: '-1' is not a whole number from 0 to 9223372036854775807",
    f"m.py --seed {'9' * 5000}": "is not a whole number",
    "m.py --batch-sizes 0": "'0' is not a whole number from 1 to 1048576",
    "m.py --batch-sizes 1,,2": "has an empty entry",
    "m.py --batch-sizes 1,2,1": "--batch-sizes has 1 twice.",
    "m.py --formats onnx,onnx": "--formats has onnx twice.",
    "m.py --metadata author": "--metadata 'author' has no value; add one, such as --metadata author=Jane.",
    "m.py --metadata a=1 --metadata a=1": "--metadata sets a twice.",
    **{f"m.py --atol '{text}'": f"--atol: {text!r} is not a number" for text in ("x", "-1", "nan", "inf", "")},
    "m.py --atol 1 --atol 2": "--atol is given twice for all outputs.",
    "m.py --atol y=1 --atol y=2": "--atol is given twice for y.",
    "m.py --atol y=1 --atol 2": "--atol is set for all outputs and for y",
    **{f"rejudge b --factor {text}": f"--factor: {text!r} is not a number above 0" for text in ("0", "x", "nan")},
    **{f"m.py --dynamic '{text}'": f"--dynamic {text!r} opens no dim" for text in ("x", "x:", ":0", "")},
    "m.py --dynamic x:-1": "'-1' is not a dim; dims are whole numbers, counted from 0.",
    "m.py --dynamic 'x:0=a b'": "'a b' is not a name for a size",
    "m.py --dynamic x:0 --dynamic x:0=n": "--dynamic lists dim 0 of x twice.",
    "verify b --expect ab": "--expect: 'ab' is not a SHA-256, which has 64 hexadecimal digits",
    "m.py --passes ''": "--passes names no pass",
    "m.py --output ' '": "--output names no folder",
    "m.py --profile-dir ''": "--profile-dir names no folder",
    "m.py --input": "requires an argument",
    "m.py --metadata --force": "--metadata needs a KEY=VALUE, but --force follows it.",
    "m.py --input 2x3 --inputs a.npz": "--input and --inputs contradict each other",
    **{f"m.py --tune-seconds {text}": f"{text!r} is not a number above 0" for text in ("0", "-1", "abc", "inf")},
    "m.py --tune --no-bench": "Tuning times the files: leave out --no-bench",
    "m.py --tune --choices x": "Tuning and choices contradict each other",
    "m.py --accuracy 0.9 --no-bench": "An accuracy budget implies tuning, which times the files: leave out --no-bench.",
    "m.py --accuracy 0.9 --no-tune": "only with tuning or choices: leave out --no-tune.",
    "m.py --tune --accuracy 1": "accuracy '1' isn't a budget",
    "m.py --tune --calibration x": "only with an accuracy budget: add one, such as --accuracy 0.999.",
    "m.py --choices ' '": "--choices names no bundle",
    "triton --output models": "BUNDLE is missing",
    "triton net": "triton has no repository",
    "m.py --if-changed --force": "--if-changed and --force contradict each other: --if-changed replaces its own bundle",
    "m.py --if-changed --profile-dir p": "--if-changed and profiles contradict each other: nothing runs if the bundle is",
    "m.py --static-batch --batch-sizes 1": "--static-batch and --batch-sizes contradict each other.",
    "m.py --require-gpu --device cpu": "--require-gpu and --device cpu contradict each other.",
    "m.py --quick --thorough": "--quick and --thorough contradict each other",
    "verify b --no-run --device cpu": "--no-run and --device contradict each other.",
}


@pytest.mark.parametrize("call", MISTAKES, ids=lambda call: call[:60])
def test_usage_errors_are_one_line(run, call):
    done = run(*shlex.split(call))
    assert (done.code, done.out, done.options) == (2, "", None)
    assert done.err.startswith("optimize-export: error: ")
    assert done.err.count("\n") == 1
    assert MISTAKES[call] in done.err


def test_an_option_in_the_place_of_a_value_is_told_as_json(run):
    done = run("m.py", "--output", "--json")
    assert (done.code, done.options) == (2, None)
    document = json.loads(done.out)
    assert (document["exit_code"], document["error"]["kind"]) == (2, "UsageError")
    assert document["error"]["message"] == "--output needs a DIR, but --json follows it."


@pytest.mark.parametrize("arguments", [["--version", "--json"], ["--json", "--version"]])
def test_the_version_is_one_json_document_where_that_is_asked_for(run, arguments):
    done = run(*arguments)
    document = json.loads(done.out)
    assert (done.code, done.err, document["ok"], document["exit_code"]) == (0, "", True, 0)
    assert f"(torch {document['torch']})" in run("--version").out


def test_the_help_is_one_json_document_where_that_is_asked_for(run):
    document = json.loads(run("--help", "--json").out)
    assert document["help"] + "\n" == run("--help").out == run("-h").out
    assert document["ok"]


class NoException(BaseException):
    pass


@pytest.mark.parametrize("error", [NoException("gone"), SystemExit(0), GeneratorExit(), KeyError("x")])
def test_whatever_ends_the_work_is_told_with_a_code(run, error):
    done = run("m.py", "--json", engine=Engine(error))
    assert done.code == json.loads(done.out)["exit_code"] == 1
    assert f"a defect of optimize-export itself: {type(error).__name__}" in done.err
    assert done.err.endswith("; please report it with the output of --debug.\n")


KINDS = ("UsageError", "LoadError", "ExportFailed", "DeviceError", "ParityError", "OptimizeFailed", "BundleError")


@pytest.mark.parametrize(("code", "kind"), [*enumerate((*KINDS, "VacuousError", "FindingsFound"), 2)])
def test_errors_have_their_exit_codes_and_one_line(run, code, kind):
    message = "a\n  b"
    error = getattr(errors, kind)(message)
    done = run("m.py", "--quiet", engine=Engine(error))
    assert (done.code, done.out) == (code, "")
    assert done.err == "optimize-export: error: {}\n".format(message.replace("\n", "\\n"))
    done = run("m.py", "--quiet", "--json", engine=Engine(error))
    assert done.code == code
    assert json.loads(done.out) == {
        "ok": False,
        "exit_code": code,
        "error": {"code": code, "kind": kind, "message": message},
    }


EVIL = "x\noptimize-export: bundle verified\x1b[2J\u202e\x7f\udcff"
SHOWN = r"x\noptimize-export: bundle verified\x1b[2J\u202e\x7f\udcff"


@pytest.mark.parametrize("options", [[], ["--debug"]])
def test_names_cant_speak_for_the_program(run, options):
    done = run("m.py", *options, engine=Engine(LoadError(f"There is no file {EVIL}.")))
    assert done.err.splitlines()[-1] == f"optimize-export: error: There is no file {SHOWN}."
    assert "optimize-export: bundle verified" not in [line.partition("\x1b")[0] for line in done.err.splitlines()]
    assert all(line.isprintable() for line in done.err.split("\n"))


def test_names_in_a_result_are_escaped(run):
    document = json.loads(json.dumps(DONE).replace("logits", "{}").replace("{}", json.dumps(EVIL)[1:-1]))
    document |= {"bundle": EVIL, "notes": [EVIL], "problems": [EVIL]}
    done = run("m.py", engine=Engine(document))
    assert all(line.isprintable() for line in (*done.out.split("\n"), *done.err.split("\n")))
    assert f"bundle: {SHOWN}" in done.out.splitlines()
    assert f"optimize-export: error: {SHOWN}" in done.err.splitlines()
    assert run("m.py", "--quiet", engine=Engine(document)).out == f"{SHOWN}\n"
    done = run("m.py", "--json", engine=Engine(document))
    told = json.loads(done.out)
    assert told.pop("stages")
    assert told == document
    assert all(line.isprintable() for line in done.out.split("\n"))


def test_every_error_class_is_documented_in_the_help(run):
    codes = {error.exit_code for error in OptimizeExportError.__subclasses__()} | {0, 1, 130}
    shown = {line.split()[0] for line in run("--help-all").out.partition("Exit codes:")[2].splitlines() if line.strip()}
    assert shown == {str(code) for code in codes}


@pytest.mark.parametrize("error", [KeyError("x"), LoadError("gone")])
def test_only_debug_shows_a_traceback(run, error):
    assert "Traceback" not in run("m.py", engine=Engine(error)).err
    done = run("m.py", "--debug", engine=Engine(error))
    assert "Traceback" in done.err
    assert "in export_model" in done.err
    assert done.err.splitlines()[-1].startswith("optimize-export: error: ")


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_signals_unwind(run, number, code, word):
    unwound = []

    def during():
        try:
            signal.raise_signal(number)
        finally:
            unwound.append(True)

    handler = signal.getsignal(signal.SIGTERM)
    done = run("m.py", "--quiet", engine=Engine(during=during))
    assert (done.code, done.out, done.err) == (code, "", f"optimize-export: {word}\n")
    assert unwound
    assert signal.getsignal(signal.SIGTERM) is handler
    done = run("m.py", "--json", "--quiet", engine=Engine(during=during))
    assert json.loads(done.out)["error"]["code"] == code


def test_another_thread_may_run_the_command(run):
    codes = []
    thread = threading.Thread(target=lambda: codes.append(run("m.py").code))
    thread.start()
    thread.join()
    assert codes == [0]


# stdout and stderr ----------------------------------------------------------------------------------------------------


def noisy():
    print("printed by the user")
    os.write(1, b"written by a C library\n")
    subprocess.run([sys.executable, "-c", "print('printed by a child')"], check=True)


NOISE = ["printed by the user", "written by a C library", "printed by a child"]


@pytest.mark.parametrize("options", [[], ["--json"], ["--quiet"], ["--quiet", "--json"]])
def test_what_the_user_prints_goes_to_stderr(run, options):
    done = run("m.py", *options, engine=Engine(during=noisy))
    for line in NOISE:
        assert line in done.err
        assert line not in done.out
    if "--json" in options:
        document = json.loads(done.out)
        assert document.pop("stages")
        assert document == DONE
    elif "--quiet" in options:
        assert done.out == "dist/net\n"


def test_quiet_has_no_progress(run):
    assert run("m.py", "--quiet").err == ""
    assert run("m.py").err


def test_each_stage_has_a_line_with_its_name_and_time(run):
    done = run("m.py", "--json", engine=Engine(during=lambda: time.sleep(0.05)))
    assert [re.sub(r": \d+\.\d s$", "", line) for line in done.err.splitlines()] == [
        f"optimize-export: {stage} {name}" for stage, name in STAGES
    ]
    stages = json.loads(done.out)["stages"]
    assert [(each["stage"], each["name"]) for each in stages] == STAGES
    assert stages[-1]["seconds"] >= 0.05


def test_a_stage_that_fails_has_no_line(run):
    done = run("m.py", engine=Engine(LoadError("No model.")))
    assert [line.split(":")[1] for line in done.err.splitlines()][-2:] == [" parity onnx", " error"]


def test_the_result_table(run):
    assert run("m.py").out.splitlines() == [
        "pass           status       changes  skips  reason",
        "fold-conv-bn   applied      53       3      it is … here (2 of 3)",
        "channels-last  rolled-back  0        0      error 3",
        "",
        "model.onnx  2.0 KiB  ok, 15 % of the allowed error",
        "",
        "note: [no] markup",
        "parameters: 25,000,000 -> 24,000,000",
        "the example inputs don't reach 1 of 107 modules with weights: head",
        "bundle: dist/net",
    ]


def lines(*, details=False, **changes):
    return as_text({**DONE, **changes}, terminal=False, details=details).splitlines()


def one_artifact(**changes):
    return [{**DONE["artifacts"][0], **changes}]


@pytest.mark.parametrize(
    ("skips", "shown"),
    [
        ([], ""),
        (["a", "b", "b"], "b (2 of 3)"),
        (["it passes a.bn1, whose forward"], "it passes a.bn1, whose forward (1 of 1)"),
        (["a", "it passes a.bn1, whose x", "it passes b.2.bn, whose x"], "it passes …, whose x (2 of 3)"),
        (["the layer head is another's", "the layer tail is another's", "x"], "the layer … is another's (2 of 3)"),
    ],
)
def test_the_most_frequent_reason_of_a_skip_is_shown_with_its_count(skips, shown):
    places = {"the layer head is another's": "head", "the layer tail is another's": "tail"}
    skipped = [{"where": places.get(text, ""), "text": text} for text in skips]
    passes = [{**DONE["passes"][0], "status": "unchanged", "changes": [], "skips": skipped}]
    assert lines(passes=passes)[1].split(maxsplit=4)[4:] == ([shown] if shown else [])


def test_a_warning_is_told_once_and_nothing_of_reach_where_the_inputs_reach_everything():
    coverage = {"reached": 107, "parameterised": 107, "unreached": []}
    report = {**DONE["report"], "coverage": coverage, "warnings": ["bn is in training mode"]}
    shown = lines(report=report, notes=["bn is in training mode", "n"])
    assert shown[-4:-2] == ["warning: bn is in training mode", "note: n"]
    assert not any("107" in line for line in shown)


OUTPUT = {"name": "y", "max_error": 1e-6, "tolerance": 4e-6, "problem": None, "ratio": 0.6, "slice_ratio": 0.0}


def judged(factor, verdict="ok", **changes):
    return {"verdict": verdict, "factor": factor, "outputs": [{**OUTPUT, "ratio": 0}, {**OUTPUT, **changes}]}


@pytest.mark.parametrize(
    ("parity", "shown"),
    [
        (judged(4.0, ratio=2), "ok, 50 % of the allowed error"),
        (judged(4.0, slice_ratio=256), "ok, 100 % of the allowed error"),
        (judged(8.0, slice_ratio=256), "ok, 50 % of the allowed error"),
        (judged(16.0, ratio=0.1), "ok, under 1 % of the allowed error"),
        ({**judged(4.0), "outputs": [{**OUTPUT, "ratio": 0}]}, "ok, no error"),
        ({**judged(4.0), "outputs": [{**OUTPUT, "by_user": True}]}, "ok, within your tolerance"),
        ({**judged(4.0), "outputs": [{**OUTPUT, "judged": False}]}, "ok"),
        (judged(4.0, verdict="failed"), "failed"),
        (judged(4.0, verdict="vacuous"), "vacuous: the outputs prove nothing"),
        (None, "not checked"),
    ],
)
def test_one_line_tells_what_became_of_a_file(parity, shown):
    assert f"model.onnx  97 MiB  {shown}" in lines(artifacts=one_artifact(bytes=97 << 20, parity=parity))


def test_a_format_that_is_missing_has_a_line_with_its_reason():
    missing = {"pt2": "torch.export can't capture it.", "theirs": "It has no place for text."}
    shown = lines(missing=missing)
    start = shown.index("model.onnx  2.0 KiB  ok, 15 % of the allowed error")
    assert shown[start + 1 : start + 3] == [
        "model.pt2            missing: torch.export can't capture it.",
        "theirs               missing: It has no place for text.",
    ]
    alone = as_text({"ok": False, "missing": missing}, terminal=False).splitlines()
    assert alone[0] == "model.pt2  missing: torch.export can't capture it."


def test_remarks_stand_below_the_passes():
    remarks = [{"where": f"layer{number} (view)", "text": "something is lost here"} for number in range(7)]
    remarks[1]["where"] = ""
    assert lines(passes=[{**DONE["passes"][0], "remarks": remarks}, DONE["passes"][1]])[3:10] == [
        "fold-conv-bn: layer0 (view): something is lost here",
        "fold-conv-bn: the root: something is lost here",
        *(f"fold-conv-bn: layer{number} (view): something is lost here" for number in (2, 3, 4)),
        "fold-conv-bn: 2 more such places are in the report",
        "",
    ]


def test_by_a_tolerance_of_the_users_the_table_shows_what_that_is_about():
    output = {**DONE["artifacts"][0]["parity"]["outputs"][0], "by_user": True, "max_difference": 3e-8}
    shown = lines(artifacts=one_artifact(parity={"verdict": "ok", "outputs": [output]}), details=True)
    row = ["onnx", "logits", "3e-08", "4e-06", "(yours)", "-", "-", "-", "-", "ok"]
    assert row in [line.split() for line in shown]


FIGURES = {"mean_error": 2e-7, "p999_error": 9e-7, "cosine": 0.9999999, "agreement": 1.0, "undecided": 0}
CALLS = [
    {"batch_size": 1, "draw": 0, "max_error": 1.23e-6, **FIGURES},
    {"batch_size": None, "draw": 1, "max_error": None, **FIGURES, "agreement": 0.99999, "undecided": 3},
]


def test_details_are_shown_where_they_are_asked_for(run):
    plain = DONE["artifacts"][0]["parity"]["outputs"][0]
    parity = {"verdict": "ok", "outputs": [{**plain, **FIGURES, "calls": CALLS}, {**plain, "name": "y"}]}
    engine = Engine({**DONE, "artifacts": one_artifact(parity=parity)})
    of_calls = [
        ["onnx", "logits", "1", "0", "1.2e-06", "2e-07", "9e-07", "1.000000", "100", "%"],
        ["onnx", "logits", "-", "1", "-", "2e-07", "9e-07", "1.000000", "99.9", "%", "(3", "left", "out)"],
    ]
    of_all = [
        ["pass", "status", "changes", "skips", "seconds", "reason"],
        ["channels-last", "rolled-back", "0", "0", "1.00", "error", "3"],
        ["file", "route", "inputs", "outputs", "nodes", "on"],
        ["model.onnx", "dynamo", "x[batch,3,224]", "logits[batch,10]", "CUDA", "121,", "CPU", "4"],
        ["parity", "of", "output", "error", "allowed", "mean", "99.9", "%", "cosine", "top-1", "result"],
        ["onnx", "logits", "1.2e-06", "4e-06", "2e-07", "9e-07", "1.000000", "100", "%", "ok"],
        ["onnx", "y", "1.2e-06", "4e-06", "-", "-", "-", "-", "ok"],
    ]
    for arguments, wanted in (("m.py", []), ("m.py --details", of_all + of_calls), ("verify b --details", of_calls)):
        shown = [line.split() for line in run(*arguments.split(), engine=engine).out.splitlines()]
        assert all(row in shown for row in wanted)
        assert wanted or not any(row in shown for row in of_all + of_calls)


def test_a_bundle_that_is_judged_again_shows_what_was_run_where():
    ran = {"format": "onnx", "path": "model.onnx", "device": "cuda", "calls": 3, "problem": None}
    artifacts = [
        {**ran, "placement": {"CUDAExecutionProvider": 9}, "parity": {"verdict": "ok", "outputs": []}},
        {**ran, "path": "model.torchscript.pt", "placement": None, "parity": None, "problem": "it can't be loaded"},
    ]
    shown = as_text({"ok": True, "bundle": "b", "artifacts": artifacts}, terminal=False, details=True).splitlines()
    assert shown[:3] == ["model.onnx            ok", "model.torchscript.pt  failed", ""]
    assert [line.split() for line in shown[3:6]] == [
        ["file", "run", "on", "calls", "nodes", "on"],
        ["model.onnx", "cuda", "3", "CUDA", "9"],
        ["model.torchscript.pt", "cuda", "3", "-"],
    ]


def test_the_users_metadata_are_shown_and_not_those_that_every_file_has():
    metadata = {"author": "Jane", "notes": "two\nlines", "optimize_export.torch": "2.13"}
    shown = lines(artifacts=one_artifact(metadata=metadata))
    assert "metadata of onnx: author=Jane, notes=two lines" in shown
    assert "optimize_export" not in str(shown)
    assert all(key.startswith(result_table._OURS) for key in metadata_of(nn.Identity(), (), (), {}))


def test_rows_are_told_of_below_the_figures():
    rows = {"ok": True, "alone": False, "batch_sizes": [2, 3], "without_rows": ["loss"], "outputs": [], "problem": None}
    told = (
        "none depends on the other rows (batch sizes 2, 3; run at other positions and among other rows); "
        "not checked, because they have no rows: loss"
    )
    for found, shown in ((rows, told), ({**rows, "ok": False, "problem": "Row 1 of y depends"}, "Row 1 of y depends")):
        parity = {**DONE["artifacts"][0]["parity"], "rows": found}
        assert f"rows of onnx: {shown}" in lines(artifacts=one_artifact(parity=parity))


LONG = "the BatchNorm at the end of a rather long chain of layers has another reader"


@pytest.mark.parametrize("width", [80, 60, 40])
def test_no_table_breaks_a_name_or_a_number(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "dumb")  # no colours, which would count as characters here
    output = {**DONE["artifacts"][0]["parity"]["outputs"][0], **FIGURES, "calls": CALLS}
    parity = {"verdict": "ok", "factor": 4.0, "outputs": [output]}
    artifacts = one_artifact(path="model.torchscript.pt", bytes=97 << 20, parity=parity)
    skips = [{"where": "", "text": LONG}] * 2
    changed = {"passes": [{**DONE["passes"][0], "skips": skips}], "missing": {"pt2": LONG}, "notes": [LONG]}
    document = {**DONE, **changed, "artifacts": artifacts}
    text, wide = (as_text(document, terminal=terminal, details=True) for terminal in (True, False))
    assert {*wide.split()} == {*text.split()}
    assert len(text.splitlines()) > len(wide.splitlines())
    # Only the columns of sentences are made narrower.
    assert max(map(len, as_text(document, terminal=True).splitlines())) <= max(width, 64)


def test_a_failed_check_shows_figures_and_problems(run):
    outputs = [{"name": "y", "max_error": "Infinity", "tolerance": 4e-6, "problem": "y has inf"}]
    failed = {
        "ok": False,
        "exit_code": 6,
        "bundle": "b",
        "problems": ["model.onnx: y has inf."],
        "artifacts": [{"format": "onnx", "path": "model.onnx", "outputs": outputs, "problem": "y has inf"}],
    }
    done = run("verify", "b", engine=Engine(failed))
    assert done.code == 6
    row = ["onnx", "y", "Infinity", "4e-06", "-", "-", "-", "-", "failed"]
    assert row in [line.split() for line in done.out.splitlines()]
    assert done.err == "optimize-export: error: model.onnx: y has inf.\n"
    assert json.loads(run("verify", "b", "--json", engine=Engine(failed)).out) == failed


# As a process ---------------------------------------------------------------------------------------------------------


def process(code: str, **kwargs):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False, **kwargs
    )


WRONG = [
    [__file__, "--debug-dir", os.path.dirname(__file__)],
    [f"{__file__}:a", "--model", "b"],
    ["there_is_no_such.py"],
    [__file__, "--weights", "there_is_no_such.pt"],
    [__file__, "--inputs", "there_is_no_such.safetensors"],
    [__file__, "--calibration", "there_is_no_such.npz", "--accuracy", "0.9"],
]


def test_torch_isnt_imported_before_it_is_needed():
    calls = [["--help"], ["--version"], ["m.py", "--batch-sizes", "0"], *WRONG]
    done = process(
        f"import sys\nfrom optimizer.command.cli import main\nfor call in {calls!r}:\n    main(call)\n"
        "    imported = {name.partition('.')[0] for name in sys.modules} & {'torch', 'numpy', 'onnx', 'rich'}\n"
        "    assert not imported, (call, imported)"
    )
    assert done.returncode == 0, done.stderr


FAKE = """
import atexit, os, signal, sys, threading
from optimizer.command import cli
class Engine:
    @staticmethod
    def export_model(options, progress):
        {body}
        return {{"ok": True, "bundle": "b" * 100000}}
cli._torch_side, cli.check_early = lambda: Engine, lambda options: None
sys.argv = ["optimize-export", "m.py", {options}]
sys.exit(cli.main())
"""


def test_what_is_printed_at_exit_goes_to_stderr():
    done = process(FAKE.format(body="atexit.register(print, 'bye')", options="'--json'"))
    assert json.loads(done.stdout)["ok"]
    assert done.stderr.splitlines()[-1] == "bye"
    assert done.returncode == 0


@pytest.mark.slow
def test_a_terminal_gets_a_line_for_each_stage():
    import pty

    leader, follower = pty.openpty()
    body = (
        "from types import SimpleNamespace as P\n"
        "        [progress(P(stage=s, done=1, total=2, text='[b]net', name='')) for s in 'ab']"
    )
    done = subprocess.run(
        [sys.executable, "-c", FAKE.format(body=body, options="")],
        stdout=subprocess.PIPE,
        stderr=follower,
        cwd=ROOT,
        check=False,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
    )
    os.close(follower)
    shown = os.read(leader, 1 << 16).decode()
    os.close(leader)
    assert done.returncode == 0
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "\n", shown)
    assert [line for line in dict.fromkeys(shown.splitlines()) if "net" in line] == [
        "a           0.0 s  [b]net",
        "b           0.0 s  [b]net",
    ]
    assert done.stdout.startswith(b"bundle: bbb")


def test_a_reader_that_goes_away_is_no_error():
    code = FAKE.format(body="pass", options="'--json', '--quiet'")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, cwd=ROOT, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("streams", "options"),
    [(">&-", ""), (">&-", "'--json'"), ("2>&-", "'--json'"), (">&- 2>&-", "'--json'"), ("<&- >&- 2>&-", "")],
)
def test_streams_that_are_closed_from_the_start_are_no_error(tmp_path, streams, options):
    """A file that is opened in place of a closed stream doesn't receive the output, either."""
    written = tmp_path / "written"
    body = f"f = open({str(written)!r}, 'w'); f.write('mine'); f.flush(); os.write(1, b'x'); os.write(2, b'x'); print('x', flush=True)"
    command = ["sh", "-c", f'exec "$0" "$@" {streams}', sys.executable, "-c", FAKE.format(body=body, options=options)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr
    assert written.read_text() == "mine"
    if ">&-" in streams.split():
        assert done.stdout == ""
    elif options:
        assert json.loads(done.stdout)["ok"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")
def test_a_result_that_cant_be_written_is_an_error():
    with open("/dev/full", "wb") as full:
        code = FAKE.format(body="pass", options="'--json', '--quiet'")
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, cwd=ROOT, check=False)
    assert done.returncode == 8
    assert (
        done.stderr == b"optimize-export: error: the result couldn't be written to stdout: No space left on device.\n"
    )


@pytest.mark.parametrize(
    ("start", "arguments"),
    [
        ("from _optimize_export_start import main; sys.exit(main())", "['--help']"),
        ("import runpy; runpy.run_module('optimizer', run_name='__main__')", "['verify', 'net']"),
    ],
)
def test_an_installation_for_serving_says_what_the_command_lacks(start, arguments):
    done = process(f"import sys; sys.modules['click'] = None; sys.argv[1:] = {arguments}; {start}")
    assert done.returncode == 2
    assert done.stderr.startswith("optimize-export: error: The command needs the package click, which isn't installed")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("package", "code"), [("torch", 2), ("rich", 2), ("of_nobody", 1)])
def test_a_package_that_is_missing_later_is_one_sentence(run, monkeypatch, package, code):
    def lacks():
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    done = run("m.py", engine=Engine(during=lacks))
    assert done.code == code
    assert (f"The command needs the package {package}, which isn't installed" in done.err) == (code == 2)
