"""Negotiation of the next collective: ranks match calls by name, whatever order each rank calls them in.

In each round every rank sends one small row over a separate group: "I call this", "I wait" or "I have joined". Rounds
are sent ahead without waiting, and every rank reads them in the same order. So all ranks decide alike: a collective
starts when the last rank has called it, in the same order everywhere. (Matching names is Horovod's idea. Its background
thread is not needed, as Gloo's threads carry the rounds.)

A round in which every rank waits proves a deadlock, which is then reported on all ranks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from axon_nb.comm import Backend, CommError, Handle, ProcessGroup
from axon_nb.comm.collectives import direct
from axon_nb.compat.horovod.runtime.errors import HorovodInternalError, converted_errors, gather_objects
from axon_nb.compat.horovod.runtime.operation import Blueprint, Operation, deadlock_message, differing, join_mismatch
from axon_nb.errors import UsageError

__all__ = ["Channel"]

_LOOKS, _WAITS, _CALLS, _JOINED = range(4)
"""Kinds of rows: only reading what the others do, waiting, calling, end of this rank's data."""
_WIDTH = 4

Calls = dict[int, tuple[int, int]]
"""Signature and number of rows of one collective, by member."""


class Channel:
    """One rank's view of the collectives of a process set.

    Args:
        control: Carries the rounds.
        data: Carries the data; like `control`, used for nothing else.
        absent: Creates the operation with which a joined rank takes part in an allreduce.
    """

    def __init__(self, control: ProcessGroup, data: ProcessGroup, *, absent: Callable[[Blueprint], Operation]) -> None:
        self.data = data
        self._control = control
        self._absent = absent
        self._size = control.size()
        on_gpu = control.backend is Backend.NCCL
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self.reset()

    def reset(self) -> None:
        """Forget everything: the groups were rebuilt, and no rank has a call in progress."""
        self._rounds: deque[tuple[Any, torch.Tensor, torch.Tensor]] = deque()
        self._called: dict[int, Calls] = {}
        self._own: dict[int, Operation] = {}
        self._taken: dict[int, Operation] = {}
        self._joined: list[int] = []
        self._last_joined = -1
        self._for_others: list[Handle] = []
        self._numbers: Counter[str] = Counter()
        self._meetings = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the members, ascending."""
        return self.data.ranks

    @property
    def busy(self) -> bool:
        """Whether a call is in progress."""
        return bool(self._rounds or self._own or any(not operation.over for operation in self._taken.values()))

    def next_name(self, kind: str) -> str:
        """Generate the name of an unnamed call; all ranks number such calls alike."""
        number = self._numbers[kind]
        self._numbers[kind] += 1
        return f"noname.{self._meetings}.{number}"

    def _meet(self) -> None:
        # All ranks are here but may have made different numbers of calls: restart the numbering.
        self._meetings += 1
        self._numbers.clear()

    def call(self, operation: Operation) -> None:
        """Announce to the other ranks that this rank calls `operation`.

        Raises:
            UsageError: a call with that name is in progress.
        """
        if operation.key in self._taken:
            raise UsageError(
                f"hvd.{operation.kind}: the name {operation.name!r} is used by an earlier call that is not "
                "synchronized yet. Use a different name, or call hvd.synchronize on the earlier one first."
            )
        self._own[operation.key] = self._taken[operation.key] = operation
        try:
            self._send(_CALLS, operation.key, operation.signature, operation.rows)
        except BaseException:
            self._own.pop(operation.key, None)
            self._taken.pop(operation.key, None)
            raise
        self.progress()

    def progress(self, ahead: int | None = None) -> None:
        """Read the rounds that have arrived.

        Args:
            ahead: Wait until at most this many rounds are unread; None for no waiting.
        """
        while self._rounds and self._read(wait=ahead is not None and len(self._rounds) > ahead):
            pass

    def finish(self, operation: Operation) -> Any:
        """Wait for one call and return its result.

        Raises:
            HorovodInternalError: the ranks' calls do not match, all ranks wait, or a rank is gone.
        """
        self._decide(operation)
        try:
            with converted_errors(operation.kind, operation.name):
                return operation.result()
        finally:
            if operation.over:
                self._taken.pop(operation.key, None)

    def poll(self, operation: Operation) -> bool:
        """Whether `finish` would return at once."""
        self.progress()
        if not operation.decided:
            if self.data.backend is Backend.MOCK:
                self._decide(operation)
            elif not self._rounds:
                self._send(_LOOKS)
                self.progress()
        if self.data.backend is Backend.MOCK and operation.transfer is not None:
            operation.transfer.wait()  # ranks take turns: while this one polls, no other runs
        return operation.over

    def join(self) -> int:
        """Take part in the others' reductions with zeros until all have joined; return the rank that joined last."""
        self._last_joined = -1
        while self._last_joined < 0:
            if not self._rounds:
                self._send(_JOINED)
            self._read(wait=True)
        for handle in self._for_others:
            handle.wait()
        self._for_others = []
        return self._last_joined

    def _decide(self, operation: Operation) -> None:
        while not operation.decided:
            if not self._rounds:
                self._send(_WAITS)
            self._read(wait=True)

    def _send(self, says: int, key: int = 0, signature: int = 0, rows: int = 0) -> None:
        own = torch.tensor([says, key, signature, rows], dtype=torch.int64, device=self._device)
        everyone = own.new_empty(self._size * _WIDTH)
        with converted_errors("negotiation"):
            work = direct.all_gather(everyone, own, group=self._control.torch_group, async_op=True)
        self._rounds.append((work, own, everyone))

    def _read(self, *, wait: bool) -> bool:
        """Read the oldest round if it has arrived, or wait for it; return whether it was read."""
        work, _, everyone = self._rounds[0]
        if work is not None:
            if not wait and not work.is_completed():
                return False
            with converted_errors("negotiation"):
                work.wait()
        self._rounds.popleft()
        self._take(everyone.view(self._size, _WIDTH).tolist())
        return True

    def _take(self, rows: Sequence[Sequence[int]]) -> None:
        for member, (says, key, signature, count) in enumerate(rows):
            if says == _CALLS:
                self._called.setdefault(key, {})[member] = (signature, count)
            elif says == _JOINED and member not in self._joined:
                self._joined.append(member)
        complete = [key for key, calls in self._called.items() if len({*calls, *self._joined}) == self._size]
        for key in complete:
            self._begin(self._own.pop(key, None), self._called.pop(key))
        if len(self._joined) == self._size:
            self._last_joined, self._joined = self.ranks[self._joined[-1]], []
            self._meet()
        elif not complete and all(row[0] in (_WAITS, _JOINED) for row in rows):
            self._report_deadlock()

    def _begin(self, operation: Operation | None, calls: Calls) -> None:
        """Start a collective that all ranks have called, in the same order on all of them."""
        if self._joined or len({signature for signature, _ in calls.values()}) > 1:
            blueprint, problem = self._compare_calls(operation)
            if operation is None and blueprint is not None and problem is None:
                placeholder = self._absent(blueprint)
                self._for_others.append(placeholder.begin(self.data, [0] * self._size))
            if operation is not None and problem is not None:
                operation.error = HorovodInternalError(problem)
            if operation is None or problem is not None:
                return
        assert operation is not None
        rows = [calls[member][1] if member in calls else 0 for member in range(self._size)]
        try:
            with converted_errors(operation.kind, operation.name):
                operation.transfer = operation.begin(self.data, rows)
        except CommError as error:  # matching calls that the groups do not support: so on all ranks
            operation.error = error

    def _compare_calls(self, operation: Operation | None) -> tuple[Blueprint | None, str | None]:
        """Exchange details: the blueprint for joined ranks, and the problem if the calls do not match."""
        own = None if operation is None else (operation.kind, operation.name, operation.brings)
        gathered = gather_objects(self.data, (own, operation and operation.blueprint))
        calls = [call for call, _ in gathered]
        blueprint = next((blueprint for call, blueprint in gathered if call is not None), None)
        problem = differing(self.ranks, calls)
        if problem is None and None in calls and blueprint is None:
            problem = join_mismatch(self.ranks, calls)
        return blueprint, problem

    def _report_deadlock(self) -> None:
        """Report a deadlock on all ranks, which can then continue."""
        waiting = list(self._own.values())
        gathered = gather_objects(self.data, [(operation.kind, operation.name) for operation in waiting])
        problem = deadlock_message(self.ranks, gathered)
        for operation in waiting:
            operation.error = HorovodInternalError(problem)
            self._taken.pop(operation.key, None)
        self._own, self._called = {}, {}
        self._meet()
