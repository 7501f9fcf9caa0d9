"""The exchange of folders is complete or doesn't happen, even if it is interrupted."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from optimizer.bundle import exchange

posix = pytest.mark.skipif(os.name != "posix", reason="forks, kills and locks")
STEPS = Path(__file__).parents[1] / "support" / "exchange_steps.py"


def anything(folder: Path) -> None:
    """Lets every folder be replaced."""


def put(target: Path, text: str, may_replace: Callable[[Path], None] = anything) -> None:
    with exchange.replacement(target, may_replace) as folder:
        (folder / "file").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(params=["one step", "renames"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "renames":
        monkeypatch.setattr(exchange, "_exchange_in_one_step", lambda first, second: False)
    return request.param


@pytest.mark.slow
@posix
def test_killed_at_each_step_leaves_the_old_or_the_new_and_many_writers_mix_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(STEPS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = {kind: rest for kind, *rest in map(str.split, done.stdout.splitlines())}
    assert {kind: outcomes for kind, (_, outcomes, _) in found.items()} == {
        "fresh": "-n",
        "exchange": "no",
        "renames": "no",
    }
    for kind, (steps, _, recoveries) in found.items():
        assert int(steps) > 15
        assert (int(recoveries) > 0) == (kind == "renames" or (kind == "exchange" and sys.platform != "linux"))


@pytest.mark.parametrize("refused_look", [1, 2])
def test_a_folder_is_replaced_and_one_that_is_refused_before_or_after_the_exchange_stays(
    tmp_path: Path, way: str, refused_look: int
) -> None:
    (tmp_path / "target").mkdir()
    put(tmp_path / "target", "first")
    put(tmp_path / "target", "mine")
    looks = []

    def refuse(folder: Path) -> None:
        looks.append(folder)
        assert (folder / "file").read_text() == "mine"
        if len(looks) == refused_look:
            raise PermissionError("a file was added")

    with pytest.raises(PermissionError, match="added"):
        put(tmp_path / "target", "other", refuse)
    assert (tmp_path / "target" / "file").read_text() == "mine"
    assert names(tmp_path) == ["target"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full"), ValueError("x")])
@pytest.mark.parametrize("others", [False, True])
def test_a_failing_writer_leaves_no_parents_of_its_own(tmp_path: Path, error: BaseException, others: bool) -> None:
    def fail_halfway() -> None:
        with exchange.replacement(tmp_path / "a" / "b" / "target", anything) as folder:
            (folder / "half").write_text("x")
            if others:
                (tmp_path / "a" / "other").write_text("")
            raise error

    with pytest.raises(type(error)):
        fail_halfway()
    assert list(tmp_path.rglob("*")) == ([tmp_path / "a", tmp_path / "a" / "other"] if others else [])


@pytest.mark.parametrize("step", [1, 2, 3])
def test_an_interrupt_between_the_renames_undoes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    put(tmp_path / "target", "old")
    monkeypatch.setattr(exchange, "_exchange_in_one_step", lambda first, second: False)
    rename, done = os.rename, []

    def interrupted(source: Path, target: Path) -> None:
        rename(source, target)
        done.append(target)
        if len(done) == step:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        put(tmp_path / "target", "new")
    # After the third rename the exchange is complete.
    assert (tmp_path / "target" / "file").read_text() == ("new" if step == 3 else "old")
    assert names(tmp_path) == ["target"]


def leftover(parent: Path, marker: str = "target") -> Path:
    """The staging folder of a writer that was killed between two renames."""
    place = parent / exchange.staging_name(parent / "target")
    for name in ("old", "new"):
        (place / name).mkdir(parents=True)
        (place / name / "file").write_text(name)
    (place / exchange.LOCK).write_text(marker)
    return place


@posix
def test_an_interrupted_exchange_is_finished_by_a_reader_and_its_rest_is_removed_by_a_writer(tmp_path: Path) -> None:
    leftover(tmp_path)
    exchange.recover(tmp_path / "target")
    assert (tmp_path / "target" / "file").read_text() == "new"
    put(tmp_path / "target", "newer")
    assert names(tmp_path) == ["target"]


@posix
@pytest.mark.parametrize("marker", ["living", "another target", "no marker", "fifo"])
def test_a_place_of_a_living_or_unknown_writer_stays(tmp_path: Path, marker: str) -> None:
    place = leftover(tmp_path, "another" if marker == "another target" else "target")
    with open(place / exchange.LOCK) as opened:
        if marker == "living":
            assert exchange._lock(opened.fileno())
        if marker in {"no marker", "fifo"}:
            (place / exchange.LOCK).unlink()
        if marker == "fifo":
            os.mkfifo(place / exchange.LOCK)
        exchange.recover(tmp_path / "target")
        assert names(tmp_path) == [place.name]
        put(tmp_path / "target", "x")
    assert (tmp_path / "target" / "file").read_text() == "x"
    assert (place / "new" / "file").exists()


def test_a_name_of_the_greatest_length_has_a_staging_place(tmp_path: Path) -> None:
    target = tmp_path / ("n" * 255)
    put(target, "x")
    assert names(tmp_path) == [target.name]


@pytest.mark.skipif(sys.platform != "linux", reason="no exchange in one step there")
def test_only_a_system_without_exchange_gets_renames(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        exchange._exchange_in_one_step(tmp_path / "missing", tmp_path / "other")
