"""Tests of distributed code on warm ranks: a pytest fixture whose processes start once for all tests.

    # conftest.py
    from axon_nb.testing import ranks
    two_ranks = ranks(2)

    # test_sums.py
    def test_sum(two_ranks):
        def add():
            total = torch.ones(1)
            dist.all_reduce(total)
            return total.item()
        assert two_ranks.run(add) == [2.0, 2.0]

A rank that raises fails its test with that rank's error; the next test has ranks that work again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from axon_nb.errors import UsageError

if TYPE_CHECKING:
    from axon_nb.cluster.cluster import Cluster

__all__ = ["Ranks", "ranks"]

_CALL, _VALUE = "_axon_nb_call", "_axon_nb_value"


def ranks(n: int, *, scope: str = "session", backend: str = "auto", devices: str = "auto") -> Any:
    """Return a pytest fixture: `n` ranks, on which a test runs functions.

    They start with the first test that asks for them, and stop at the end of `scope`. In a process that has a cluster
    already, such as a notebook in which pytest runs, the fixture uses that one, and does not stop it.

    Args:
        n: Number of ranks.
        scope: How long they live: pytest's ``session``, ``module``, ``class`` or ``function``.
        backend: ``auto``, ``shm``, ``gloo`` or ``nccl``, as for `axon_nb.start`.
        devices: ``auto``, ``cpu``, or GPU numbers such as ``2,5``.
    """
    import pytest

    def warm_ranks() -> Iterator[Ranks]:
        from axon_nb.cluster.session import current
        from axon_nb.cluster.session.clusters import start

        running = current.get()
        if running is not None:
            if running.world_size != n:
                raise UsageError(
                    f"axon_nb.testing.ranks({n}): this process already has a cluster of {running.world_size} ranks. "
                    f"Stop it, or ask for ranks({running.world_size})."
                )
            yield Ranks(running)
            return
        cluster = start(n, backend=backend, devices=devices)
        try:
            cluster.push({_CALL: sys.path})  # modules of helpers, which pytest has put there
            cluster.run(
                f"import sys\nsys.path += [place for place in {_CALL} if place not in sys.path]", undoable=False
            )
            yield Ranks(cluster)
        finally:
            cluster.stop()

    fixture: Any = pytest.fixture(scope=scope)  # type: ignore[call-overload]
    return fixture(warm_ranks)


class Ranks:
    """Ranks that run functions of tests."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        """What else they can do: `push`, `pull`, `status`."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.cluster.world_size

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run `function(*args, **kwargs)` on every rank and return the values in rank order, tensors on the CPU.

        The function is sent as it is, with the variables of the test that it uses; a change that it makes to them stays
        on the ranks. The default group is there: `dist.get_rank()` works.

        Raises:
            CellError: a rank raised; the message begins with its error.
            UsageError: the function, an argument or a value cannot be pickled.
        """
        values: list[Any] = self._run(_call, function, args, kwargs)
        return values

    def spawn(
        self, function: Callable[..., Any], args: Sequence[Any] = (), nprocs: int = 1, join: bool = True, **_: Any
    ) -> None:
        """Run `function(rank, *args)` on every rank: takes the place of `torch.multiprocessing.spawn`.

        The function's own `init_process_group` finds the group that is there, and `destroy_process_group` keeps it. So
        tests that call `mp.spawn` use warm ranks after ``monkeypatch.setattr(mp, "spawn", two_ranks.spawn)``.

        Raises:
            CellError: a rank raised.
            UsageError: `nprocs` is not the number of ranks, or `join` is False.
        """
        if nprocs != self.world_size or not join:
            raise UsageError(
                f"spawn(nprocs={nprocs}, join={join}) on {self.world_size} warm ranks: nprocs must be "
                f"{self.world_size}, and join True."
            )
        self._run(_call_as_rank, function, tuple(args), {})

    def _run(self, caller: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.cluster.state.health.dead:
            self.cluster.repair()
        self.cluster.push({_CALL: _packed(caller, function, args, kwargs)})
        code = f"import cloudpickle\n{_VALUE} = cloudpickle.loads({_CALL})()"
        self.cluster.run(code, undoable=False)
        values = self.cluster.pull(_VALUE)
        return [values[rank] for rank in range(self.world_size)]


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def _call_as_rank(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    import torch.distributed as dist

    return function(dist.get_rank(), *args, **kwargs)


def _packed(caller: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle a call, with the module of the function by value: ranks cannot import a test's module."""
    import functools

    import cloudpickle

    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None) or sys.prefix
    by_value = not file.startswith((sys.prefix, sys.base_prefix))
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        packed: bytes = cloudpickle.dumps(functools.partial(caller, function, args, kwargs))
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)
    return packed
