"""Files from untrusted sources are opened only if they are regular files."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from optimizer.bundle.exchange import MARKER, SUFFIX, recover
from optimizer.manifest import LARGEST_TEXT, open_regular, read_text_bytes

pytestmark = [pytest.mark.timeout(60), pytest.mark.skipif(os.name != "posix", reason="files of POSIX")]


def as_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def as_link(path: Path) -> None:
    path.with_name("text").write_text("x")
    path.symlink_to("text")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, as_socket, as_link, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_regular_file_is_not_opened(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "f")
    with pytest.raises(OSError, match="it is not a regular file"):
        open_regular(tmp_path / "f")


def test_a_fifo_that_takes_the_place_of_a_file_neither_blocks_nor_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    before = os.lstat(tmp_path / "file")
    os.mkfifo(tmp_path / "f")
    monkeypatch.setattr(os, "lstat", lambda path: before)
    with pytest.raises(OSError, match="it is not a regular file"):
        open_regular(tmp_path / "f")


def test_a_text_is_read_whole_and_not_beyond_the_limit(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    assert read_text_bytes(tmp_path / "f") == b"abc"
    os.truncate(tmp_path / "f", LARGEST_TEXT)
    assert len(read_text_bytes(tmp_path / "f")) == LARGEST_TEXT
    os.truncate(tmp_path / "f", LARGEST_TEXT + 1)
    with pytest.raises(OSError, match="it has more than 64 MiB"):
        read_text_bytes(tmp_path / "f")


def test_a_marker_that_is_a_fifo_is_none(tmp_path: Path) -> None:
    place = tmp_path / f".net.0123{SUFFIX}"
    place.mkdir()
    os.mkfifo(place / MARKER)
    assert not recover(tmp_path / "net")
