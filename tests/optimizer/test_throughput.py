"""The search finds the best setting, spends its time where the choice is decided, and keeps it; its choice is loaded."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from exporters.errors import RuntimeCrashed
from optimize_export import BatchedModel, load
from optimize_export.errors import BundleError, UsageError
from optimize_export.manifest import check_manifest
from optimize_export.runtime import usable_cpus
from optimize_export.runtime.traffic import Traffic
from optimizer import Bundle, export, open_bundle, verify_bundle
from optimizer.bundle import keep_in_manifest
from optimizer.command.cli import main
from optimizer.tuning.throughput import Search, Setting, Throughput, splits

BASE = Setting(1, 4, 1, one_by_one=True)
Rate = Callable[[Setting], float]


def traffic(offered: float | None, rate: float, p95: float, failed: int = 0) -> Traffic:
    return Traffic(offered, int(100 * rate), failed, rate, p95 / 2, p95, 2 * p95, 1 / rate)


class Machine:
    """Settings with planted rates, on a clock of its own."""

    def __init__(self, rate: Rate, latency: Rate = lambda setting: 0.01, loading: float = 0.5) -> None:
        self.now, self.spent = 50.0, Counter[Setting]()
        self.loads: list[tuple[Setting, float | None]] = []
        self._rate, self._latency, self._loading = rate, latency, loading

    @contextmanager
    def start(self, setting: Setting) -> Iterator[Any]:
        self.now += self._loading
        yield Running(self, setting)

    def searched(self, seconds: float = 60.0, target: float | None = None, cpus: int = 4) -> Throughput:
        return Search(self.start, BASE, cpus, target, seconds, lambda: self.now).run()

    def put(self, setting: Setting, offered: float | None, seconds: float) -> Traffic:
        self.now += seconds
        self.spent[setting] += seconds  # type: ignore[assignment]
        self.loads.append((setting, offered))
        most = self._rate(setting)
        if offered is None:
            return traffic(None, most, self._latency(setting) * setting.max_batch)
        # The fuller it is, the longer calls wait; a full one fails.
        busy = min(0.999, offered / most)
        return traffic(offered, offered, self._latency(setting) / (1 - busy))


class Running:
    def __init__(self, machine: Machine, setting: Setting) -> None:
        self._machine, self._setting = machine, setting

    def back_to_back(self, callers: int, seconds: float) -> Traffic:
        assert callers == self._setting.callers
        return self._machine.put(self._setting, None, seconds)

    def at_rate(self, rate: float, seconds: float, patience: float, seed: int) -> Traffic:
        assert patience >= seconds
        return self._machine.put(self._setting, rate, seconds)

    def memory(self) -> int:
        return 1 << 20


def planted(best: tuple[int, int] = (2, 16), base: float = 100.0) -> Rate:
    """A rate of at most 400, which falls with the distance from a number of instances and a batch."""

    def rate(setting: Setting) -> float:
        if setting.one_by_one:
            return base
        instances, batch = best
        far = abs(math.log2(setting.instances / instances)) + abs(math.log2(setting.max_batch / batch))
        return 400 / (1 + far / 3)

    return rate


@pytest.mark.parametrize("best", [(2, 16), (4, 8), (1, 32), (4, 1)])
def test_the_planted_optimum_is_found(best: tuple[int, int]) -> None:
    found = Machine(planted(best)).searched()
    assert found.chosen is not None
    assert (found.chosen.instances, found.chosen.max_batch) == best
    assert found.chosen.threads == 4 // best[0]
    assert "400 calls a second" in found.reason
    assert found.reason.endswith("4.00 times as many as one by one")
    assert found.figures[0].setting == BASE


def test_most_time_goes_to_settings_that_are_close() -> None:
    machine = Machine(planted())
    found = machine.searched()
    closed = Counter(setting for setting, offered in machine.loads if offered is None)
    close = [each.setting for each in found.figures[1:4]]
    far = [each.setting for each in found.figures[4:] if each.setting.max_batch == 1]
    assert min(machine.spent[each] for each in close) > 3 * max(machine.spent[each] for each in far)
    assert {closed[each] for each in far} == {1}
    assert min(closed[each] for each in close) > 1


@pytest.mark.parametrize("target", [None, 0.05])
@pytest.mark.parametrize("seconds", [15, 60, 300])
@pytest.mark.parametrize("loading", [0.1, 2.0])
def test_the_time_is_kept(seconds: float, target: float | None, loading: float) -> None:
    machine = Machine(planted(), loading=loading)
    found = machine.searched(seconds, target, cpus=16)
    assert machine.now - 50 <= seconds + 4 * loading + 2
    assert found.chosen is not None
    untried = sum(figure.closed is None for figure in found.figures)
    assert [note for note in found.notes if "weren't tried" in note] == (
        [f"{untried} of 25 settings weren't tried: the time was up"] if untried else []
    )


def test_the_highest_rate_within_the_target_is_found() -> None:
    # p95 is 10 ms / (1 - share), so 40 ms are met up to three quarters of the rate.
    machine = Machine(planted())
    found = machine.searched(target=0.041)
    chosen = found.figures[1]
    within = chosen.within(0.041)
    assert within is not None
    assert 0.75 - 1 / 32 <= within.rate / 400 <= 0.756
    assert within.p95 <= 0.041
    assert "within a p95 of 41 ms" in found.reason


def test_a_wait_for_other_calls_is_tried_for_the_best_alone() -> None:
    def rate(setting: Setting) -> float:
        return planted()(setting) * (1.5 if setting.max_wait else 1)

    machine = Machine(rate)
    found = machine.searched(target=0.04)
    assert {setting.max_wait for setting, _ in machine.loads} == {0, 0.01}
    assert found.chosen == Setting(2, 2, 16, 0.01)


def test_of_rates_that_are_close_the_soonest_answer_is_chosen() -> None:
    def rate(setting: Setting) -> float:
        return 100.0 if setting.one_by_one else 400 + setting.max_batch / 10

    found = Machine(rate, lambda setting: 0.01 * setting.threads).searched()
    assert found.chosen is not None
    assert (found.chosen.instances, found.chosen.max_batch) == (4, 16)


def test_slow_calls_get_fewer_rates() -> None:
    machine = Machine(lambda setting: planted()(setting) / 50)
    found = machine.searched(120, target=5.0)
    assert machine.now - 50 <= 120 + 10
    for figure in found.figures[:4]:
        assert 1 <= len(figure.at_rates) < 5
    assert not [note for note in found.notes if "fewer than" in note]


def test_nothing_may_meet_the_target() -> None:
    found = Machine(planted()).searched(target=0.005)
    assert found.chosen is None
    assert found.reason == "nothing meets a p95 of 5 ms here: the least p95 was 10.7 ms"


def test_a_target_that_calls_one_by_one_miss_is_told() -> None:
    found = Machine(planted(), lambda setting: 1.0 if setting.one_by_one else 0.01).searched(target=0.04)
    assert found.chosen is not None
    assert found.reason.endswith("calls one by one don't meet it at any rate that was tried")


def test_batching_that_does_not_pay_is_told_and_not_chosen() -> None:
    found = Machine(planted(base=390.0)).searched()
    assert found.chosen == BASE
    assert found.reason.endswith("batching doesn't pay here")
    assert found.in_manifest()["max_batch"] == 1


def test_one_processor_has_one_split() -> None:
    assert splits(1) == [(1, 1)]
    assert splits(6) == [(6, 1), (3, 2), (2, 3), (1, 6)]
    found = Search(Machine(planted((1, 8))).start, Setting(1, 1, 1, one_by_one=True), 1, None, 30).run
    assert len({(each.setting.instances, each.setting.max_batch) for each in found().figures}) == 5


def test_a_setting_that_fails_is_no_choice() -> None:
    class Failing(Machine):
        def put(self, setting: Setting, offered: float | None, seconds: float) -> Traffic:
            if setting.instances == 4:
                raise RuntimeCrashed("the service is killed")
            if setting.max_batch == 16:
                raise RuntimeError("out of arenas")
            return super().put(setting, offered, seconds)

    found = Failing(planted((4, 16))).searched()
    assert found.chosen is not None
    assert found.chosen.instances < 4
    assert found.chosen.max_batch != 16
    assert {each.dropped for each in found.figures} == {None, "the service is killed", "out of arenas"}


def test_without_calls_one_by_one_there_is_no_answer() -> None:
    class Failing(Machine):
        def put(self, setting: Setting, offered: float | None, seconds: float) -> Traffic:
            raise self.error

        error: Exception = RuntimeCrashed("the service crashes")

    machine = Failing(planted())
    with pytest.raises(BundleError, match="can't be measured: the service crashes"):
        machine.searched()
    machine.error = UsageError("Calls can't be joined.")
    with pytest.raises(UsageError, match=r"^Calls can't be joined\.$"):
        machine.searched()
    assert len(machine.spent) == 0


def test_settings_that_all_fail_later_leave_no_choice() -> None:
    class Failing(Machine):
        def put(self, setting: Setting, offered: float | None, seconds: float) -> Traffic:
            if offered is not None or not setting.one_by_one:
                raise RuntimeCrashed("the service crashes")
            return super().put(setting, offered, seconds)

    found = Failing(planted()).searched()
    assert (found.chosen, found.reason) == (None, "no setting kept running: the service crashes")


# The choice in the bundle ---------------------------------------------------------------------------------------------


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    options: dict[str, Any] = {"formats": ("onnx",), "effort": "quick", "row_independence": True}
    return export(Doubled(), example_inputs=(torch.randn(3, 4),), output=tmp_path / "net", **options)


def a_service(**changes: Any) -> dict[str, Any]:
    setting = {"instances": 3, "threads": 1, "max_batch": 5, "max_wait": 0.002, "cpus": usable_cpus()}
    return {**setting, "processor": "one", "rate": 10.0, "p95": 0.1, "target": None, **changes}


def settings_of(run: BatchedModel) -> tuple[object, ...]:
    with run:
        joined = run.batching
        return joined.instances, joined.max_batch, joined.max_wait, run.model.route.settings.get("threads")


def test_a_kept_choice_is_loaded(bundle: Bundle) -> None:
    bundle_sums = bundle.sha256sums
    before = {file["path"]: (bundle.path / file["path"]).read_bytes() for file in bundle.manifest["files"]}
    kept = keep_in_manifest(bundle.path, {"service": a_service()})
    assert kept.manifest["service"] == a_service()
    assert kept.sha256sums != bundle_sums
    assert {path: (bundle.path / path).read_bytes() for path in before} == before
    assert verify_bundle(bundle.path, run=False).intact
    run = load(bundle, batching=True)
    x = torch.randn(1, 4)
    assert torch.equal(run(x), 2 * x)
    assert settings_of(run) == (3, 5, 0.002, 1)
    # Without batching, with other settings or another artifact, it says nothing.
    assert "threads" not in load(bundle).route.settings
    assert settings_of(load(bundle, batching=True, threads=2))[1:3] == (8, 0)
    assert settings_of(load(bundle, batching=True, format="onnx"))[1:3] == (8, 0)


def test_a_choice_of_another_machine_is_left_alone(bundle: Bundle) -> None:
    keep_in_manifest(bundle.path, {"service": a_service(cpus=usable_cpus() + 1)})
    assert settings_of(load(bundle, batching=True))[1:3] == (8, 0)


def test_a_changed_bundle_is_not_replaced(bundle: Bundle) -> None:
    (bundle.path / "README.md").write_text("mine")
    with pytest.raises(BundleError, match="were changed since"):
        keep_in_manifest(bundle.path, {"service": a_service()})
    assert (bundle.path / "README.md").read_text() == "mine"
    assert "service" not in open_bundle(bundle.path).manifest


@pytest.mark.parametrize(
    "changes", [{"instances": 0}, {"threads": True}, {"max_batch": 0}, {"max_wait": -1}, {"max_wait": 60}, {"rate": 0}]
)
def test_the_schema_refuses_wrong_choices(bundle: Bundle, changes: Mapping[str, Any]) -> None:
    check_manifest({**bundle.manifest, "service": a_service()})
    with pytest.raises(BundleError, match=f"`service.{next(iter(changes))}` must be"):
        check_manifest({**bundle.manifest, "service": a_service(**changes)})


# The command ----------------------------------------------------------------------------------------------------------


def test_the_command_measures_and_keeps_the_choice(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    before = bundle.sha256sums
    assert main(["bench", str(bundle.path), "--throughput", "--p95", "10s", "--seconds", "6", "--save", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    service = document["service"]
    assert service["chosen"] is not None
    assert document["sha256sums"] == open_bundle(bundle.path).sha256sums != before
    assert service["figures"][0]["setting"]["one_by_one"]
    assert service["figures"][0]["load"]["p95"] < 10
    kept = open_bundle(bundle.path).manifest["service"]
    assert kept["target"] == 10
    assert kept.items() >= {name: value for name, value in service["chosen"].items() if name != "one_by_one"}.items()
    assert settings_of(load(bundle, batching=True)) == tuple(
        kept[each] for each in ("instances", "max_batch", "max_wait", "threads")
    )


def test_without_save_the_bundle_stays(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    before = bundle.sha256sums
    assert main(["bench", str(bundle.path), "--throughput", "--seconds", "4"]) == 0
    shown = capsys.readouterr().out
    assert open_bundle(bundle.path).sha256sums == before
    assert "one by one, " in shown
    assert " *  " in shown
    assert "calls a second, at " in shown
    assert "p95 of calls that come at a rate" in shown


def test_rows_that_may_depend_on_each_other_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = export(Doubled(), example_inputs=(torch.randn(3, 4),), output=tmp_path / "net", formats=("onnx",))
    with pytest.raises(UsageError) as refused:
        load(made, batching=True)
    assert main(["bench", str(made.path), "--throughput", "--seconds", "2"]) == 2
    assert f"error: {refused.value}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--throughput", "--p95", "0"], "--p95: '0' is not a time such as 20ms, 90s or 10m."),
        (["--throughput", "--p95", "0ms"], "--p95: '0ms' is not a time such as 20ms"),
        (["--throughput", "--p95", "20 parsecs"], "--p95: '20 parsecs' is not a time such as 20ms"),
        (["--throughput", "--seconds", "0"], "--seconds: '0' is not a number above 0."),
        (["--p95", "20ms"], "--p95 goes with --throughput only: add it."),
        (["--save"], "--save goes with --throughput only: add it."),
        (["--throughput", "--soak", "1m"], "--soak and --throughput contradict each other: use only one of them."),
        (["--seconds", "9", "--soak", "1m"], "--soak has its own time: leave out --seconds."),
        (["--throughput", "--device", "cuda"], "--throughput measures on the CPU only: leave out --device cuda."),
    ],
)
def test_wrong_options_are_refused(options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "net", *options]) == 2
    assert sentence in capsys.readouterr().err
