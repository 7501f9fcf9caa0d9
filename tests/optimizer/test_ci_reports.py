"""`--junit` and `--sarif`: what they have for a success, a failure and an error, and that they can always be read."""

import json
import linecache
import re
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from optimize_export.errors import BundleError, LoadError
from optimizer import export
from optimizer.command import cli

ODD = "a\x00b\x1b[0m <&\"']]> \ud800\uffff \u202e[x](http://y)"


def finding(
    rule="unregistered", level="error", file="net.py", line=2, modules=("layers[0]",), sentence="It is. Add it."
):
    where = f"{file}:{line}"
    return {
        "rule": rule,
        "level": level,
        "file": file,
        "line": line,
        "modules": [*modules],
        "where": where,
        "sentence": sentence,
    }


def diagnosis(*findings):
    rules = [
        {"name": name, "level": "error", "description": f"Finds {name}.\nAnd more."}
        for name in ("unregistered", "other")
    ]
    levels = {level: sum(each["level"] == level for each in findings) for level in ("error", "warning", "note")}
    return {"ok": True, "exit_code": 0, "diagnosis": {"levels": levels, "findings": [*findings]}, "rules": rules}


def artifact(path="model.onnx", problem=None, outputs=()):
    listed = [{"name": name, "problem": said} for name, said in outputs]
    return {"path": path, "ok": problem is None, "problem": problem, "parity": {"outputs": listed}, "outputs": []}


def verified(*artifacts, problems=()):
    problems = [*problems, *(each["problem"] for each in artifacts if each["problem"])]
    return {"ok": not problems, "exit_code": 6 if problems else 0, "artifacts": [*artifacts], "problems": problems}


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs a command whose work gives this document or raises this error; the result has both files."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    Path("net.py").write_text("import torch\nlayers = [1]\nlayers = [1]\n", encoding="utf-8")

    def run(outcome, *arguments, known=True):
        def work(*_):
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        monkeypatch.setattr(cli, "_torch_side", lambda: SimpleNamespace(verify=work, diagnose_model=work))
        code = cli.main([*arguments, "--junit", "out/ci.xml", "--sarif", "out/ci.sarif", "--quiet"])
        cases = {each.get("name"): each for each in checked_junit(Path("out/ci.xml").read_bytes()).iter("testcase")}
        (ran,) = checked_sarif(Path("out/ci.sarif").read_bytes())["runs"]
        assert [path.name for path in Path("out").iterdir() if path.name.startswith(".")] == []
        return SimpleNamespace(code=code, cases=cases, run=ran, results=ran["results"])

    return run


def checked_junit(data):
    """The suite, with what the schema of Jenkins requires."""
    suites = ElementTree.fromstring(data)
    (suite,) = suites
    assert (suites.tag, suite.tag) == ("testsuites", "testsuite")
    cases = [*suite]
    assert {each.tag for each in cases} == {"testcase"}
    assert all(each.get("name") and each.get("classname") for each in cases)
    inside = [child for each in cases for child in each]
    assert {each.tag for each in inside} <= {"failure", "error", "system-out"}
    for element in (suites, suite):
        counted = [str(sum(each.tag == kind for each in inside)) for kind in ("failure", "error")]
        assert [element.get(name) for name in ("tests", "failures", "errors")] == [str(len(cases)), *counted]
    return suite


def checked_sarif(data):
    """The log, with what the schema of SARIF 2.1.0 and code scanning require."""
    log = json.loads(data)
    assert log["version"] == "2.1.0"
    assert log["$schema"].endswith("/sarif-2.1.0.json")
    for run in log["runs"]:
        rules = run["tool"]["driver"]["rules"]
        assert run["tool"]["driver"]["name"] == "optimize-export"
        assert len({rule["id"] for rule in rules}) == len(rules)
        assert all(rule[key]["text"] for rule in rules for key in ("shortDescription", "fullDescription", "help"))
        assert isinstance(run["invocations"][0]["executionSuccessful"], bool)
        marks = [json.dumps(each["partialFingerprints"]) for each in run["results"]]
        assert len({*marks}) == len(marks)
        for result in run["results"]:
            assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
            assert result["level"] in ("error", "warning", "note")
            assert result["message"]["text"]
            (location,) = result["locations"]
            place = location["physicalLocation"]["artifactLocation"]
            assert place["uriBaseId"] in run["originalUriBaseIds"]
            assert re.fullmatch(r"[\w./%~-]+", place["uri"], re.ASCII)
            assert not place["uri"].startswith(("/", "."))
            assert location["physicalLocation"].get("region", {"startLine": 1})["startLine"] >= 1
    return log


def test_a_verified_bundle_has_a_passed_case_for_each_file_and_output(run):
    done = run(verified(artifact(outputs=[("logits", None), ("boxes", None)])), "verify", "dist/net")
    assert [*done.cases] == ["bundle", "model.onnx", "logits", "boxes"]
    assert {each.get("classname") for each in done.cases.values()} == {"net", "net/model.onnx"}
    assert (done.code, done.results, [*done.run["invocations"]]) == (
        0,
        [],
        [{"executionSuccessful": True, "exitCode": 0}],
    )


def test_a_wrong_output_fails_with_its_sentence(run):
    wrong = artifact(problem="model.onnx: it differs", outputs=[("logits", "too far off"), ("boxes", None)])
    done = run(verified(wrong, artifact("model.pt")), "verify", "dist/net")
    told = {name: [each.get("message") for each in case] for name, case in done.cases.items()}
    assert told.pop("logits") == ["too far off"]
    assert told.pop("model.onnx") == ["model.onnx: it differs"]
    assert all(not each for each in told.values())
    (result,) = done.results
    assert (result["ruleId"], result["message"]["text"]) == ("artifact", "model.onnx: it differs")
    place = {"uri": "sub/dist/net/model.onnx", "uriBaseId": "%SRCROOT%"}
    assert result["locations"] == [{"physicalLocation": {"artifactLocation": place}}]


def test_a_set_of_other_versions_has_its_own_cases_and_is_in_its_sentences(run):
    wrong = verified(artifact(problem="model.onnx: it differs", outputs=[("logits", "too far off")]))
    sets = [{**wrong, "name": "onnxruntime==1.24.1"}, {**wrong, "name": "onnxruntime==1.25.0"}]
    sets += [{"name": "openvino==1", "artifacts": [], "problems": ["pip finds none."]}]
    done = run({"ok": False, "exit_code": 6, "problems": [], "upgrade": {"sets": sets}}, "verify", "net")
    assert done.cases["bundle"].get("classname") == "net with openvino==1"
    assert [(each["ruleId"], each["message"]["text"]) for each in done.results] == [
        ("artifact", "with onnxruntime==1.24.1: model.onnx: it differs"),
        ("artifact", "with onnxruntime==1.25.0: model.onnx: it differs"),
        ("bundle", "with openvino==1: pip finds none."),
    ]


def test_what_a_budget_does_not_count_is_no_failure(run):
    lossy = {**artifact(), "parity": None, "outputs": [{"name": "logits", "problem": "other rows"}]}
    assert not [*run(verified(lossy), "verify", "b").cases["logits"]]


def test_damage_is_told_before_any_file(run):
    done = run(verified(problems=["README.md is missing.", "x is not listed."]), "verify", "b")
    assert done.cases["bundle"][0].get("message") == "README.md is missing. x is not listed."
    assert [each["ruleId"] for each in done.results] == ["bundle"]


def test_findings_fail_from_the_level_of_fail_on(run):
    found = finding(), finding("other", "note", modules=(), line=1)
    done = run(diagnosis(*found), "diagnose", "net.py", "--fail-on", "warning")
    failed, told = done.cases["unregistered net.py:2"], done.cases["other net.py:1"]
    assert ([each.tag for each in failed], [each.tag for each in told]) == (["failure"], ["system-out"])
    assert told[0].text == "note: It is. Add it."
    # In SARIF the level says it.
    assert [(each["ruleId"], each["level"]) for each in done.results] == [("unregistered", "error"), ("other", "note")]
    place = done.results[0]["locations"][0]
    assert place["physicalLocation"]["region"] == {"startLine": 2}
    assert place["physicalLocation"]["artifactLocation"] == {"uri": "sub/net.py", "uriBaseId": "%SRCROOT%"}
    assert place["logicalLocations"] == [{"fullyQualifiedName": "layers[0]", "kind": "member"}]


def test_a_rule_without_findings_is_a_passed_case(run):
    done = run(diagnosis(), "diagnose", "net.py")
    assert ([*done.cases], done.results) == (["unregistered", "other"], [])
    (rule, _) = done.run["tool"]["driver"]["rules"]
    assert rule["shortDescription"] == {"text": "Finds unregistered"}
    assert rule["help"] == {"text": "Finds unregistered. And more."}


def test_a_fingerprint_stays_where_the_line_moves(run):
    def marks(*found):
        return [each["partialFingerprints"] for each in run(diagnosis(*found), "diagnose", "net.py").results]

    first, same = marks(finding(line=2), finding(line=3))
    assert first != same
    Path("net.py").write_text("import torch\n\n\n  layers = [1]\nlayers = [2]\n", encoding="utf-8")
    linecache.clearcache()
    assert marks(finding(line=4)) == [first]
    assert marks(finding(line=5)) != [first]


@pytest.mark.parametrize(
    ("file", "place"),
    [
        ("/venv/lib/site-packages/timm/layers/norm act.py", "timm/layers/norm%20act.py"),
        ("/elsewhere/net.py", "net.py"),
        ("", "sub/net.py"),
    ],
)
def test_no_location_is_a_path_of_this_machine(run, file, place):
    (result,) = run(diagnosis(finding(file=file, line=7 * bool(file))), "diagnose", "net.py").results
    located = result["locations"][0]["physicalLocation"]
    base = "%SRCROOT%" if not file else "%OUTSIDE%"
    assert located["artifactLocation"] == {"uri": place, "uriBaseId": base}
    assert ("region" in located) == bool(file)


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (BundleError("There is no bundle at /x."), 8, "BundleError"),
        (LoadError(f"It failed: {ODD}"), 3, "LoadError"),
        (KeyboardInterrupt(), 130, "Interrupted"),
        (RuntimeError("a defect"), 1, "Defect"),
    ],
)
@pytest.mark.parametrize("words", [("verify", "dist/net"), ("diagnose", "net.py"), ("diagnose", "timm:resnet18")])
def test_an_error_is_written_too(run, monkeypatch, error, code, kind, words):
    monkeypatch.setattr(cli, "check_early", lambda options: None)
    done = run(error, *words)
    assert done.code == code
    assert [*done.cases] == [kind]
    (told,) = done.cases[kind]
    assert told.tag == "error"
    assert done.run["invocations"][0]["executionSuccessful"] is False
    assert [each["ruleId"] for each in done.results] == ["no-result"]


def test_every_text_can_be_written(run):
    done = run(diagnosis(finding(sentence=ODD, modules=(ODD,), file=f"{ODD}.py")), "diagnose", "net.py")
    (result,) = done.results
    assert result["message"]["text"].startswith("a\\x00b\\x1b[0m <&\"']]> ")
    assert "\\[x](http://y)" in result["message"]["text"]
    odd = artifact(path=f"{ODD}.onnx", problem=ODD, outputs=[(ODD, ODD)])
    assert run(verified(odd), "verify", "net\udcff \u202e").code == 6


def test_texts_have_no_folder_of_this_machine(run, tmp_path):
    done = run(BundleError(f"There is no bundle at {tmp_path}/sub/dist/net."), "verify", "dist/net")
    assert done.results[0]["message"]["text"] == "There is no bundle at dist/net."


def test_an_earlier_file_is_gone_before_the_work(monkeypatch, tmp_path, capfd):
    monkeypatch.chdir(tmp_path)
    Path("ci.xml").write_text("old", encoding="utf-8")

    def work(_):
        assert not Path("ci.xml").exists()
        raise BundleError("It is broken.")

    monkeypatch.setattr(cli, "_torch_side", lambda: SimpleNamespace(verify=work))
    assert cli.main(["verify", "b", "--junit", "ci.xml"]) == 8
    assert b"It is broken." in Path("ci.xml").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (("--junit", "net.py"), 2, "--junit: 'net.py' doesn't end with .xml."),
        (("--sarif", "ci.xml"), 2, "--sarif: 'ci.xml' doesn't end with .sarif or .sarif.json."),
        (("--sarif", "b/manifest.json"), 2, "doesn't end with .sarif or .sarif.json."),
        (("--sarif", "b/ci.sarif"), 2, "is inside the bundle, which it would damage"),
        (("--junit", "old.xml", "--sarif", "b/ci.sarif"), 2, "is inside the bundle, which it would damage"),
        (("--junit", "folder.xml"), 8, "folder.xml can't be written: "),
        (("--junit", "old.xml/ci.xml"), 8, "ci.xml can't be written: Not a directory"),
    ],
)
def test_no_other_file_is_replaced(monkeypatch, tmp_path, capfd, arguments, code, part):
    monkeypatch.chdir(tmp_path)
    Path("folder.xml").mkdir()
    Path("old.xml").touch()
    Path("b").mkdir()
    Path("b/manifest.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(cli, "_torch_side", lambda: pytest.fail("it was run"))
    assert cli.main(["verify", "b", *arguments]) == code
    assert part in capfd.readouterr().err
    assert Path("old.xml").exists()
    assert Path("b/manifest.json").read_text(encoding="utf-8") == "{}"


def test_a_real_bundle(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    export(nn.Linear(4, 3), example_inputs=(torch.randn(2, 4),), output="net", formats=["torchscript"], bench=False)
    command = ["verify", "net", "--device", "cpu", "--junit", "ci.xml", "--sarif", "ci.sarif.json"]
    assert cli.main(command) == 0
    suite = checked_junit(Path("ci.xml").read_bytes())
    assert [each.get("name") for each in suite] == ["bundle", "model.torchscript.pt", "output"]
    Path("net/model.torchscript.pt").write_bytes(b"")
    assert cli.main(command) == 8
    (result,) = checked_sarif(Path("ci.sarif.json").read_bytes())["runs"][0]["results"]
    assert result["message"]["text"].startswith("model.torchscript.pt was changed: it has 0 bytes")
