"""Read and write lines over pipes to other processes, without blocking and with any number of open files.

``multiprocessing.connection`` would not do: it blocks within a message, where its writer stalls or its reader is slow.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Iterable, Iterator

_CHUNK_BYTES = 1 << 16
# Most chunks that one call of ``LineReader.read`` reads: a process that writes all the time must not block the caller.
_MOST_CHUNKS = 256
# What is kept of a line beyond the limit, to show in a message.
_HEAD_BYTES = 200
# A ``LineWriter`` with so much unwritten is full: its owner should produce no more lines.
_FULL_BYTES = 16 * 1024**2


def wait_until_ready(
    readable: Iterable[int], writable: Iterable[int] = (), timeout_seconds: float | None = None
) -> set[int]:
    """Wait until a file descriptor can be read or written, or until the timeout; return the ready descriptors.

    For this, ``select.select`` would refuse descriptors of 1,024 and more, as processes with many open files have.
    """
    with selectors.PollSelector() as selector:
        for fd in readable:
            selector.register(fd, selectors.EVENT_READ)
        for fd in writable:
            selector.register(fd, selectors.EVENT_WRITE)
        return {key.fd for key, _ in selector.select(timeout_seconds)}


def write_all(fd: int, data: bytes, deadline: float) -> bool:
    """Write all data to a non-blocking file descriptor; return ``False`` if the reader is gone or too slow.

    ``deadline`` is a time of ``time.monotonic``.
    """
    unwritten = memoryview(data)
    while unwritten:
        if not wait_until_ready((), [fd], max(0.0, deadline - time.monotonic())):
            return False
        try:
            unwritten = unwritten[os.write(fd, unwritten) :]
        except BlockingIOError:
            continue
        except OSError:
            return False
    return True


class LineReader:
    """Reads whole lines from a file descriptor, which it makes non-blocking; lines have at most ``limit_bytes``."""

    def __init__(self, fd: int, limit_bytes: int | None = None) -> None:
        self.fd = fd
        self.closed = False
        """Whether the other end is closed and everything it wrote was read."""
        self._limit_bytes = limit_bytes
        self._pieces: list[bytes] = []
        self._size_bytes = 0
        os.set_blocking(fd, False)

    def read(self) -> list[bytes]:
        """Return the lines that are complete by now, without waiting. A line beyond the limit keeps its first bytes.

        At most ``_MOST_CHUNKS`` chunks are read; ``closed`` tells whether more can come.
        """
        lines: list[bytes] = []
        for _ in range(_MOST_CHUNKS):
            try:
                chunk = os.read(self.fd, _CHUNK_BYTES)
            except BlockingIOError:
                return lines
            if not chunk:
                self.closed = True
                return lines
            first, *others = chunk.split(b"\n")
            self._append(first)
            for piece in others:
                lines.append(b"".join(self._pieces))
                self._pieces, self._size_bytes = [], 0
                self._append(piece)
        return lines

    def lines(self) -> Iterator[bytes]:
        """Yield complete lines until the other end is closed, waiting for them."""
        while not self.closed:
            wait_until_ready([self.fd])
            yield from self.read()

    def _append(self, piece: bytes) -> None:
        """Add a piece to the line that is being read; beyond the limit, keep only the line's beginning."""
        self._size_bytes += len(piece)
        if self._limit_bytes is None or self._size_bytes <= self._limit_bytes:
            self._pieces.append(piece)
        else:
            # Cut, so that it is no valid JSON document. The rest of the line is dropped.
            self._pieces = [b"".join([*self._pieces, piece])[:_HEAD_BYTES]]


class LineWriter:
    """Writes lines to a file descriptor without blocking; keeps in memory what the pipe does not take yet."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._waiting = bytearray()
        os.set_blocking(fd, False)

    @property
    def has_waiting(self) -> bool:
        """Whether ``flush`` still has bytes to write."""
        return bool(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether so many bytes are unwritten that the caller should pause."""
        return len(self._waiting) >= _FULL_BYTES

    def put(self, line: bytes) -> None:
        """Write a line, or as much of it as the pipe takes now; raises ``BrokenPipeError`` where the reader is gone."""
        self._waiting += line + b"\n"
        self.flush()

    def flush(self) -> None:
        """Write as much of what is left as the pipe takes now."""
        try:
            while self._waiting:
                # Written from a copy: a bytearray cannot be shortened while a view of it exists.
                del self._waiting[: os.write(self.fd, bytes(self._waiting[:_CHUNK_BYTES]))]
        except BlockingIOError:
            return
