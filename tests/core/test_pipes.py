"""Test lines over pipes: whole, bounded, and written without waiting for a reader."""

import os
import time
from collections.abc import Iterator

import pytest

from autotune.core.pipes import LineReader, LineWriter, wait_until_ready, write_all


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Both ends of a pipe."""
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


def test_lines_come_whole_whatever_pieces_they_are_written_in(pipe: tuple[int, int]) -> None:
    read_fd, write_fd = pipe
    reader = LineReader(read_fd)
    found: list[bytes] = []
    for piece in (b"a", b"b\nc", b"", b"\n\n", b"d" * 40_000, b"d\ne"):
        os.write(write_fd, piece)
        found += reader.read()
    assert found == [b"ab", b"c", b"", b"d" * 40_001]
    assert not reader.closed


def test_of_a_line_that_is_too_long_the_beginning_is_kept(pipe: tuple[int, int]) -> None:
    read_fd, write_fd = pipe
    reader = LineReader(read_fd, limit_bytes=1000)
    for _ in range(3):
        os.write(write_fd, b"x" * 900)
        assert reader.read() == []
    os.write(write_fd, b"\nshort\n")
    assert reader.read() == [b"x" * 200, b"short"]


def test_a_writer_keeps_what_its_reader_does_not_take_yet(pipe: tuple[int, int]) -> None:
    read_fd, write_fd = pipe
    writer, reader = LineWriter(write_fd), LineReader(read_fd)
    lines = [str(number).encode() * 1000 for number in range(300)]
    for line in lines:
        writer.put(line)
    assert writer.has_waiting
    found: list[bytes] = []
    while len(found) < len(lines):
        found += reader.read()
        writer.flush()
    assert found == lines
    assert not writer.has_waiting


def test_writing_ends_at_the_deadline_and_with_the_reader() -> None:
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    assert not write_all(write_fd, b"x" * 1_000_000, time.monotonic() + 0.1)
    os.close(read_fd)
    assert not write_all(write_fd, b"x", time.monotonic() + 60)
    os.close(write_fd)


def test_waiting_ends_with_the_time(pipe: tuple[int, int]) -> None:
    assert wait_until_ready([pipe[0]], timeout_seconds=0.01) == set()
    os.write(pipe[1], b"x")
    assert wait_until_ready([pipe[0]], [pipe[1]]) == set(pipe)
