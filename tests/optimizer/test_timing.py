"""Which differences in time are more than noise: bounds of the median, gains, and the order of the calls."""

import itertools
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest

from optimize_export.gpu_settings import GpuSettings
from optimizer.tuning import benchmark
from optimizer.tuning.benchmark import Candidate, Latency, Opened, Ratio, chosen, interleaved, ratio, timed
from optimizer.tuning.candidates import calling


class Clock:
    """A fake of `time`, in which each call takes the given seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.calls: list[str] = []
        # The seconds of the sleeps during which other threads of the process are busy.
        self.busy: list[float] = []
        self.used = 0.0
        self.sleeps = 0
        monkeypatch.setattr(benchmark.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(benchmark.time, "process_time", lambda: self.used)
        monkeypatch.setattr(benchmark.time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.sleeps += 1
        self.used += self.busy.pop() if self.busy else 0.0

    def taking(self, name: str, seconds: Callable[[], float]) -> Callable[[], object]:
        def call() -> None:
            self.calls.append(name)
            self.now += seconds()

        return call


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def latency(rounds: list[float]) -> Latency:
    return Latency(statistics.median(rounds), max(rounds), tuple(rounds))


def below(cut: int, rounds: int) -> Fraction:
    """The chance that at most `cut` of the rounds lie below the true median."""
    return Fraction(sum(math.comb(rounds, count) for count in range(cut + 1)), 2**rounds)


def test_the_bounds_are_the_tightest_that_chance_crosses_in_a_fortieth_of_all_cases_or_the_extremes_of_few_rounds():
    for rounds in range(3, 42):
        values = [1.1 + number / 100 for number in range(rounds)]
        found = ratio(latency(values), latency([1.0] * rounds))
        cut = values.index(found.low)
        assert found.high == values[-1 - cut]
        assert cut == 0 if rounds < 6 else below(cut, rounds) <= Fraction(1, 40) < below(cut + 1, rounds), rounds
        assert (found.median, found.rounds) == (statistics.median(values), rounds)


@pytest.mark.parametrize(("rounds", "gain", "pays"), [(3, 1.04, False), (3, 1.06, True), (5, 1.04, False)])
def test_few_rounds_need_a_clear_gain(rounds, gain, pays):
    assert ratio(latency([gain] * rounds), latency([1.0] * rounds)).pays == pays


@pytest.mark.parametrize(
    ("low", "median", "pays"),
    [(1.01, 1.03, True), (1.0, 1.03, False), (0.99, 1.5, False), (1.01, 1.015, False), (1.001, 1.02, True)],
)
def test_a_gain_pays_if_it_is_sure_and_large_enough(low, median, pays):
    assert Ratio(median, low, median + 1, 11).pays == pays


def noisy(generator: random.Random, seconds: float, rounds: int) -> Latency:
    """Times with skewed noise of about 10 %."""
    return latency([seconds * (1 + generator.expovariate(10)) for _ in range(rounds)])


def test_equal_contenders_pay_no_more_often_than_chance():
    generator = random.Random(0)
    rounds = [generator.choice((6, 9, 15, 41)) for _ in range(1000)]
    found = [ratio(noisy(generator, 1.0, count), noisy(generator, 1.0, count)).pays for count in rounds]
    # Of 1,000 with a chance of 2.5 % each, 25 are expected, and more than 45 in fewer than one of 10,000 runs.
    assert sum(found) <= 45


def test_a_gain_of_a_tenth_is_seen_in_noise():
    generator = random.Random(1)
    found = [ratio(noisy(generator, 1.1, 41), noisy(generator, 1.0, 41)).pays for _ in range(200)]
    assert sum(found) >= 190


def test_each_call_runs_in_each_round_in_changing_order(clock):
    calls = {name: clock.taking(name, lambda: 0.3) for name in "abc"}
    found = interleaved(calls, seconds=20.0)
    warm, timed = clock.calls[:9], clock.calls[9:]
    assert warm == [*"aaabbbccc"]
    rounds = [timed[start : start + 3] for start in range(0, len(timed), 3)]
    assert len(rounds) == 21 == len(found["a"].rounds)
    assert all(sorted(each) == [*"abc"] for each in rounds)
    assert len({tuple(each) for each in rounds}) == 6, "all orders occur"


@pytest.mark.parametrize(("seconds", "rounds"), [(0.001, 3), (1000.0, 41)])
def test_there_are_at_least_3_rounds_and_at_most_41(clock, seconds, rounds):
    found = interleaved({"a": clock.taking("a", lambda: 0.1)}, seconds)
    assert len(found["a"].rounds) == rounds


@pytest.mark.parametrize(("most_seconds", "rounds"), [(1.0, 3), (0.25, 2), (0.0, 1)])
def test_there_are_fewer_rounds_if_three_take_too_long(clock, most_seconds, rounds):
    found = interleaved({"a": clock.taking("a", lambda: 0.1)}, 0.001, lambda: None, most_seconds)
    assert len(found["a"].rounds) == rounds


def test_a_call_waits_until_the_threads_of_the_one_before_are_idle(clock):
    clock.busy = [0.01] * 5
    interleaved({"a": clock.taking("a", lambda: 0.1)}, 0.1)
    assert clock.sleeps == 5 + 3, "one for each round, and five more"
    clock.sleeps, clock.busy = 0, [0.01] * 1000
    interleaved({"a": clock.taking("a", lambda: 0.1)}, 0.1)
    assert 3 * 25 <= clock.sleeps <= 3 * 35, "but not for ever"


def test_a_short_call_is_repeated_and_a_long_one_is_not(clock):
    interleaved({"short": clock.taking("short", lambda: 0.001), "long": clock.taking("long", lambda: 1.0)}, 0.1)
    assert clock.calls.count("short") == 3 + 3 * 20
    assert clock.calls.count("long") == 1 + 3


def test_the_latency_is_the_median_over_calls_and_waits_for_the_device(clock):
    times = iter([0.4, *[0.1] * 12, 0.5, *[0.1] * 100])

    def finished() -> None:
        clock.now += 0.01

    found = interleaved({"a": clock.taking("a", lambda: next(times))}, 2.6, finished)["a"]
    assert found.median == pytest.approx(0.11)
    assert found.p95 == pytest.approx(0.11)
    assert max(found.rounds) == pytest.approx(0.51)


@pytest.mark.parametrize("step", [0.0, -1.0, 1e-9], ids=["stands still", "goes back", "too coarse"])
def test_a_clock_that_fails_gives_finite_times_and_ends(monkeypatch, step):
    ticks = itertools.count()
    for name in ("perf_counter", "process_time"):
        monkeypatch.setattr(benchmark.time, name, lambda: step * next(ticks))
    monkeypatch.setattr(benchmark.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(benchmark, "_ROUND_SECONDS", 1e-4)
    found = interleaved({"a": lambda: None, "b": lambda: None}, 0.1)
    gain = ratio(found["a"], found["b"])
    assert all(0 < number < math.inf for number in (found["a"].median, found["a"].p95, gain.low, gain.high))


def test_the_simplest_of_equals_is_chosen():
    generator = random.Random(3)
    times = {"simple": 1.0, "other": 0.99, "fast": 0.5, "as fast": 0.5}
    found = {name: noisy(generator, seconds, 41) for name, seconds in times.items()}
    assert chosen(found, ["simple", "other"]) == "simple"
    assert chosen(found, ["other", "simple"]) == "other"
    assert chosen(found, ["simple", "other", "fast", "as fast"]) == "fast"
    assert chosen(found, ["simple", "as fast", "fast"]) == "as fast"
    assert chosen(found, ["other"]) == "other"


def test_a_file_that_is_surely_slower_than_another_is_not_chosen_because_the_fastest_is_noisy():
    found = {
        "simple": latency([0.440, 0.441, 0.442]),
        "faster": latency([0.402, 0.403, 0.404]),
        "noisy": latency([0.370, 0.387, 0.452]),
    }
    assert not ratio(found["simple"], found["noisy"]).pays
    assert chosen(found, ["simple", "faster", "noisy"]) == "faster"
    assert chosen(found, ["simple", "noisy"]) == "simple"


def opened_at(clock: Clock, name: str, seconds: list[float], then: float) -> Opened:
    """A file whose first calls take the given seconds, and all others `then`."""
    left = list(reversed(seconds))
    run = clock.taking(name, lambda: left.pop() if left else then)
    return Opened(Candidate(name, lambda: run), run, None)


def test_a_doubt_about_two_files_is_settled_by_a_second_timing(clock):
    # Two rounds of the first timing are disturbed, which the sign test allows for in many rounds, not in 9.
    fast = opened_at(clock, "fast", [0.4] * 3 + [1.5] * 2, 0.4)
    files = [opened_at(clock, name, [], seconds) for name, seconds in (("eager", 0.6), ("simple", 0.5))]
    found = timed([*files, fast], ["simple", "fast"], 20.0, lambda: None)
    assert found.rounds == 9
    assert found.chosen == "fast"
    assert found.notes == ("timed again, only these two: fast is 1.25 (1.25 to 1.25) times as fast as simple",)
    assert "eager" not in clock.calls[-12:]
    # The first calls and the disturbance come on top of the 20 s.
    assert clock.now < 27


def test_a_second_timing_may_show_that_the_simpler_file_is_as_fast(clock):
    lucky = opened_at(clock, "lucky", [0.3] * 10 + [0.9], 0.5)
    simple = opened_at(clock, "simple", [], 0.5)
    found = timed([simple, lucky], ["simple", "lucky"], 12.0, lambda: None)
    assert found.chosen == "simple"
    assert found.notes == ("timed again, only these two: lucky is 1.00 (1.00 to 1.00) times as fast as simple",)


def test_without_a_doubt_nothing_is_timed_again(clock):
    simple, fast = opened_at(clock, "simple", [], 0.5), opened_at(clock, "fast", [], 0.4)
    found = timed([simple, fast], ["simple", "fast"], 10.0, lambda: None)
    assert (found.chosen, found.notes) == ("fast", ())
    assert timed([simple, fast], ["fast", "simple"], 10.0, lambda: None).chosen == "fast"
    assert timed([simple], [], 10.0, lambda: None).chosen is None


def test_the_original_runs_under_the_settings_of_the_user():
    before = GpuSettings.now()
    wanted = replace(before, matmul=not before.matmul)
    seen: list[GpuSettings] = []
    try:
        calling(lambda: seen.append(GpuSettings.now()), (), {}, wanted)()
        before.put_in_force()
        calling(lambda: seen.append(GpuSettings.now()), (), {})()
    finally:
        before.put_in_force()
    assert seen == [wanted, before]
