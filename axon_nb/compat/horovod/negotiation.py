"""Agreeing with the other ranks on which collective comes next: by name, whatever order each rank calls in.

Ranks send each other small rows over a group of their own, one row a rank in each round: "I call this", "I wait", "I
have joined". Rounds are sent ahead without waiting for them, and every rank reads them in the same order, so that all
come to the same decisions: a collective begins when the last rank has called it, and always in the same order. (The
idea of names that are matched is Horovod's. Its background thread is not needed: rounds travel in Gloo's.)

A round in which every rank waits proves that none can go on. All of them are told, instead of waiting for ever.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from axon_nb.comm import Backend, CommError, Handle, ProcessGroup, direct
from axon_nb.compat.horovod.errors import HorovodInternalError
from axon_nb.compat.horovod.failing import carried, told
from axon_nb.compat.horovod.mismatch import differing, nobody_goes_on, without_the_joined
from axon_nb.compat.horovod.operation import Blueprint, Operation
from axon_nb.errors import UsageError

__all__ = ["Channel"]

_LOOKS, _WAITS, _CALLS, _JOINED = range(4)
"""What a row says: another look at what the others do, a wait, a call, the end of this rank's data."""
_WIDTH = 4

Calls = dict[int, tuple[int, int]]
"""Of one collective, by rank: its signature and rows."""


class Channel:
    """What one rank knows of the collectives of one process set.

    Args:
        control: Carries the rounds.
        data: Carries the data; like `control`, used by nobody else.
        absent: Makes the part of a rank that has joined in an allreduce of the others.
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
        """Forget everything: the groups were formed anew, and nothing is under way on any rank."""
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
        """Whether something is under way."""
        return bool(self._rounds or self._own or any(not operation.over for operation in self._taken.values()))

    def next_name(self, kind: str) -> str:
        """The name of a call that has been given none: ranks number such calls alike."""
        number = self._numbers[kind]
        self._numbers[kind] += 1
        return f"noname.{self._meetings}.{number}"

    def _meet(self) -> None:
        # All ranks are here, and may have made different numbers of calls: from now on they number them alike again.
        self._meetings += 1
        self._numbers.clear()

    def call(self, operation: Operation) -> None:
        """Tell the others that this rank calls `operation`.

        Raises:
            UsageError: a call of that name is under way.
        """
        if operation.key in self._taken:
            raise UsageError(
                f"hvd.{operation.kind} was called under the name {operation.name!r}, which an earlier call has that "
                "is not synchronized yet: use a different name, or hvd.synchronize the earlier one first."
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
        """Read the rounds that have come.

        Args:
            ahead: Wait until at most so many rounds are left unread; None: do not wait.
        """
        while self._rounds and self._read(wait=ahead is not None and len(self._rounds) > ahead):
            pass

    def finish(self, operation: Operation) -> Any:
        """Wait for one call; what the collective returns.

        Raises:
            HorovodInternalError: ranks brought what does not fit together, or no rank can go on, or one is gone.
        """
        self._decide(operation)
        try:
            with carried(operation.kind, operation.name):
                return operation.result()
        finally:
            if operation.over:
                self._taken.pop(operation.key, None)

    def poll(self, operation: Operation) -> bool:
        """Whether `finish` returns at once."""
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
        """Take part with zeros in what the others reduce until all have joined; the rank that joined last."""
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
        with carried("negotiation"):
            work = direct.all_gather(everyone, own, group=self._control.torch_group, async_op=True)
        self._rounds.append((work, own, everyone))

    def _read(self, *, wait: bool) -> bool:
        """Read the oldest round, if it has come or is to be waited for; whether it was read."""
        work, _, everyone = self._rounds[0]
        if work is not None:
            if not wait and not work.is_completed():
                return False
            with carried("negotiation"):
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
            self._give_up()

    def _begin(self, operation: Operation | None, calls: Calls) -> None:
        """All ranks have called: begin, in the same order on all of them."""
        if self._joined or len({signature for signature, _ in calls.values()}) > 1:
            blueprint, problem = self._look_closer(operation)
            if operation is None and blueprint is not None and problem is None:
                stand_in = self._absent(blueprint)
                self._for_others.append(stand_in.begin(self.data, [0] * self._size))
            if operation is not None and problem is not None:
                operation.error = HorovodInternalError(problem)
            if operation is None or problem is not None:
                return
        assert operation is not None
        rows = [calls[member][1] if member in calls else 0 for member in range(self._size)]
        try:
            with carried(operation.kind, operation.name):
                operation.transfer = operation.begin(self.data, rows)
        except CommError as error:  # what fits together, and the groups cannot carry: so on all ranks
            operation.error = error

    def _look_closer(self, operation: Operation | None) -> tuple[Blueprint | None, str | None]:
        """What the ranks that have called need of those that have joined, and why they cannot go on; None: they can."""
        own = None if operation is None else (operation.kind, operation.name, operation.brings)
        all_told = told(self.data, (own, operation and operation.blueprint))
        calls = [call for call, _ in all_told]
        blueprint = next((blueprint for call, blueprint in all_told if call is not None), None)
        problem = differing(self.ranks, calls)
        if problem is None and None in calls and blueprint is None:
            problem = without_the_joined(self.ranks, calls)
        return blueprint, problem

    def _give_up(self) -> None:
        """Every rank waits, and for what nobody else calls: all of them say so, and can then go on."""
        waiting = list(self._own.values())
        said = told(self.data, [(operation.kind, operation.name) for operation in waiting])
        problem = nobody_goes_on(self.ranks, said)
        for operation in waiting:
            operation.error = HorovodInternalError(problem)
            self._taken.pop(operation.key, None)
        self._own, self._called = {}, {}
        self._meet()
