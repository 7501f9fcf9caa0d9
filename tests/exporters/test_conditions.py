import pytest

from exporters.errors import RouteRefused
from exporters.evidence import Line, line_through
from exporters.exported_program import guard_holds
from exporters.proof import breaks


@pytest.mark.parametrize(
    ("holds", "hints", "expected"),
    [
        (lambda batch: batch != 4, (), 4),
        (lambda batch: batch <= 16, (), 17),
        (lambda batch: batch >= 2, (), 1),
        (lambda batch: batch % 7 != 0, (), 7),
        (lambda batch: batch <= 5000, (), 5001),
        (lambda batch: batch < 123_457, (), 123_457),
        (lambda batch: batch != 777, (777,), 777),
        (lambda batch: 3 * batch != 2331, (776,), 777),
    ],
)
def test_the_first_batch_that_breaks_a_condition_is_found(holds, hints, expected):
    assert next(breaks(holds, hints)) == expected


def test_a_line_goes_through_all_points_or_there_is_none():
    assert line_through((2, 3, 5), (7, 10, 16)) == Line(3, 1)
    assert line_through((2, 3, 5), (4, 4, 4)) == Line(0, 4)
    assert line_through((2, 3, 5), (4, 9, 25)) is None
    assert line_through((2, 4), (1, 2)) is None
    # The first two sizes may be one.
    assert line_through((3, 3, 5), (7, 7, 13)) == Line(3, -2)
    assert line_through((3, 3, 5), (2, 3, 5)) is None


@pytest.mark.parametrize(
    ("guard", "holding"),
    [
        ("L['x'].size()[0] <= 16", [2, 3, 4, 5, 6, 16]),
        ("((3*L['x'].size()[0]) % 6) == 0", [2, 4, 6, 16, 18]),
        ("L['x'].size()[0] // 2 != 1", [4, 5, 6, 16, 17, 18]),
        ("max(L['x'].size()[0], L['y'].size()[1]) > 16", [17, 18]),
        ("not (L['x'].size()[0] < 5 or L['x'].size()[0] == 17)", [5, 6, 16, 18]),
        ("2 < L['x'].size()[0] <= 5", [3, 4, 5]),
        ("L['x'].size()[0] ** 2 - 4 > 20", [5, 6, 16, 17, 18]),
        ("len(L['y'].size()) == 2 and L['x'].size()[0] / 2 == 8", [16]),
        ("len(L['y'].size()) == 3", []),
        ("math.trunc(torch.sym_float(4*L['x'].size()[0]) / 16) == 4", [16, 17, 18]),
    ],
)
def test_a_guard_is_read_as_python_does(guard, holding):
    sizes = (2, 3, 4, 5, 6, 16, 17, 18)
    assert [size for size in sizes if guard_holds(guard, {"x": (size, 3), "y": (1, 7)})] == [
        size for size in sizes if size in holding
    ]


def test_a_guard_without_a_value_does_not_hold():
    assert not guard_holds("L['x'].size()[0] % (L['x'].size()[0] // 2) == 0", {"x": (1,)})


@pytest.mark.parametrize("guard", ["L['y'].size()[0] == 1", "L['x'].stride()[0] == 1", "open('f') == 1", "1 =="])
def test_what_compares_no_sizes_is_told(guard):
    with pytest.raises(RouteRefused, match=r"isn't a comparison of sizes"):
        guard_holds(guard, {"x": (3,)})
