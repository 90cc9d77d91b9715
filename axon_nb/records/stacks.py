"""Python stacks of ranks as text: user frames in full, library frames folded, identical stacks merged."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from zlib import crc32

from msgspec import Struct

from axon_nb.records.ranks import name_ranks, ranks_by

_MAX_TEXT = 100_000
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_STANDARD = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")})
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]([^/\\]+)")
_SOURCES = ("torch", "IPython", "ipykernel", "ipyparallel", "tornado", "zmq")
"""Packages that run the cells; developers import them from their sources."""
_FSDP = f"{os.sep}{os.path.join('torch', 'distributed', 'fsdp')}{os.sep}"
_FSDP_CALLS = frozenset({"_all_gather_flat_param", "_reduce_grad", "post_backward", "unshard", "wait_for_unshard"})
_FSDP_TAGS = 997
"""Less than fits into the words that groups compare."""


@functools.lru_cache(4096)  # called for each frame of each thread
def library_of(filename: str) -> str:
    """Return the package that a file belongs to, ``Python`` for the standard library; empty for user code."""
    if filename.startswith("<"):
        return "Python" if filename.startswith("<frozen") else ""
    if filename.startswith(os.path.join(_PACKAGE, "")):
        return os.path.basename(_PACKAGE)
    if found := _INSTALLED.search(filename):
        return found[1].removesuffix(".py")
    if filename.startswith(_STANDARD):
        return "Python"
    for folder in filter(None, map(str, sys.path)):  # what PYTHONPATH, a .pth file or a cell has added
        inside = filename.removeprefix(os.path.join(folder, ""))
        if inside != filename and (first := inside.split(os.sep)[0]) in _installed_in(folder):
            return first.removesuffix(".py")
    return next((name for name in _SOURCES if filename.startswith(_source_folders(name))), "")


@functools.lru_cache(64)
def _installed_in(folder: str) -> set[str]:
    """Files and folders that an installer has put into a folder; the user's own may be beside them."""
    names: set[str] = set()
    for record in Path(folder).glob("*.dist-info/RECORD"):
        with contextlib.suppress(OSError):
            lines = record.read_text(encoding="utf-8", errors="replace").splitlines()
            names.update(re.split("[/,]", line, maxsplit=1)[0] for line in lines)
    return names


def _source_folders(package: str) -> tuple[str, ...]:
    folders = getattr(sys.modules.get(package), "__path__", ())
    return tuple(os.path.join(folder, "") for folder in folders)


def fsdp_unit(frame: FrameType | None, depth: int = 64) -> str | None:
    """Name the module whose parameters or gradients FSDP moves on this stack, such as ``experts.0``; None: none."""
    while frame is not None and depth:
        if frame.f_code.co_name in _FSDP_CALLS and _FSDP in frame.f_code.co_filename:
            moved = frame.f_locals.get("self") or frame.f_locals.get("handle")
            if (number := getattr(moved, "_handle_index", None)) is not None:  # FSDP1 has no names
                return f"unit {number}"
            if (name := getattr(moved, "_module_fqn", None)) is not None:
                return str(name)
        frame, depth = frame.f_back, depth - 1
    return None


def fsdp_tag(frame: FrameType | None) -> int:
    """Return a number of that module, from 1 to 997, the same on all ranks; 0: none is near on this stack."""
    unit = fsdp_unit(frame, 16)
    return 0 if unit is None else 1 + crc32(unit.encode()) % _FSDP_TAGS


class StackFrame(Struct, frozen=True):
    """One frame of user code, or several library frames folded into one."""

    place: str
    """``Cell In[5], line 3, in train``; for folded frames ``… 6 frames of torch: all_reduce … wait``."""
    code: str = ""
    """The source line; empty if unknown and for folded frames."""


class RankStack(Struct, frozen=True):
    """Where one rank is."""

    state: str
    """What it is doing, such as ``waiting in all_reduce at line 4 for rank 1``."""
    frames: tuple[StackFrame, ...] = ()
    """Outermost first, starting at the cell; empty when idle."""
    cell: int | None = None
    """Number of the running cell; None when idle."""
    seconds: float = 0.0
    """How long it has been in its communication call; 0 outside one."""


class Stacks(dict[int, RankStack]):
    """The stack of each rank; its text shows identical stacks once."""

    def __init__(self, by_rank: Mapping[int, RankStack]) -> None:
        super().__init__(sorted(by_rank.items()))

    def __repr__(self) -> str:
        groups = ranks_by(((stack.state, stack.cell, stack.frames), rank) for rank, stack in self.items())
        text = "\n".join(self._format(ranks) for ranks in groups.values())
        if len(text) <= _MAX_TEXT:
            return text
        return f"{text[:_MAX_TEXT]}\n… {len(text) - _MAX_TEXT:,} more characters; use `--ranks` to show fewer ranks."

    def _format(self, ranks: list[int]) -> str:
        stack = self[ranks[0]]
        seconds = max(self[rank].seconds for rank in ranks)
        took = f", for {seconds:.1f} s" if seconds else ""
        cell = "" if stack.cell is None else f"In [{stack.cell}]: "
        lines = [f"[{name_ranks(ranks)}] {cell}{stack.state}{took}"]
        for frame in stack.frames:
            lines.append(f"  {frame.place}")
            if frame.code:
                lines.append(f"      {frame.code}")
        return "\n".join(lines)
