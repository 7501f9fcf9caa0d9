"""Tables as Markdown."""

import pytest
from benchmark_runs import imported


@pytest.fixture(scope="module")
def table():
    with imported("table") as module:
        yield module


@pytest.mark.parametrize(
    ("cell", "written"),
    [
        ("Gather[axis=0](%275, %277)", r"Gather[axis=0]\(%275, %277)"),
        ("at `self.layers[0](x)` of it[0](x)", r"at `self.layers[0](x)` of it[0]\(x)"),
        ("a stray ` and [a](b)", r"a stray ` and [a]\(b)"),
        ("``a`b[0](x)`` [x](y)", r"``a`b[0](x)`` [x]\(y)"),
        ("`a[0](x)` `b[0](x)`", "`a[0](x)` `b[0](x)`"),
        ("`a|b` | c", "`a∣b` ∣ c"),
    ],
)
def test_a_cell_makes_no_column_and_no_link(table, cell, written):
    one = table.Table("t", ["a"])
    one.add(cell)
    assert one.markdown().splitlines()[4] == f"| {written} |"
