import gc

import pytest

from optimizer.model.settings import rare_collection


@pytest.fixture(autouse=True)
def thresholds():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_the_collector_looks_seldom_inside_and_as_before_after():
    gc.set_threshold(700, 10, 10)
    with rare_collection():
        assert gc.get_threshold()[0] == 100_000
    assert gc.get_threshold() == (700, 10, 10)


def test_an_error_inside_changes_nothing_of_that():
    gc.set_threshold(700, 10, 10)

    def fail() -> None:
        with rare_collection():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert gc.get_threshold() == (700, 10, 10)


def test_a_collector_that_is_off_stays_off():
    gc.set_threshold(0, 10, 10)
    with rare_collection():
        assert gc.get_threshold()[0] == 0
    assert gc.get_threshold()[0] == 0


def test_two_that_overlap_leave_nothing_behind():
    gc.set_threshold(700, 10, 10)
    first, second = rare_collection(), rare_collection()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (700, 10, 10)
