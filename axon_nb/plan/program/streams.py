"""CUDA's streams and events without a device: they only note who waits for whom."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from axon_nb.plan.program.record import MAIN_STREAM, PipelineStep
from axon_nb.plan.program.recorder import ProgramLog


@dataclass
class Recording:
    """The log of the rank that runs; patches outlive one rank, because programs bind names when they are imported."""

    log: ProgramLog | None = None
    pipeline_steps: tuple[PipelineStep, ...] = ()
    """Those of rank 0, once it has run."""

    @property
    def current(self) -> ProgramLog:
        """The running rank's log."""
        assert self.log is not None
        return self.log


class Stream:
    """As `torch.cuda.Stream`."""

    recording: ClassVar[Recording]
    current: ClassVar[Stream]

    def __init__(self, *_: Any, **__: Any) -> None:
        self.number = self.recording.current.new_stream()

    def wait_stream(self, stream: Stream) -> None:
        """Wait for what another stream has to do so far."""
        log = self.recording.current
        log.wait_mark(self.number, log.mark_stream(stream.number))

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event, a new one by default."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Wait for an event."""
        event.wait(self)

    def synchronize(self) -> None:
        """Have the host wait."""
        self.recording.current.synchronize()


class Event:
    """As `torch.cuda.Event`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._number = 0

    def record(self, stream: Stream | None = None) -> None:
        """Record what a stream has to do so far."""
        self._number = Stream.recording.current.mark_stream((stream or Stream.current).number)

    def wait(self, stream: Stream | None = None) -> None:
        """Have a stream wait."""
        if self._number:
            Stream.recording.current.wait_mark((stream or Stream.current).number, self._number)

    def synchronize(self) -> None:
        """Have the host wait."""
        Stream.recording.current.synchronize()

    def query(self) -> bool:
        """Whether it was reached."""
        return True

    def elapsed_time(self, _: Event) -> float:
        """Milliseconds to another event: unknown while the program runs."""
        return 0.0


@contextlib.contextmanager
def _use(stream: Stream | None) -> Iterator[None]:
    before = Stream.current
    Stream.current = stream or before
    Stream.recording.current.stream = Stream.current.number
    try:
        yield
    finally:
        Stream.current = before
        if Stream.recording.log is not None:
            Stream.recording.log.stream = before.number


def stream_names(recording: Recording) -> dict[str, Any]:
    """Return what replaces the names of `torch.cuda` that have to do with streams.

    Args:
        recording: Where waits are recorded.
    """
    main = object.__new__(Stream)
    main.number = MAIN_STREAM
    Stream.recording, Stream.current = recording, main
    return {
        "Stream": Stream,
        "Event": Event,
        "stream": _use,
        "current_stream": lambda *_: Stream.current,
        "default_stream": lambda *_: main,
    }
