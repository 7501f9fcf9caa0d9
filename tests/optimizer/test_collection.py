import gc

import pytest

from optimizer.model.settings import rare_collection


@pytest.fixture(autouse=True)
def thresholds():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_the_collector_looks_seldom_inside_and_as_before_after(error):
    gc.set_threshold(700, 10, 10)

    def run() -> None:
        with rare_collection():
            assert gc.get_threshold()[0] == 100_000
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(error):
            run()
    assert gc.get_threshold() == (700, 10, 10)


def test_a_collector_that_is_off_stays_off():
    gc.set_threshold(0, 10, 10)
    with rare_collection():
        assert gc.get_threshold()[0] == 0
    assert gc.get_threshold()[0] == 0
