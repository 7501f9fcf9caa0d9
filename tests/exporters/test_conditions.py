import pytest

from exporters.conditions import Condition, Line, breaks, line_through


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
    assert next(breaks(Condition("it", holds, frozenset(hints)))) == expected


def test_a_condition_that_always_holds_has_no_break():
    assert not list(breaks(Condition("it", lambda batch: batch > 0)))


def test_further_breaks_follow():
    assert list(breaks(Condition("it", lambda batch: batch < 63)))[:4] == [63, 64, 127, 128]
    assert list(breaks(Condition("it", lambda batch: batch % 20 != 0)))[:3] == [20, 40, 60]
    assert list(breaks(Condition("it", lambda batch: batch < 100)))[:3] == [100, 128, 129]


def test_a_line_goes_through_all_points_or_there_is_none():
    assert line_through((2, 3, 5), (7, 10, 16)) == Line(3, 1)
    assert line_through((2, 3, 5), (4, 4, 4)) == Line(0, 4)
    assert line_through((2, 3, 5), (4, 9, 25)) is None
    assert line_through((2, 4), (1, 2)) is None


def test_a_line_is_found_where_the_first_two_batches_are_one():
    assert line_through((3, 3, 5), (7, 7, 13)) == Line(3, -2)
    assert line_through((3, 3, 5), (2, 3, 5)) is None
    assert line_through((3, 3), (2, 3)) is None


def test_a_line_leads_back_to_the_batch():
    assert Line(3, 1).batch_of(10) == 3
    assert Line(0, 4).batch_of(4) is None
