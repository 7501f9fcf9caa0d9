"""The exchange of folders is complete or doesn't happen, even if it is interrupted."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from optimizer.bundle import exchange

posix = pytest.mark.skipif(os.name != "posix", reason="forks and kills")
STEPS = Path(__file__).parents[1] / "support" / "exchange_steps.py"


def anything(folder: Path) -> None:
    """Lets every folder be replaced."""


def put(target: Path, text: str, may_replace=anything) -> None:
    with exchange.staged(target) as staging:
        (staging.folder / "file").write_text(text)
        exchange.publish(staging, may_replace)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def without_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_exchange", lambda first, second: False)


@pytest.fixture(params=["exchange", "renames"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "renames":
        without_exchange(monkeypatch)
    return request.param


def program(*arguments: object) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, str(STEPS), *map(str, arguments)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@posix
def test_killed_at_each_step_of_a_first_write_leaves_nothing_or_the_whole(tmp_path: Path) -> None:
    steps, outcomes, _ = program(tmp_path, "fresh").split()
    assert int(steps) > 15
    assert outcomes == "-n"


@pytest.mark.slow
@posix
@pytest.mark.parametrize("kind", ["exchange", "renames"])
def test_killed_at_each_step_of_a_replacement_leaves_the_old_or_the_new(tmp_path: Path, kind: str) -> None:
    steps, outcomes, recoveries = program(tmp_path, kind).split()
    assert int(steps) > 30
    assert outcomes == "no"
    assert (int(recoveries) > 0) == (kind == "renames" or sys.platform != "linux")


@pytest.mark.slow
@posix
@pytest.mark.parametrize("kind", ["many", "many-renames"])
def test_of_many_writers_one_wins_and_nothing_is_mixed_or_left(tmp_path: Path, kind: str) -> None:
    won, told = map(int, program(tmp_path, kind).split())
    assert won >= 1
    assert won + told == 80


def test_a_folder_is_put_replaced_and_nothing_else_remains(tmp_path: Path, way: str) -> None:
    put(tmp_path / "target", "first")
    put(tmp_path / "target", "second")
    assert (tmp_path / "target" / "file").read_text() == "second"
    assert names(tmp_path) == ["target"]


def test_an_empty_folder_is_used(tmp_path: Path, way: str) -> None:
    (tmp_path / "target").mkdir()
    put(tmp_path / "target", "x")
    assert names(tmp_path / "target") == ["file"]


def test_what_may_not_be_replaced_stays(tmp_path: Path, way: str) -> None:
    put(tmp_path / "target", "mine")

    def refuse(folder: Path) -> None:
        raise PermissionError("no")

    with pytest.raises(PermissionError, match="no"):
        put(tmp_path / "target", "other", refuse)
    assert (tmp_path / "target" / "file").read_text() == "mine"
    assert names(tmp_path) == ["target"]


def test_what_changed_between_look_and_exchange_is_put_back(tmp_path: Path, way: str) -> None:
    put(tmp_path / "target", "mine")
    looks = []

    def refuse_at_second_look(folder: Path) -> None:
        looks.append(folder)
        if len(looks) == 2:
            assert (folder / "file").read_text() == "mine"
            raise PermissionError("a file was added")

    with pytest.raises(PermissionError, match="added"):
        put(tmp_path / "target", "other", refuse_at_second_look)
    assert (tmp_path / "target" / "file").read_text() == "mine"
    assert names(tmp_path) == ["target"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full"), ValueError("x")])
def test_a_failing_writer_leaves_the_target_and_no_parents_of_its_own(tmp_path: Path, error: BaseException) -> None:
    target = tmp_path / "a" / "b" / "target"

    def fail_halfway() -> None:
        with exchange.staged(target) as staging:
            (staging.folder / "half").write_text("x")
            raise error

    with pytest.raises(type(error)):
        fail_halfway()
    assert names(tmp_path) == []


def test_parents_that_someone_else_uses_meanwhile_stay(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "target"

    def fail_while_others_write() -> None:
        with exchange.staged(target):
            (tmp_path / "a" / "other").write_text("")
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail_while_others_write()
    assert names(tmp_path / "a") == ["other"]


def test_an_interrupt_between_the_two_renames_undoes_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "target", "old")
    without_exchange(monkeypatch)

    def interrupt(staging: exchange.Staging) -> None:
        assert not staging.target.exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(exchange, "_put_second", interrupt)
    with pytest.raises(KeyboardInterrupt):
        put(tmp_path / "target", "new")
    assert (tmp_path / "target" / "file").read_text() == "old"
    assert names(tmp_path) == ["target"]


def test_a_reader_that_finishes_the_exchange_is_no_failure_of_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "target", "old")
    without_exchange(monkeypatch)
    second = exchange._put_second

    def after_a_reader(staging: exchange.Staging) -> None:
        assert exchange.recover(staging.target)
        second(staging)

    monkeypatch.setattr(exchange, "_put_second", after_a_reader)
    put(tmp_path / "target", "new")
    assert (tmp_path / "target" / "file").read_text() == "new"
    assert names(tmp_path) == ["target"]


def test_a_folder_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with exchange.staged(target) as staging:
        (staging.folder / "file").write_text("late")
        put(target, "early")
        with pytest.raises(exchange.Occupied, match="in the meantime"):
            exchange._put_fresh(staging)
    assert (target / "file").read_text() == "early"


def test_recover_does_nothing_where_nothing_was_halfway(tmp_path: Path) -> None:
    with exchange.staged(tmp_path / "target"):
        assert not exchange.recover(tmp_path / "target")
        assert not (tmp_path / "target").exists()


def stale(parent: Path, name: str, target: str = "target", **owner: object) -> Path:
    """A staging folder of a process that has ended; `owner` replaces entries of its marker."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    place = parent / name
    (place / "new").mkdir(parents=True)
    (place / "new" / "half").write_text("x")
    marker = {"tool": "optimize-export", "target": target, **exchange._identity(), "pid": child.pid, **owner}
    (place / exchange.MARKER).write_text(json.dumps(marker))
    return place


@posix
def test_a_place_of_a_dead_process_is_removed(tmp_path: Path) -> None:
    stale(tmp_path, ".target.00000000.optimize-export")
    exchange.remove_stale(tmp_path / "target")
    assert names(tmp_path) == []


@posix
@pytest.mark.skipif(sys.platform != "linux", reason="start times of processes are read from /proc")
def test_a_place_of_a_process_whose_number_was_given_away_is_removed(tmp_path: Path) -> None:
    stale(tmp_path, ".target.00000000.optimize-export", pid=os.getpid(), started="1")
    exchange.remove_stale(tmp_path / "target")
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "owner",
    [
        {"pid": os.getpid()},
        {"host": "another machine"},
        {"namespace": "pid:[1]"},
        {"tool": "another program"},
        {"target": "another target"},
        {"pid": "text"},
    ],
    ids=lambda owner: next(iter(owner)),
)
def test_a_place_of_a_living_or_unknown_process_stays(tmp_path: Path, owner: dict[str, object]) -> None:
    place = stale(tmp_path, ".target.00000000.optimize-export", **owner)
    exchange.remove_stale(tmp_path / "target")
    assert (place / "new" / "half").exists()


@pytest.mark.parametrize("marker", [None, b"", b"{", b"[]", b"\xff"])
def test_a_folder_without_a_marker_stays(tmp_path: Path, marker: bytes | None) -> None:
    place = stale(tmp_path, ".target.00000000.optimize-export")
    (place / exchange.MARKER).unlink() if marker is None else (place / exchange.MARKER).write_bytes(marker)
    exchange.remove_stale(tmp_path / "target")
    assert (place / "new" / "half").exists()


def test_a_name_of_the_greatest_length_has_a_staging_place(tmp_path: Path) -> None:
    target = tmp_path / ("n" * 255)
    put(target, "x")
    assert names(tmp_path) == [target.name]


def test_only_what_a_system_without_exchange_answers_leads_to_two_renames(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("no exchange there")
    with pytest.raises(FileNotFoundError):
        exchange._exchange(tmp_path / "missing", tmp_path / "other")
