"""What a rank prints reaches the notebook, whichever thread prints and flushes."""

from __future__ import annotations

import io
import sys

import pytest

from axon_nb.engine.output import NativeOutput, OutputBudget


class _Stream(io.StringIO):
    """A stream that is flushed just before a text of another thread is in its buffer."""

    sent = ""

    def write(self, text: str) -> int:
        self.flush()
        return super().write(text)

    def flush(self) -> None:
        self.sent = self.getvalue()


def test_flush_during_a_write_does_not_delay_text(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = _Stream()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", _Stream())
    OutputBudget(None, NativeOutput(()), 100)
    sys.stdout.write("a child speaks\n")
    sys.stdout.flush()
    assert stream.sent == "a child speaks\n"
