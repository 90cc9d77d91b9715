"""What a rank prints reaches the notebook, and long tracebacks arrive in part."""

from __future__ import annotations

import io
import sys
from types import TracebackType
from typing import Any

import pytest
from IPython.core.ultratb import AutoFormattedTB

from axon_nb.engine.kernel.shell import Tracebacks, shorten_traceback
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


def down(n: int) -> None:
    if not n:
        raise ValueError("the bottom")
    down(n - 1)


def depth(trace: TracebackType | None) -> int:
    count = 0
    while trace is not None:
        count, trace = count + 1, trace.tb_next
    return count


def caught(n: int) -> ValueError:
    try:
        down(n)
    except ValueError as error:
        return error
    raise AssertionError


def test_ends_of_a_long_traceback_are_kept() -> None:
    trace = caught(500).__traceback__
    assert trace is not None
    short, left_out = shorten_traceback(trace)
    assert depth(trace) == depth(short) + left_out
    assert depth(short) == 21
    first, last = short, short
    while last.tb_next is not None:
        last = last.tb_next
    assert first.tb_frame.f_code.co_name == "caught"
    assert last.tb_lineno == down.__code__.co_firstlineno + 2


def test_short_traceback_is_unchanged() -> None:
    trace = caught(5).__traceback__
    assert trace is not None
    assert shorten_traceback(trace) == (trace, 0)


def test_truncated_rendering_states_the_omission_and_keeps_the_exception() -> None:
    render = Tracebacks().bound(AutoFormattedTB(mode="Context", theme_name="nocolor").structured_traceback)
    outer = RuntimeError("the effect")
    outer.__cause__ = cause = caught(500)
    before = depth(cause.__traceback__)
    text = "".join(render(RuntimeError, outer, None))
    assert "ValueError: the bottom" in text
    assert "RuntimeError: the effect" in text
    assert f"({before - 21} calls are not shown.)" in text
    assert depth(cause.__traceback__) == before
    assert "not shown" not in "".join(render(ValueError, ValueError("x"), None))


def test_calls_of_many_functions_are_kept_up_to_a_limit() -> None:
    space: dict[str, Any] = {}
    source = "def f0():\n    raise ValueError('the bottom')\n" + "".join(
        f"def f{i}():\n    f{i - 1}()\n" for i in range(1, 200)
    )
    exec(source, space)
    for count, expected in ((50, 51), (199, 90)):
        with pytest.raises(ValueError, match="the bottom") as caught_here:
            space[f"f{count}"]()
        trace = caught_here.value.__traceback__
        assert trace is not None
        assert trace.tb_next is not None
        assert depth(shorten_traceback(trace.tb_next)[0]) == expected
