"""Where a check runs an answer: in a mock world, or on the notebook's ranks."""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from axon_nb.errors import AxonError

if TYPE_CHECKING:
    import torch

    from axon_nb.comm.calls import OperationCount

_SENT = "_axon_nb_course"


class NotYetError(AxonError):
    """The answer is still as the notebook came."""


class RankFailedError(AxonError):
    """The answer raised, on at least one rank."""


class Trial:
    """Runs an answer in a mock world: one process, the same bits each time, and a hang is an error.

    Args:
        answer: What the notebook has bound to the exercise's name.
        ranks: Number of ranks.
        seed: Decides on the random cases.
    """

    def __init__(self, answer: Any, *, ranks: int, seed: int) -> None:
        self.answer = answer
        self.ranks = ranks
        self.seed = seed
        self.random = random.Random(seed)

    def generator(self, text: str = "") -> torch.Generator:
        """Return a generator of random tensors that depends on the seed and a text."""
        import torch

        return torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {text}".encode()))

    def tensors(self, *shape: int, text: str = "") -> list[torch.Tensor]:
        """Return one tensor per rank, of small whole numbers in float64, so that sums are exact in any order."""
        import torch

        generator = self.generator(f"{shape} {text}")
        return [torch.randint(-9, 10, shape, generator=generator).double() for _ in range(self.ranks)]

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: int | None = None,
        synchronous_sends: bool = False,
    ) -> list[Any]:
        """Run `function(answer, *args)` on every rank; return the values in rank order.

        Each rank gets its own copy of the arguments, and its default group is that of the trial: `dist.get_rank()`
        is its rank.

        Args:
            function: What to run.
            *args: What to pass on.
            ranks: Number of ranks, if the case needs another number; live trials have one size and ignore it.
            synchronous_sends: Whether a send in the mock world waits for its receiver, as it may on real ranks.

        Raises:
            NotYetError: the answer raised NotImplementedError.
            Exception: what the first rank raised.
        """
        from axon_nb.comm import World

        answer = self.answer

        def on_rank(_: Any, *copies: Any) -> Any:
            return function(answer, *copies)

        try:
            return World.mock(ranks or self.ranks, synchronous_sends=synchronous_sends).run(on_rank, *args)
        except NotImplementedError:
            raise NotYetError from None

    def calls_of(self, function: Callable[..., Any], *args: Any) -> list[tuple[int, OperationCount]]:
        """Run as `run` does, and return the communication calls in order with their ranks, those before a failure."""
        from axon_nb.comm.calls import calls

        with calls() as counted, contextlib.suppress(Exception):
            self.run(function, *args)
        return counted.log

    def hangs(self, function: Callable[..., Any], *args: Any, synchronous_sends: bool = False) -> bool:
        """Whether `run` ends in a deadlock."""
        from axon_nb.comm import DeadlockError

        try:
            self.run(function, *args, synchronous_sends=synchronous_sends)
        except DeadlockError:
            return True
        return False


class LiveTrial(Trial):
    """Runs an answer on the ranks of the notebook's cluster.

    Args:
        name: The exercise's name for the answer.
        answer: The notebook's answer; None: the ranks have their own.
        seed: Decides on the random cases.
    """

    def __init__(self, name: str, answer: Any, *, seed: int) -> None:
        from axon_nb.cluster.session.clusters import require

        self._cluster = require("check(…, on='ranks')")
        super().__init__(answer, ranks=self._cluster.world_size, seed=seed)
        self._name = name
        if answer is not None:
            self._cluster.push({name: answer})

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: int | None = None,
        synchronous_sends: bool = False,
    ) -> list[Any]:
        """Run `function(answer, *args)` on every rank; return the values in rank order.

        Raises:
            NotYetError: the answer raised NotImplementedError, or the ranks have none.
            RankFailedError: a rank failed otherwise; the message is that of the cell.
        """
        from axon_nb.errors import CellError

        self._cluster.push({_SENT: (function, args)})
        code = f"from axon_course.trials import call_on_rank\ncall_on_rank({self._name}, *{_SENT})"
        try:
            result = self._cluster.run(code, quiet=True, undoable=False, cell=_running_cell())
        except CellError as error:
            text = str(error)
            if "NotImplementedError" in text or f"name '{self._name}' is not defined" in text:
                raise NotYetError from None
            raise RankFailedError(text.splitlines()[0]) from None
        return [result.values.get(rank) for rank in range(self.ranks)]

    def calls_of(self, function: Callable[..., Any], *args: Any) -> list[tuple[int, OperationCount]]:
        """Run as `run` does, and return the communication calls with their ranks: of each rank in order."""
        return [entry for own in self.run(_log_on_rank, function, args) for entry in own]


def _log_on_rank(answer: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    from axon_nb.comm.calls import calls

    with calls() as counted:
        function(answer, *args)
    return counted.log


def _running_cell() -> int | None:
    """Return the n of the check's own ``In [n]``: a running number may be that of another cell; None: no notebook."""
    from IPython.core.getipython import get_ipython

    shell: Any = get_ipython()
    return len(shell.history_manager.input_hist_parsed) - 1 if hasattr(shell, "kernel") else None


def call_on_rank(answer: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run `function(answer, *args)`, as `LiveTrial.run` sends it to each rank."""
    return function(answer, *args)
