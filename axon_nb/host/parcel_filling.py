"""Copying memory into anonymous files, by two cores where there are two.

What takes the time is that the kernel gets a page for every 4 KiB, and writes to one file wait for each other: so what
is large is cut in two, and two threads write a file each.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from io import FileIO

__all__ = ["border_of", "fill"]

_CHUNK = 16 << 20
"""Bytes written at once: an interrupt is noticed between two of them."""
_SHARED_FROM = 32 << 20
"""Fewer bytes are not worth a second thread."""

_Piece = tuple[int, memoryview]


def border_of(size: int, *, helped: bool) -> int:
    """How many bytes of `size` go into the first file; the rest goes into the second one.

    Args:
        size: Of all.
        helped: Whether there is a core for a second thread. On one that others use, too, it costs next to nothing.
    """
    if not helped or size < _SHARED_FROM:
        return size
    page = os.sysconf("SC_PAGE_SIZE")
    return size // 2 // page * page


def fill(files: tuple[int, int], pieces: Sequence[_Piece], border: int) -> None:
    """Write all pieces.

    Args:
        files: Two, each as long as it will be.
        pieces: Where each begins, in bytes from the first file's start, and its bytes.
        border: Where the second file begins.
    """
    first = [(place, view[: max(0, border - place)]) for place, view in pieces if place < border]
    second = [
        (max(0, place - border), view[max(0, border - place) :])
        for place, view in pieces
        if place + view.nbytes > border
    ]
    if not second:
        _write(files[0], first)
        return
    # A file object of its own: whatever an interrupt leaves undone here, it never writes to a number that is reused.
    helper = _Helper(FileIO(f"/proc/self/fd/{files[1]}", "r+"), second)
    try:
        helper.start()
        _write(files[0], first)
    except BaseException:
        helper.stop()
        raise
    helper.result()


def _write(fd: int, pieces: Sequence[_Piece], stopped: threading.Event | None = None) -> None:
    for place, view in pieces:
        done = 0
        while done < view.nbytes and not (stopped is not None and stopped.is_set()):
            done += os.pwrite(fd, view[done : done + _CHUNK], place + done)


class _Helper(threading.Thread):
    """Writes the second file."""

    def __init__(self, file: FileIO, pieces: Sequence[_Piece]) -> None:
        super().__init__(name="axon_nb-parcel", daemon=True)
        self._file = file
        self._pieces = pieces
        self._stopped = threading.Event()
        self._error: OSError | None = None

    def run(self) -> None:
        """The thread's work."""
        if self._stopped.is_set():
            return
        try:
            with self._file:
                _write(self._file.fileno(), self._pieces, self._stopped)
        except OSError as error:  # no memory, say
            self._error = error

    def stop(self) -> None:
        """It ends soon; returns when it has, for what it reads may be let go of after that."""
        self._stopped.set()
        if self.ident is not None:
            self.join()
            return
        # It has not begun, and will do nothing. One whose start was interrupted Python keeps for ever, so this lets go.
        self._file.close()
        self._pieces = ()

    def result(self) -> None:
        """Returns when all is written.

        Raises:
            OSError: it could not be.
        """
        try:
            self.join()
        except BaseException:  # an interrupt
            self.stop()
            raise
        if self._error is not None:
            raise self._error
