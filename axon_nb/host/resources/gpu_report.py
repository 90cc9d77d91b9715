"""What the driver says about this host's GPUs; asked in a child process, because a driver may hang."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
from collections.abc import Callable, Sequence

from axon_nb.host.resources.gpus import NVML
from axon_nb.records.protocol.errors import ProtocolError
from axon_nb.records.protocol.wire import decode
from axon_nb.records.telemetry import GpuReport


def read_gpus(selector: selectors.BaseSelector, on_report: Callable[[GpuReport], None]) -> None:
    """Ask the driver; the event loop of `selector` calls `on_report` with what it says."""

    def on_end(output: bytes) -> None:
        report = GpuReport((), "The driver does not reply.")
        with contextlib.suppress(ProtocolError, ValueError):  # it hung or died
            report = decode(GpuReport, json.loads(output))
        on_report(report)

    ProgramOutput(selector, [*NVML, "--report"], on_end)


class ProgramOutput:
    """A program that the event loop starts and whose output it collects; it must end by itself.

    Args:
        selector: The event loop's.
        arguments: The command line.
        on_end: Called with the output when the program has closed it.
    """

    def __init__(
        self, selector: selectors.BaseSelector, arguments: Sequence[str], on_end: Callable[[bytes], None]
    ) -> None:
        self._selector = selector
        self._on_end = on_end
        self._output = bytearray()
        self._pipe, end = os.pipe()
        try:
            # The event loop reaps it with its other children.
            subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=end, stderr=subprocess.DEVNULL)
        finally:
            os.close(end)
        selector.register(self._pipe, selectors.EVENT_READ, self.on_ready)

    def on_ready(self, mask: int) -> None:
        """Read what is there; called by the event loop."""
        if data := os.read(self._pipe, 1 << 16):
            self._output += data
            return
        self._selector.unregister(self._pipe)
        os.close(self._pipe)
        self._on_end(bytes(self._output))
