"""Copying memory into an anonymous file, by two cores where two are free.

What takes the time is that the kernel gets a page for every 4 KiB. Writes to one file wait for each other, and page
faults of a mapping do not: so one thread writes from the front and another fills the end through a mapping.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading

from axon_nb.host.cores import usable_cores

__all__ = ["fill"]

_CHUNK = 32 << 20
"""Bytes written at once: an interrupt is noticed between two of them."""
_MAPPED_CHUNK = 2 << 20
"""The same through the mapping, while which Python's lock is held."""
_SHARED_FROM = 32 << 20
"""Parts of fewer bytes are not worth a second thread."""
_OWN_SHARE = 0.65
"""Writing is the faster of the two ways."""


def fill(fd: int, place: int, view: memoryview, *, helped: bool) -> None:
    """Copy `view` to offset `place` of a file that is as long as it will be.

    Args:
        fd: The file.
        place: In bytes.
        view: Of bytes.
        helped: Whether a second thread may help where a core is idle.
    """
    if not helped or view.nbytes < _SHARED_FROM or not _core_is_idle():
        _write(fd, place, view)
        return
    border = int(view.nbytes * _OWN_SHARE)
    border -= (place + border) % mmap.ALLOCATIONGRANULARITY
    helper = _Helper(fd, place + border, view[border:])
    helper.start()
    try:
        _write(fd, place, view[:border])
        helper.join()
    finally:
        helper.stop()
    _write(fd, place + border + helper.done, view[border + helper.done :])


def _core_is_idle() -> bool:
    """Whether fewer threads run now than this process has cores: where none is idle, two are slower than one."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            running = next(int(line.split()[1]) for line in file if line.startswith("procs_running "))
    except (OSError, StopIteration, ValueError):
        return False
    return running < usable_cores()


def _write(fd: int, place: int, view: memoryview) -> None:
    done = 0
    while done < view.nbytes:
        done += os.pwrite(fd, view[done : done + _CHUNK], place + done)


class _Helper(threading.Thread):
    """Fills a stretch through a mapping; `done` are the bytes that it has."""

    def __init__(self, fd: int, place: int, view: memoryview) -> None:
        super().__init__(name="axon_nb-parcel", daemon=True)
        self._fd = fd
        self._place = place
        self._view = view
        self._stopped = threading.Event()
        self.done = 0

    def run(self) -> None:
        """The thread's work; what it leaves is for others to write."""
        with (
            contextlib.suppress(OSError, ValueError),  # no address space, say
            mmap.mmap(self._fd, self._view.nbytes, offset=self._place) as mapped,
        ):
            while self.done < self._view.nbytes and not self._stopped.is_set():
                chunk = self._view[self.done : self.done + _MAPPED_CHUNK]
                mapped[self.done : self.done + chunk.nbytes] = chunk
                self.done += chunk.nbytes

    def stop(self) -> None:
        """It ends soon; returns when it has, for the file is closed after that."""
        self._stopped.set()
        self.join()
