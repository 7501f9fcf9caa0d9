"""The program that breaks guards: it finds all of them, breaks one at a time, and names the test that fails then."""

import ast
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
    pytest.importorskip("coverage", reason="part of the extra `dev`")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(HERE)
        import mutants

        yield mutants
        for name in ("mutants", "guards"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def guards(mutants):
    return sys.modules["guards"]


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
    (tmp_path / "judge.py").write_text(JUDGE)
    (guard,) = [guard for guard in guards.guards_in(tmp_path, "judge.py") if guard.text == text]
    code = guards.without(JUDGE.encode(), guard).decode()
    ast.parse(code)
    assert gone not in code
    assert there in code
    same = [line for line in JUDGE.splitlines() if line in code.splitlines()]
    assert len(same) == len(JUDGE.splitlines()) - 1


def test_a_predicate_that_nothing_is_said_of_is_an_error(guards, tmp_path):
    (tmp_path / "judge.py").write_text("def is_odd(pair) -> bool:\n    return pair.odd\n")
    with pytest.raises(ValueError, match="is_odd is a predicate: say in LETS_PASS which answer lets pass"):
        guards.guards_in(tmp_path, "judge.py")


def test_the_files_of_the_judge_have_the_named_functions_and_guards_with_different_names(guards):
    code = "".join((ROOT / file).read_text(encoding="utf-8") for file in guards.FILES)
    assert [name for name in (*guards.LETS_PASS, *guards.OTHER_WORK) if f"def {name}(" not in code] == []
    names = [guard.name for file in guards.FILES for guard in guards.guards_in(ROOT, file)]
    assert len(names) > 80
    assert sorted(set(names)) == sorted(names)


@pytest.mark.zoo
def test_of_each_guard_it_names_the_test_that_fails_without_it(mutants, capsys):
    test = "tests/passes/test_fold_conv_bias.py::test_batch_statistics_are_left_alone"
    only = ["--only", "passes/fold_conv_bias.py", "--matching", "uses"]
    before = (ROOT / only[1]).read_bytes()
    assert mutants.main([*only, "--jobs", "1", "--tests", test]) == 1
    of_the_batch, running, counts = capsys.readouterr().out.splitlines()
    assert f"killed by {test}" in of_the_batch
    assert running.endswith("unreached")
    assert counts == "1 killed, 1 unreached"
    assert (ROOT / only[1]).read_bytes() == before


@pytest.mark.parametrize(
    ("code", "output", "status"),
    [
        (0, "2 passed", "survived"),
        (None, "", "hung"),
        (1, "FAILED test_a.py::test_b - Failed: Timeout (>120.0s)", "hung in test_a.py::test_b"),
        (1, "FAILED test_a.py::test_b - assert 1 == 2\n1 failed", "killed by test_a.py::test_b"),
        (2, "ERROR test_a.py - NameError", "killed by test_a.py"),
        (-11, "Segmentation fault", "killed by exit code -11"),
    ],
)
def test_what_a_run_says_of_a_guard(mutants, code, output, status):
    assert mutants.status_of(code, output) == status
