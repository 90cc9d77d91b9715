"""Copying data into anonymous memory files, on two cores where available.

Most of the time goes into allocating a page for every 4 KiB, and writes to one file are serialised. So large data is
split over two files, each written by its own thread.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from io import FileIO

_CHUNK = 16 << 20
"""Bytes per write: interrupts are handled between two writes."""
_MIN_SPLIT_BYTES = 32 << 20
"""Less than this is not worth a second thread."""

_Piece = tuple[int, memoryview]


def split_point(size: int, *, two_threads: bool) -> int:
    """Return how many bytes go into the first file; the rest goes into the second one.

    Args:
        size: Total bytes.
        two_threads: Whether there is a core for a second thread. On a core shared with others it costs almost nothing.
    """
    if not two_threads or size < _MIN_SPLIT_BYTES:
        return size
    page = os.sysconf("SC_PAGE_SIZE")
    return size // 2 // page * page


def copy_into(files: tuple[int, int], pieces: Sequence[_Piece], split: int) -> None:
    """Write all pieces into the two files.

    Args:
        files: Two file descriptors, each file already at its final length.
        pieces: Each piece's offset in bytes from the start of the first file, and its data.
        split: Offset at which the second file begins.
    """
    first = [(offset, view[: max(0, split - offset)]) for offset, view in pieces if offset < split]
    second = [
        (max(0, offset - split), view[max(0, split - offset) :])
        for offset, view in pieces
        if offset + view.nbytes > split
    ]
    if not second:
        _write(files[0], first)
        return
    # Its own file object: after an interrupt here the thread can never write to a reused file descriptor.
    writer = _Writer(FileIO(f"/proc/self/fd/{files[1]}", "r+"), second)
    try:
        writer.start()
        _write(files[0], first)
    except BaseException:
        writer.stop()
        raise
    writer.result()


def _write(fd: int, pieces: Sequence[_Piece], stopped: threading.Event | None = None) -> None:
    for offset, view in pieces:
        done = 0
        while done < view.nbytes and not (stopped is not None and stopped.is_set()):
            done += os.pwrite(fd, view[done : done + _CHUNK], offset + done)


class _Writer(threading.Thread):
    """Thread that writes the second file."""

    def __init__(self, file: FileIO, pieces: Sequence[_Piece]) -> None:
        super().__init__(name="axon_nb-shared-block", daemon=True)
        self._file = file
        self._pieces = pieces
        self._stopped = threading.Event()
        self._error: OSError | None = None

    def run(self) -> None:
        """Write the pieces."""
        if self._stopped.is_set():
            return
        try:
            with self._file:
                _write(self._file.fileno(), self._pieces, self._stopped)
        except OSError as error:  # such as out of memory
            self._error = error

    def stop(self) -> None:
        """Stop and wait for the thread, so that the caller may release the memory it reads."""
        self._stopped.set()
        while self.ident is not None:
            try:
                self.join()
                return
            except RuntimeError:  # it runs, but has not said so yet: an interrupt came while `start` waited for that
                time.sleep(0)
        # Not started, and will do nothing. Python keeps a thread whose start was interrupted, so release its data.
        self._file.close()
        self._pieces = ()

    def result(self) -> None:
        """Wait until everything is written.

        Raises:
            OSError: writing failed.
        """
        try:
            self.join()
        except BaseException:  # an interrupt
            self.stop()
            raise
        if self._error is not None:
            raise self._error
