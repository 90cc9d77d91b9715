"""Protects this rank: after optimizer steps, its state goes into one of two slots that outlive the process.

Survivors of a death return to a slot in place; a replacement loads it. A *fence* is the end of an iteration with an
optimizer step, or the begin of a cell. Ranks that communicate between two fences are at most one fence apart, so two
slots always have one in common. Fences without communication in between are told apart by their number, and overwrite
the same slot.

After `optimizer.step` come `scheduler.step`, `zero_grad`, counters and logs. So the state is saved when the innermost
loop around the step begins its next iteration, or is left, rather than in the step. A trace function of that one frame
notices it; it is removed at once, and slows nothing but the calls in between.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
import threading
import zlib
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from msgspec import Struct

from axon_nb.engine.groups import creation, recovery
from axon_nb.engine.protection.slots import Header, SlotMemory, pack, read_bytes, read_headers, unpack
from axon_nb.engine.session import RankSession, current
from axon_nb.engine.snapshot.history import Snapshot, modes
from axon_nb.engine.snapshot.memory import default_limit
from axon_nb.engine.snapshot.state import StateFinder
from axon_nb.engine.transfer.namespace import Place
from axon_nb.host.shared_memory import find_kept_memory
from axon_nb.records.protocol.cells import CellFacts
from axon_nb.records.protocol.recovery import ProtectedStep, ProtectedSteps, UndoableCell
from axon_nb.records.units import format_bytes

_OUTSIDE = ("IPython.", "ipykernel.", "ipyparallel.", "axon_nb.engine.")
"""Modules that run cells: their loops are not the user's."""
_IN_STEP = "torch."
_NO_MEMORY = "only a host agent on Linux can keep its memory"


def at_end_of_iteration(frame: FrameType | None, action: Callable[[], None]) -> bool:
    """Call `action` when the innermost loop around a step ends its iteration.

    Args:
        frame: The frame that called the step.
        action: Called once, on the same thread.

    Returns:
        False: no loop of the user is around the step, or a debugger traces this thread; nothing will be called.
    """
    if sys.gettrace() is not None:
        return False
    found = _innermost_loop(frame)
    if found is None:
        return False
    around, loop = found

    def end() -> None:
        around.f_trace = None
        sys.settrace(None)

    def trace(traced: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and (traced.f_lineno == loop.line or traced.f_lasti not in loop.instructions):
            end()
            action()
            return None
        if event == "return":
            end()
            at_end_of_iteration(traced.f_back, action)
            return None
        return trace

    around.f_trace = trace
    sys.settrace(lambda *_: None)
    return True


class _Loop(Struct, frozen=True):
    """A loop of some code."""

    instructions: range
    line: int
    """Of its header."""


def _innermost_loop(frame: FrameType | None) -> tuple[FrameType, _Loop] | None:
    while frame is not None:
        module = f"{frame.f_globals.get('__name__', '')}."
        if module.startswith(_OUTSIDE):
            return None
        around = [loop for loop in _loops(frame.f_code) if frame.f_lasti in loop.instructions]
        if around and not module.startswith(_IN_STEP):
            return frame, min(around, key=lambda loop: len(loop.instructions))
        frame = frame.f_back
    return None


@functools.cache
def _loops(code: CodeType) -> tuple[_Loop, ...]:
    instructions = list(dis.get_instructions(code))
    lines = {}
    line = code.co_firstlineno
    starts = dict(dis.findlinestarts(code))
    for instruction in instructions:
        line = starts.get(instruction.offset) or line
        lines[instruction.offset] = line
    last_jump: dict[int, int] = {}
    for instruction in instructions:
        jumps = instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs
        if jumps and instruction.argval <= instruction.offset:
            last_jump[instruction.argval] = instruction.offset  # `continue` jumps to the same place
    loops = []
    for target, jump in last_jump.items():
        places = range(target, jump + 1)
        loops.append(_Loop(places, min(line for offset, line in lines.items() if offset in places)))
    return tuple(loops)


class _Slot(Struct, frozen=True):
    """A complete slot of this process."""

    header: Header
    snapshot: Snapshot
    structure: torch.Tensor

    @property
    def key(self) -> tuple[str, tuple[int, int]]:
        return self.header.run, self.header.fence

    def release(self, memory: SlotMemory) -> None:
        self.snapshot.release(memory)
        memory.release(self.structure)


class Protection:
    """Owns the two slots of this rank."""

    def __init__(self, session: RankSession) -> None:
        self._session = session
        self._finder = StateFinder(session.kernel.shell.user_ns)
        self._pid = os.getpid()
        self._fd = find_kept_memory(session.config.rank)
        self._has_predecessor = self._fd is not None and os.fstat(self._fd).st_size > 0
        """Whether the memory holds what another process of this rank has saved."""
        self._memory: SlotMemory | None = None
        self._slots: list[_Slot | None] = [None, None]
        self._latest = 1
        self._every = 0
        """Every how many steps of the running cell; 0: the cell is not protected."""
        self._run, self._fence, self._calls, self._steps = "", (0, 0), 0, 0
        self._is_due = False
        """Whether a step was made whose iteration has not ended."""
        self._left_out: dict[str, str] = {}
        """By variable, why it cannot be copied, in this cell."""
        self._reported: set[str] = set()

    @property
    def is_on(self) -> bool:
        """Whether a slot may be filled."""
        return self._memory is not None or self._has_predecessor

    def begin_cell(self, facts: CellFacts) -> None:
        """Protect the cell that begins if all ranks run it, and save the state before it; give the slots up if not."""
        run, ranks, every = facts.run, facts.ranks, facts.protect
        self._every, self._is_due, self._left_out = 0, False, {}
        if every == 0:
            self.forget()
        if not every or len(ranks) != self._session.config.world_size:
            return
        if not self._open():
            self._report(f"This rank is not protected: {_NO_MEMORY}.")
            return
        self._every, self._steps = every, 0
        self._session.steps.observers.append(self._after_step)
        self._run, self._fence, self._calls = run, (0, 0), recovery.num_calls()
        self._save()

    def _open(self) -> bool:
        if self._memory is None and (fd := self._fd) is not None:
            self._memory = SlotMemory(fd)
        return self._memory is not None

    def keep(self, key: str, limit: int) -> UndoableCell:
        """Save the state now, outside of a cell; see `calls.keep`."""
        missing, obstacles = "", dict[str, str]()
        if not self._open():
            missing = f"cannot outlive its process: {_NO_MEMORY}"
        elif (size := self._finder.find().size) > (limit := max(limit, default_limit())):
            missing = f"has a state of {format_bytes(size)}, more than {format_bytes(limit)}"
        else:
            self._run, self._fence, self._left_out = key, (0, 0), {}
            try:
                snapshot = self._fill()
                snapshot.modes = modes()
                obstacles = dict(snapshot.state.obstacles)
            except Exception as error:  # no memory for the copy, or an odd object
                missing = f"could not copy its state ({type(error).__name__}: {error})"
        return UndoableCell(key, 0, (), 0.0, missing, obstacles)

    def end_cell(self, *, is_ok: bool) -> None:
        """Save the state after a cell whose last step is in no loop, and stop protecting."""
        if is_ok:
            self._after_iteration()
        self._every = 0
        observers = self._session.steps.observers
        observers[:] = [one for one in observers if one != self._after_step]

    def _after_step(self, frame: FrameType | None) -> None:
        """Note that an optimizer step is complete; the state is saved when its iteration is.

        Args:
            frame: The frame that called the step, which belongs to no other step.
        """
        if not self._every or os.getpid() != self._pid or threading.current_thread() is not threading.main_thread():
            return
        self._steps += 1
        if self._steps % self._every == 0:
            self._is_due = True
            at_end_of_iteration(frame, self._after_iteration)

    def _after_iteration(self) -> None:
        if not self._is_due or not self._every:
            return
        self._is_due = False
        calls = recovery.num_calls()
        number, since = self._fence
        self._fence = (number, since + 1) if calls == self._calls else (number + 1, 0)
        self._calls = calls
        self._save()

    def _save(self) -> None:
        try:
            self._fill()
        except Exception as error:  # no memory, or an odd object: the step of the user must not fail
            self._report(f"A step could not be protected ({type(error).__name__}: {error}).")

    def _fill(self) -> Snapshot:
        assert (memory := self._memory) is not None  # noqa: RUF018
        latest = self._slots[self._latest]
        state = self._finder.find_again(latest.snapshot.state if latest is not None else None)
        at = self._run, self._fence[0]
        overwrites = latest is None or (latest.header.run, latest.header.fence[0]) == at
        index = self._latest if overwrites else 1 - self._latest
        self._release(index)
        other = self._slots[1 - index]
        snapshot = Snapshot(state)
        structure: torch.Tensor | None = None
        try:
            changed = snapshot.changed_since(other.snapshot if other is not None else None)
            snapshot.save(changed, memory, self._session.steps)
            data = self._dump(snapshot)
            structure = memory.write(data)
            step = max(snapshot.steps, default=0)
            place = memory.offset(structure), len(data)
            header = Header(self._run, self._fence, step, *place, checksum=zlib.crc32(data))
            slot = _Slot(header, snapshot, structure)
            memory.publish(index, header)
            self._slots[index], self._latest = slot, index
            self._session.protected_step = step
        except BaseException:
            snapshot.release(memory)
            if structure is not None:
                memory.release(structure)
            raise
        memory.trim()
        return snapshot

    def _release(self, index: int) -> None:
        assert self._memory is not None
        self._memory.invalidate(index)
        slot, self._slots[index] = self._slots[index], None
        if slot is not None:
            slot.release(self._memory)

    def _dump(self, snapshot: Snapshot) -> bytearray:
        """Pickle everything but the contents of storages; what cannot be pickled is left out, and reported once."""
        assert (memory := self._memory) is not None  # noqa: RUF018

        def save(storage: torch.UntypedStorage) -> Place:
            copy = snapshot.copy_of(storage, memory)
            return memory.offset(copy.buffer), copy.buffer.numel()

        data = pack(self._session, snapshot, save, self._left_out)
        for name, why in self._left_out.items():
            self._report(f"Not protected: `{name}` {why}.")
        for name, what in snapshot.state.obstacles.items():
            if name not in self._left_out:
                self._report(f"Not protected: `{name}` ({what}).")
        return data

    def _report(self, line: str) -> None:
        if line not in self._reported:
            self._reported.add(line)
            print(line, file=sys.stderr)

    def steps(self) -> list[ProtectedStep]:
        """Return what this rank's slots hold, the latest first: its own, or those of its predecessor."""
        if self._memory is not None:
            order = (self._latest, 1 - self._latest)
            headers = [slot.header for index in order if (slot := self._slots[index]) is not None]
        else:
            headers = list(read_headers(fd).values()) if (fd := self._fd) is not None else []
        return [ProtectedStep(header.run, header.fence, header.step) for header in headers]

    def steps_now(self) -> int:
        """Return the number of steps, until now, of the optimizer that has made most among those in the slots."""
        optimizers = [one for slot in self._slots if slot is not None for one in slot.snapshot.state.optimizers]
        return max(map(self._session.steps.of, optimizers), default=0)

    def copies(self) -> list[torch.Tensor]:
        """Return the memory of both slots."""
        return [] if self._memory is None else self._memory.buffers()

    def restore(self, run: str, fence: tuple[int, int]) -> list[str]:
        """Return to a slot, and forget a later one.

        Args:
            run: Id of the cell.
            fence: The fence in it.

        Returns:
            A line for each object that refused its state.

        Raises:
            ValueError: no slot holds it.
        """
        self._every = 0
        creation.forget_equal_meshes()
        if self._memory is None:
            self._load(run, fence)
            return []
        slots = {slot.key: index for index, slot in enumerate(self._slots) if slot is not None}
        if (run, fence) not in slots:
            raise ValueError("no slot of this rank holds that step")
        self._latest = slots[run, fence]
        slot = self._slots[self._latest]
        assert slot is not None
        self._session.protected_step = slot.header.step
        refused = slot.snapshot.restore(self._session.kernel.shell.user_ns, self._session.steps)
        self._release(1 - self._latest)
        self._memory.trim()
        return [*(f"`{name}` ({what})" for name, what in slot.snapshot.state.obstacles.items()), *refused]

    def _load(self, run: str, fence: tuple[int, int]) -> None:
        """Load what the predecessor of this process left, then save it again, so that another death loses nothing."""
        fd, session = self._fd, self._session
        found = {} if fd is None else read_headers(fd)
        index = next((index for index, one in found.items() if (one.run, one.fence) == (run, fence)), None)
        if fd is None or index is None:
            raise ValueError("no slot of this rank holds that step")
        header = found[index]
        data = read_bytes(fd, header.offset, header.size)
        if zlib.crc32(data) != header.checksum:
            raise ValueError("the protected state does not match its checksum")
        unpack(session, data, lambda *place: read_bytes(fd, *place))
        self._run, self._fence = run, fence
        self._memory, self._latest = SlotMemory(fd), 1 - index
        self._fill()
        self._memory.invalidate(index)
        self._memory.forget_predecessor()

    def forget(self) -> None:
        """Give up both slots and their memory."""
        if self._memory is not None:
            self._memory.clear()
        elif self._has_predecessor and self._fd is not None:
            os.ftruncate(self._fd, 0)
        self._memory, self._slots, self._latest, self._has_predecessor = None, [None, None], 1, False
        self._session.protected_step = None


def list_protected() -> ProtectedSteps:
    """List the states that outlive this rank."""
    protection = current().protection
    return ProtectedSteps(tuple(protection.steps()), protection.steps_now())


def restore(run: str, fence: tuple[int, int]) -> list[str]:
    """Return to one of them; return a line for each object that refused its part."""
    return current().protection.restore(run, fence)


def keep(key: str, limit: int) -> UndoableCell:
    """Save the state now; the record says what in it cannot be restored, or why it was not saved.

    Args:
        key: A name for it, in place of a cell's run.
        limit: Bytes that it may take; 0: half of the memory that is free.
    """
    return current().protection.keep(key, limit)


def forget(key: str) -> None:
    """Give up all slots, unless the state of a cell has taken the place of this one."""
    protection = current().protection
    if all(step.run == key for step in protection.steps()):
        protection.forget()
