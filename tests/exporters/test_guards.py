import pytest

from exporters.conditions import UnreadableGuard, guard_holds


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


def test_a_guard_without_a_value_says_so():
    guard = "L['x'].size()[0] % (L['x'].size()[0] // 2) == 0"
    with pytest.raises(ZeroDivisionError):
        guard_holds(guard, {"x": (1,)})


@pytest.mark.parametrize("guard", ["L['y'].size()[0] == 1", "L['x'].stride()[0] == 1", "open('f') == 1", "1 =="])
def test_what_compares_no_sizes_is_told(guard):
    with pytest.raises(UnreadableGuard, match=r"is not a comparison of sizes$"):
        guard_holds(guard, {"x": (3,)})
