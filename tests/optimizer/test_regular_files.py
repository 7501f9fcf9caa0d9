"""Files from untrusted sources are opened only if they are regular files."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from optimize_export.manifest import open_regular, parse_json, read_json, read_text_bytes
from optimize_export.manifest.reading import LARGEST_TEXT

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


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, as_socket, lambda path: path.symlink_to("/dev/zero")])
def test_a_link_is_judged_by_what_it_points_to(tmp_path: Path, make: Callable[[Path], None]) -> None:
    (tmp_path / "text").write_text("[1]")
    (tmp_path / "link").symlink_to("text")
    assert read_json(tmp_path / "link", follow=True) == [1]
    make(tmp_path / "f")
    (tmp_path / "to-f").symlink_to("f")
    with pytest.raises(OSError, match="it is not a regular file"):
        read_json(tmp_path / "to-f", follow=True)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"[" * 1000000, "nested too deeply"),
        (b'{"a":' * 100000 + b"1" + b"}" * 100000, "nested too deeply"),
        (b"NaN", "NaN is not JSON"),
        (b"[-Infinity]", "-Infinity is not JSON"),
        (b"\xed\xa0\x80", "utf-8"),
        (b'"a\0b"', "control character"),
        (b'"' + b'\\"' * 1000000, "Unterminated"),
    ],
)
def test_json_that_other_programs_cannot_read_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_json(data)
