"""The program that breaks guards: it finds all of them, breaks one at a time, and names the test that fails then."""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
JUDGE = """import math
def _why_not(pair):
    if pair.far or (width := pair.width) is None:
        return "it is far"
    if pair.odd:
        return f"it is {pair.odd}"
    return _why_not_more(pair) or _why_not_less(pair)

def is_stock(module):
    return module.plain

def _reads_zeros(layer) -> bool:
    names = ("before", "behind")
    return any(getattr(layer, name) for name in names)

def dim_of(value) -> int | None:
    if value is None:
        return None
    return value.dim if value.known and value.dim else None

class Door:
    def opened(self, value):
        if value is not self:
            raise ValueError("another")
        return value
"""


@pytest.fixture(scope="module")
def mutants():
    sys.path.insert(0, str(HERE))
    import mutants

    yield mutants
    sys.path.remove(str(HERE))
    for name in ("mutants", "guards", "declared", "forks"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def guards(mutants):
    return sys.modules["guards"]


def without(guards, tmp_path, text):
    """The judge without the guard that has this text."""
    (tmp_path / "judge.py").write_text(JUDGE)
    (guard,) = [guard for guard in guards.guards_in(tmp_path, "judge.py") if guard.text == text]
    return guards.edited(JUDGE.encode(), guard.edits).decode()


def test_finds_the_guards_by_the_syntax_tree(guards, tmp_path):
    (tmp_path / "judge.py").write_text(JUDGE)
    found = guards.guards_in(tmp_path, "judge.py")
    assert [(guard.line, guard.function, guard.text) for guard in found] == [
        (3, "_why_not", "pair.far"),
        (3, "_why_not", "(width := pair.width) is None"),
        (6, "_why_not", "f'it is {pair.odd}'"),
        (7, "_why_not", "_why_not_more(pair)"),
        (7, "_why_not", "_why_not_less(pair)"),
        (14, "_reads_zeros", "any((getattr(layer, name) for name in names))"),
        (18, "dim_of", "if value is None: return None"),
        (19, "dim_of", "value.known"),
        (19, "dim_of", "value.dim"),
        (24, "opened", "if value is not self: raise ValueError('another')"),
    ]


@pytest.mark.parametrize(
    ("text", "gone", "there"),
    [
        ("pair.far", "if pair.far", "if False or (width := pair.width) is None:"),
        ("(width := pair.width) is None", "or (width", "if pair.far or (((width := pair.width) is None) and False):"),
        ("f'it is {pair.odd}'", "it is {pair.odd}", "if pair.odd:\n        pass"),
        ("_why_not_more(pair)", "_why_not_more", "return None or _why_not_less(pair)"),
        ("any((getattr(layer, name) for name in names))", "any", "return False"),
        ("value.known", "value.known", "return value.dim if True and value.dim else None"),
        ("if value is not self: raise ValueError('another')", "raise", "if value is not self:\n            pass"),
    ],
)
def test_takes_one_guard_away_and_nothing_else(guards, tmp_path, text, gone, there):
    code = without(guards, tmp_path, text)
    ast.parse(code)
    assert gone not in code
    assert there in code
    same = [line for line in JUDGE.splitlines() if line in code.splitlines()]
    assert len(same) == len(JUDGE.splitlines()) - 1


def test_notes_are_taken_where_a_guard_says_no_and_change_nothing(guards, tmp_path, monkeypatch):
    (tmp_path / "judge.py").write_text(JUDGE)
    found = guards.guards_in(tmp_path, "judge.py")
    monkeypatch.syspath_prepend(HERE)
    reached = importlib.import_module("reached")
    monkeypatch.setitem(sys.modules, "reached", reached)
    noted = []
    monkeypatch.setattr(reached, "note", noted.append)
    judge = {}
    exec(guards.noting(JUDGE.encode(), dict(enumerate(found))).decode(), judge)

    def asked(name, value):
        noted.clear()
        return judge[name](value), [found[number].text for number in noted]

    class Thing:
        before, behind = (), ()
        far, odd, known, dim = False, "", True, 3
        width: int | None = 1

    assert asked("_reads_zeros", Thing) == (False, [])
    Thing.behind = (1,)
    assert asked("_reads_zeros", Thing) == (True, ["any((getattr(layer, name) for name in names))"])
    assert asked("dim_of", None) == (None, ["if value is None: return None"])
    assert asked("dim_of", Thing) == (3, [])
    Thing.dim = 0
    assert asked("dim_of", Thing) == (None, ["value.dim"])
    judge |= {"_why_not_more": lambda pair: None, "_why_not_less": lambda pair: "it is less"}
    assert asked("_why_not", Thing) == ("it is less", ["_why_not_less(pair)"])
    Thing.width = None
    assert asked("_why_not", Thing) == ("it is far", ["(width := pair.width) is None"])


def test_a_predicate_that_nothing_is_said_of_is_an_error(guards, tmp_path):
    (tmp_path / "judge.py").write_text("def is_odd(pair) -> bool:\n    return pair.odd\n")
    with pytest.raises(ValueError, match="is_odd is a predicate: say in LETS_PASS which answer lets pass"):
        guards.guards_in(tmp_path, "judge.py")


def test_what_is_said_of_functions_is_said_of_functions_that_there_are(guards):
    code = "".join((ROOT / file).read_text(encoding="utf-8") for file in guards.FILES)
    for name in (*guards.LETS_PASS, *guards.OTHER_WORK):
        assert f"def {name}(" in code, f"{name} is gone"


def test_every_guard_has_a_name_of_its_own_and_what_is_declared_is_there(guards):
    import declared

    names = [guard.name for file in guards.FILES for guard in guards.guards_in(ROOT, file)]
    assert len(names) > 80
    assert sorted(set(names)) == sorted(names)
    assert declared.DECLARED.keys() <= set(names)


def run(*options):
    command = [sys.executable, str(HERE / "mutants.py"), "--jobs", "1", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.zoo
def test_of_each_guard_it_names_the_test_that_fails_without_it(tmp_path):
    """The given test flattens the channels. It never reaches the guards for dims that don't exist."""
    test = "tests/passes/test_fold_conv_bn.py::test_refuses_with_the_reason_and_stays_right[Merged]"
    before = (ROOT / "passes/graph/layers.py").read_bytes()
    done = run("--matching", "channels.py: _flattened", "--tests", test, "--json", str(tmp_path / "verdicts.json"))
    assert done.returncode == 1, done.stdout + done.stderr
    verdicts = json.loads((tmp_path / "verdicts.json").read_text())
    found = [(verdict["text"], verdict["status"], verdict["test"], verdict["ok"]) for verdict in verdicts]
    assert found == [
        ("dims is None", "unreached", "", False),
        ("dims[0] > dims[1]", "unreached", "", False),
        ("if start < end and start <= channels.dim <= end: return None", "killed", test, True),
    ]
    assert "1 killed, 2 unreached" in done.stdout
    assert (ROOT / "passes/graph/layers.py").read_bytes() == before


@pytest.mark.parametrize(
    ("code", "output", "status"),
    [
        (0, "2 passed", ("survived", "")),
        (None, "", ("timed out", "")),
        (1, "FAILED test_a.py::test_b - Failed: Timeout (>120.0s)", ("timed out", "test_a.py::test_b")),
        (1, "FAILED test_a.py::test_b - assert 1 == 2\n1 failed", ("killed", "test_a.py::test_b")),
        (2, "ERROR test_a.py - NameError", ("killed", "test_a.py")),
        (-11, "Segmentation fault", ("killed", "Segmentation fault")),
        (-9, "", ("killed", "exit code -9")),
    ],
)
def test_what_a_run_says_of_a_guard(mutants, code, output, status):
    assert mutants._status(mutants.Run(code, output)) == status


def test_a_run_without_tests_says_nothing(mutants):
    with pytest.raises(RuntimeError, match="the tests can't be run:\nERROR: not found"):
        mutants._status(mutants.Run(4, "ERROR: not found: test_a.py::test_gone"))


@pytest.mark.zoo
def test_tests_that_cant_be_imported_are_an_error_and_no_guard_counts_as_unreached(tmp_path):
    (tmp_path / "test_a.py").write_text("import no_such_module\n")
    done = run("--matching", "channels.py: _flattened", "--tests", str(tmp_path / "test_a.py"))
    assert done.returncode == 1
    assert "RuntimeError: the tests can't be run" in done.stderr
    assert "test_a.py" in done.stderr.splitlines()[-1]


@pytest.mark.zoo
def test_each_run_reads_the_files_anew_and_a_stuck_one_is_ended(mutants, tmp_path):
    test = tmp_path / "test_a.py"
    bodies = [("assert 1", 0, 0), ("assert 0", 0, 1), ("import time; time.sleep(100)", 1, None), ("assert 2", 0, 0)]
    with mutants._forks_in(tmp_path) as forks:
        for body, limit, code in bodies:
            test.write_text(f"def test_b():\n    {body}\n")
            assert forks.run("-q", "-p", "no:cacheprovider", str(test), limit=limit).code == code


def test_a_file_that_is_not_the_judges_is_an_error():
    done = run("--only", "passes/registry.py")
    assert done.returncode == 2
    assert "passes/registry.py is no file of the judge: choose from passes/fold_conv_bn.py" in done.stderr
