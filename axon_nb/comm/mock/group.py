"""A process group of a mock world: torch's group API, carried out in this process when the last rank has called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from axon_nb.comm.errors import TensorMismatch, WorldStuck
from axon_nb.comm.mock.combine import combined
from axon_nb.comm.mock.hub import Hub
from axon_nb.comm.mock.turns import Turns
from axon_nb.comm.mock.work import MockWork
from axon_nb.comm.named_group import NamedGroup
from axon_nb.records.ranks import format_ranks

__all__ = ["NAME", "MockGroup"]

NAME = "axon_mock"
"""The backend's name in torch."""

Tensors = Sequence[torch.Tensor]
_SUM: Any = dist.ReduceOp.SUM


class MockGroup(NamedGroup):
    """One rank's end of a group.

    Args:
        hub: Shared by all its ranks.
        rank: This rank within the group.
        turns: Who runs when; None: all ranks are driven by one thread, so nothing can be waited for.
        name: torch's name of the group.
    """

    def __init__(self, hub: Hub, rank: int, turns: Turns | None, name: str = "") -> None:
        super().__init__(rank, len(hub.ranks), name, backend=NAME)
        self._hub = hub
        self._turns = turns

    def _get_backend(self, device: torch.device) -> MockGroup:
        """What torch asks for the abilities of a backend: this group has none of another."""
        return self

    def _meet(self, name: str, brings: Any, carry_out: Callable[[list[Any]], None], output: Any) -> MockWork:
        meeting = self._hub.join(self._own_rank, name, brings, carry_out)

        def wait(ready: Callable[[], bool]) -> None:
            self._wait(ready, lambda: f"{name} for {_named(self._hub.missing(meeting))}")

        return MockWork(lambda: meeting.done, wait, output)

    def _wait(self, ready: Callable[[], bool], waits_in: Callable[[], str]) -> None:
        if ready():
            return
        if self._turns is None or self._turns.rank is None:
            raise WorldStuck(
                f"Nobody else runs while this thread waits in {waits_in()}: make the call on every rank's group with "
                "async_op=True before one is waited for, or run a function on all ranks with `World.mock(n).run(fn)`."
            )
        self._turns.wait_for(ready, waits_in)

    def allreduce(self, tensors: Tensors, opts: Any = None) -> MockWork:
        """Combine."""
        op = opts.reduceOp if opts is not None else _SUM

        def carry_out(brought: list[Tensors]) -> None:
            for parts in zip(*brought, strict=True):
                self._check_shapes("all_reduce", parts)
                total = combined(parts, op)
                with torch.no_grad():  # detach() would leave a sparse tensor as it is
                    for part in parts:
                        part.copy_(total)

        return self._meet("all_reduce", list(tensors), carry_out, list(tensors))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> MockWork:
        """Combine on one rank."""
        root, op = opts.rootRank, opts.reduceOp

        def carry_out(brought: list[Tensors]) -> None:
            parts = [own[0] for own in brought]
            self._check_shapes("reduce", parts)
            parts[root].detach().copy_(combined(parts, op))

        return self._meet(f"reduce to rank {root}", list(tensors), carry_out, list(tensors))

    def broadcast(self, tensors: Tensors, opts: Any) -> MockWork:
        """One rank's tensors for all."""
        root = opts.rootRank

        def carry_out(brought: list[Tensors]) -> None:
            for parts in zip(*brought, strict=True):
                self._check_shapes("broadcast", parts)
                for part in parts:
                    if part is not parts[root]:
                        part.detach().copy_(parts[root].detach())

        return self._meet(f"broadcast from rank {root}", list(tensors), carry_out, list(tensors))

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> MockWork:
        """Everyone's tensors for everyone."""

        def carry_out(brought: list[tuple[Sequence[Tensors], Tensors]]) -> None:
            for position in range(len(brought[0][1])):
                for given, _ in brought:
                    for source, place in enumerate(given[position]):
                        self._fill("all_gather", place, brought[source][1][position])

        return self._meet("all_gather", (outputs, inputs), carry_out, list(outputs[0]) if outputs else [])

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> MockWork:
        """As `allgather`; the outputs are given by rank first."""
        by_tensor = [[own[position] for own in outputs] for position in range(len(inputs))]
        return self.allgather(by_tensor, inputs)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> MockWork:
        """Everyone's tensors for everyone, in one tensor."""
        return self.all_gather_single_coalesced([output], [tensor])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> MockWork:
        """As `all_gather_single`, several at once."""

        def carry_out(brought: list[tuple[Tensors, Tensors]]) -> None:
            for position in range(len(brought[0][1])):
                parts = [given[position].detach().reshape(-1) for _, given in brought]
                self._check_shapes("all_gather", parts)
                joined = torch.cat(parts)
                for places, _ in brought:
                    self._fill("all_gather", places[position].view(-1), joined)

        return self._meet("all_gather", (outputs, inputs), carry_out, list(outputs))

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> MockWork:
        """Everyone's tensors for one rank."""
        root = opts.rootRank

        def carry_out(brought: list[tuple[Sequence[Tensors], Tensors]]) -> None:
            for source, place in enumerate(brought[root][0][0]):
                self._fill("gather", place, brought[source][1][0])

        return self._meet(f"gather to rank {root}", (outputs, inputs), carry_out, list(outputs[0]) if outputs else [])

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> MockWork:
        """One rank's tensors, one for each."""
        root = opts.rootRank

        def carry_out(brought: list[tuple[Tensors, Sequence[Tensors]]]) -> None:
            for rank, (place, _) in enumerate(brought):
                self._fill("scatter", place[0], brought[root][1][0][rank])

        return self._meet(f"scatter from rank {root}", (outputs, inputs), carry_out, list(outputs))

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> MockWork:
        """Combine, and one part for each."""
        op = opts.reduceOp if opts is not None else _SUM

        def carry_out(brought: list[tuple[Tensors, Sequence[Tensors]]]) -> None:
            for rank, (place, _) in enumerate(brought):
                parts = [given[0][rank] for _, given in brought]
                self._check_shapes("reduce_scatter", parts)
                self._fill("reduce_scatter", place[0], combined(parts, op))

        return self._meet("reduce_scatter", (outputs, inputs), carry_out, list(outputs))

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> MockWork:
        """Combine one tensor, and one part of it for each."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> MockWork:
        """As `reduce_scatter_single`, several at once."""
        op = opts.reduceOp if opts is not None else _SUM

        def carry_out(brought: list[tuple[Tensors, Tensors]]) -> None:
            for position in range(len(brought[0][1])):
                parts = [given[position].detach().reshape(-1) for _, given in brought]
                self._check_shapes("reduce_scatter", parts)
                total = combined(parts, op).view(len(brought), -1)
                for rank, (places, _) in enumerate(brought):
                    self._fill("reduce_scatter", places[position].view(-1), total[rank])

        return self._meet("reduce_scatter", (outputs, inputs), carry_out, list(outputs))

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> MockWork:
        """Each rank's tensors, one for each."""

        def carry_out(brought: list[tuple[Tensors, Tensors]]) -> None:
            for rank, (places, _) in enumerate(brought):
                for source, place in enumerate(places):
                    self._fill("all_to_all", place, brought[source][1][rank])

        return self._meet("all_to_all", (outputs, inputs), carry_out, list(outputs))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> MockWork:
        """As `alltoall`, with one tensor that is cut along dim 0."""
        count = self.size()
        places = list(output.split(output_sizes) if output_sizes else output.chunk(count))
        parts = list(tensor.split(input_sizes) if input_sizes else tensor.chunk(count))
        return self.alltoall(places, parts, opts)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> MockWork:
        """Wait for everyone."""
        return self._meet("barrier", None, lambda brought: None, [])

    def send(self, tensors: Tensors, target: int, tag: int) -> MockWork:
        """Leave a message."""
        self._hub.post(self._own_rank, target, tag, tensors[0])
        return MockWork(lambda: True, lambda ready: None, list(tensors))

    def recv(self, tensors: Tensors, source: int, tag: int) -> MockWork:
        """Take the next message; several are taken in the order in which they were asked for."""
        got: list[int] = []

        def take(message: torch.Tensor) -> None:
            self._fill("recv", tensors[0], message)
            got.append(source)

        self._hub.ask(source, self._own_rank, tag, take)

        def wait(ready: Callable[[], bool]) -> None:
            self._wait(ready, lambda: f"recv for {_named([self._hub.ranks[source]])}")

        return MockWork(lambda: bool(got), wait, list(tensors))

    def recv_anysource(self, tensors: Tensors, tag: int) -> MockWork:
        """Take a message of whoever has sent one; the lowest rank comes first."""
        got: list[int] = []

        def ready() -> bool:
            if not got and (found := self._hub.take_any(self._own_rank, tag)) is not None:
                self._fill("recv", tensors[0], found[1])
                got.append(found[0])
            return bool(got)

        def wait(ready: Callable[[], bool]) -> None:
            self._wait(ready, lambda: "recv for any rank")

        return MockWork(ready, wait, list(tensors), lambda: got[0])

    def _check_shapes(self, name: str, parts: Tensors) -> None:
        for rank, part in enumerate(parts):
            if (part.shape, part.dtype) != (parts[0].shape, parts[0].dtype):
                hint = " `all_gather(…, uneven=True)` joins different lengths." if name == "all_gather" else ""
                raise TensorMismatch(
                    f"{name}: rank {self._hub.ranks[0]} brings {parts[0].dtype} of shape {tuple(parts[0].shape)}, rank "
                    f"{self._hub.ranks[rank]} {part.dtype} of shape {tuple(part.shape)}; dtype and shape must be the "
                    f"same on all ranks.{hint}"
                )

    @staticmethod
    def _fill(name: str, place: torch.Tensor, value: torch.Tensor) -> None:
        if place.numel() != value.numel() or place.dtype != value.dtype:
            raise TensorMismatch(
                f"{name}: {value.dtype} of shape {tuple(value.shape)} comes for a tensor of {place.dtype} of shape "
                f"{tuple(place.shape)}."
            )
        place.detach().copy_(value.detach().reshape(place.shape))


def _named(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranks(ranks)}"
