"""The program that breaks guards: it finds them all, breaks one alone, and tells which test notices."""

import ast
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

def has_hooks(module) -> bool:
    names = ("before", "behind")
    return any(getattr(module, name) for name in names)

def dim_of(value) -> int | None:
    if value is None:
        return None
    return value.dim if value.known and value.dim else None

class Seal:
    def opened(self, value):
        if value is not self:
            raise ValueError("another")
        return value

    def _refuse(self, *args):
        raise TypeError

    __add__ = __sub__ = _refuse
"""


@pytest.fixture(scope="module")
def guards():
    sys.path.insert(0, str(HERE))
    import guards

    yield guards
    sys.path.remove(str(HERE))
    for name in ("guards", "declared"):
        sys.modules.pop(name, None)


def without(guards, tmp_path, text):
    """The judge without the guard of this text."""
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
        (13, "has_hooks", "'before'"),
        (13, "has_hooks", "'behind'"),
        (14, "has_hooks", "any((getattr(module, name) for name in names))"),
        (18, "dim_of", "if value is None: return None"),
        (19, "dim_of", "value.known"),
        (19, "dim_of", "value.dim"),
        (24, "opened", "if value is not self: raise ValueError('another')"),
        (28, "_refuse", "raise TypeError"),
        (30, "Seal", "__add__"),
        (30, "Seal", "__sub__"),
    ]


@pytest.mark.parametrize(
    ("text", "gone", "there"),
    [
        ("pair.far", "if pair.far", "if False or (width := pair.width) is None:"),
        ("(width := pair.width) is None", "or (width", "if pair.far or (((width := pair.width) is None) and False):"),
        ("f'it is {pair.odd}'", "it is {pair.odd}", "if pair.odd:\n        pass"),
        ("_why_not_more(pair)", "_why_not_more", "return None or _why_not_less(pair)"),
        ("'before'", "before", r'names = ("\0", "behind")'),
        ("any((getattr(module, name) for name in names))", "any", "return False"),
        ("value.known", "value.known", "return value.dim if True and value.dim else None"),
        ("raise TypeError", "raise TypeError", "pass"),
        ("__add__", "nothing", "_refuse; __add__ = lambda self, *args: self.sealed_value.__add__(*args)"),
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
    noted = []
    monkeypatch.setitem(sys.modules, "reached", type("Reached", (), {"note": staticmethod(noted.append)}))
    judge = {}
    exec(guards.noting(JUDGE.encode(), dict(enumerate(found))).decode(), judge)

    class Module:
        before, behind = (), ()

    assert judge["has_hooks"](Module) is False
    assert noted == []
    Module.behind = (1,)
    assert judge["has_hooks"](Module) is True
    assert {found[number].function for number in noted} == {"has_hooks"}
    noted.clear()
    assert judge["dim_of"](None) is None
    assert [found[number].text for number in noted] == ["if value is None: return None"]


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
    assert len(names) > 200
    assert sorted(set(names)) == sorted(names)
    assert declared.DECLARED.keys() <= set(names)


def run(*options):
    command = [sys.executable, str(HERE / "mutants.py"), "--jobs", "1", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_of_each_guard_it_names_the_test_that_fails_without_it(tmp_path):
    """The one test given asks for a dim that there isn't: what becomes of two dims it doesn't show."""
    test = "tests/passes/graph/test_moves.py::test_what_isnt_known_is_no_move[unsqueezed where no dim is]"
    before = (ROOT / "passes/graph/moves.py").read_bytes()
    done = run("--matching", "moves.py: _unsqueezed", "--tests", test, "--json", str(tmp_path / "verdicts.json"))
    assert done.returncode == 1, done.stdout + done.stderr
    verdicts = json.loads((tmp_path / "verdicts.json").read_text())
    found = [(verdict["text"], verdict["status"], verdict["test"], verdict["ok"]) for verdict in verdicts]
    assert found == [("dims is None", "killed", test, True), ("len(dims) != 1", "survived", "", False)]
    assert "1 killed, 1 survived" in done.stdout
    assert (ROOT / "passes/graph/moves.py").read_bytes() == before


def test_a_file_that_is_not_the_judges_is_an_error():
    done = run("--only", "passes/registry.py")
    assert done.returncode == 2
    assert "passes/registry.py is no file of the judge: choose from passes/folding.py" in done.stderr
