"""A forward of all microbatches through the stages, without gradients; shapes may differ from call to call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from axon_nb.comm.group import ProcessGroup
from axon_nb.comm.point import recv, send
from axon_nb.comm.spans import now
from axon_nb.records.span import Span
from axon_nb.records.trace import emit, suppress_spans

__all__ = ["ForwardPass"]


class ForwardPass:
    """The stages of this rank, run one after the other, each over all microbatches.

    Not by torch's schedules, which would agree on shapes anew whenever training and this take turns, and would divide
    gradients that wait for an optimizer's step.

    Args:
        modules: This rank's stages.
        num_stages: Stages of all ranks.
        rank_of: The rank, within the group, that holds a stage.
        group: The ranks of the pipeline.
        spans: Whether to record what is done.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        *,
        num_stages: int,
        rank_of: Callable[[int], int],
        group: ProcessGroup,
        spans: bool,
    ) -> None:
        self._modules = modules
        self._last = num_stages - 1
        self._rank_of = rank_of
        self._group = group
        self._spans = spans
        self._sent: list[tuple[Any, Any]] = []
        self._inside: dict[int, list[tuple[Any, ...]]] = {}
        self._began = 0

    @torch.no_grad()
    def run(self, inputs: Sequence[tuple[Any, ...]], num_microbatches: int) -> list[Any]:
        """The output of each microbatch on the rank with the last stage, nothing elsewhere.

        Args:
            inputs: The arguments of each microbatch; empty where the first stage is not.
            num_microbatches: How many there are.
        """
        outputs: list[Any] = []
        self._began = now()
        for stage in sorted(self._modules):
            late: list[tuple[int, Any]] = []
            for number in range(num_microbatches):
                args = inputs[number] if stage == 0 else self._inputs(stage, number)
                start = now()
                with suppress_spans("forward"):
                    output = self._modules[stage](*args)
                self._record("F", start, (stage, number))
                if stage == self._last:
                    outputs.append(output)
                elif self._must_wait(stage):
                    late.append((number, output))
                else:
                    self._pass_on(stage, number, output)
            for number, output in late:
                self._pass_on(stage, number, output)
        for handle, _ in self._sent:
            handle.wait()
        self._reshard()
        return outputs

    def _must_wait(self, stage: int) -> bool:
        # Two ranks that send to each other at once: NCCL carries their messages in order, both ways, one at a time.
        own, other = self._rank_of(stage), self._rank_of(stage + 1)
        return self._group.size() == 2 and other < own

    def _inputs(self, stage: int, number: int) -> tuple[Any, ...]:
        if stage - 1 in self._modules:
            return self._inside[stage].pop(0)
        source = self._rank_of(stage - 1)
        start = now()
        with suppress_spans("wait"):
            count = int(recv(source, group=self._group))
            args = tuple(recv(source, group=self._group) for _ in range(count))
        self._record("RECV_F", start, (stage, number), sum(arg.nbytes for arg in args))
        return args

    def _pass_on(self, stage: int, number: int, output: Any) -> None:
        parts = tuple(output) if isinstance(output, (tuple, list)) else (output,)
        if stage + 1 in self._modules:
            self._inside.setdefault(stage + 1, []).append(parts)
            return
        start = now()
        device = parts[0].device
        for tensor in (torch.tensor(len(parts), device=device), *parts):
            handle = send(tensor, self._rank_of(stage + 1), group=self._group, async_op=True)
            self._sent.append((handle, tensor))
        self._record("SEND_F", start, (stage, number), sum(part.nbytes for part in parts))

    def _record(self, name: str, start: int, place: tuple[int, int], size: int = 0) -> None:
        if self._spans:
            kind, group = "forward" if name == "F" else "p2p", self._group
            rank, group_name = group.ranks[group.rank()], group.torch_group.group_name
            emit(Span(rank, kind, name, start, now(), group_name, size, *place, self._began))

    def _reshard(self) -> None:
        # A root of FSDP2 keeps whole parameters for a backward; there is none, and an optimizer's step may come first.
        for module in self._modules.values():
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()
