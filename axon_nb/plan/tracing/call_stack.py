"""Walks the stack of Python frames, and finds those whose code means something to the caller."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType

import torch

from axon_nb.records.stacks import library_of

_TORCH = Path(torch.__file__).parent
_OPTIM = str(_TORCH / "optim")
_ENGINE = str(_TORCH / "autograd" / "graph.py"), "_engine_run_backward"


class CallStack:
    """Finds frames by the kind of their code.

    Args:
        kind_of: Returns the kind of a code object; empty: its frames are passed over. Asked once per code object.
        most: Frames to look at; None: all.
    """

    def __init__(self, kind_of: Callable[[CodeType], str], most: int | None = None) -> None:
        self._kind_of, self._most = kind_of, most
        # By identity, because comparing code is slower; holds the code, so that the identity stays unique.
        self._kinds: dict[int, tuple[str, CodeType]] = {}

    def frames(self) -> Iterator[tuple[str, FrameType]]:
        """Yield the kinds of the running frames with the frames, the innermost first."""
        frame: FrameType | None = sys._getframe(1)
        kinds, left = self._kinds, self._most
        while frame is not None and left != 0:
            code = frame.f_code
            found = kinds.get(id(code))
            if found is None:
                found = kinds[id(code)] = self._kind_of(code), code
            if found[0]:
                yield found[0], frame
            frame = frame.f_back
            if left is not None:
                left -= 1


def phase_or_user(code: CodeType) -> str:
    """``user``, a phase that a function of torch begins, ``end`` of the stack, or empty."""
    name = code.co_filename
    if name.startswith(_OPTIM):
        return "optimizer"
    if (name, code.co_name) == _ENGINE:
        return "backward"
    if code.co_name == "run_rank" and name.endswith("rank.py"):
        return "end"
    return "" if library_of(name) else "user"
