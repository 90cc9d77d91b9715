"""Forward pass of all microbatches through the stages, without gradients; shapes may change from call to call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from axon_nb.comm.collectives.point_to_point import recv, send
from axon_nb.comm.device_clock import Moment, device_clock
from axon_nb.comm.group import ProcessGroup
from axon_nb.comm.spans import now
from axon_nb.records.spans import Span, suppress_spans


class ForwardPass:
    """Runs the stages of this rank one after the other, each over all microbatches.

    torch's schedules are not used: they would negotiate shapes again whenever training and inference alternate, and
    would divide gradients that wait for an optimizer step.

    Args:
        modules: This rank's stages, by index.
        num_stages: Number of stages on all ranks.
        rank_of: Returns the group rank that holds a stage.
        group: The ranks of the pipeline.
        devices: Device of each of them.
        spans: Whether to record spans.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        *,
        num_stages: int,
        rank_of: Callable[[int], int],
        group: ProcessGroup,
        devices: Mapping[int, torch.device],
        spans: bool,
    ) -> None:
        self._modules = modules
        self._last = num_stages - 1
        self._rank_of = rank_of
        self._group = group
        self._devices = devices
        self._spans = spans
        self._sent: list[tuple[Any, Any]] = []
        self._local_inputs: dict[int, list[tuple[Any, ...]]] = {}
        self._start_ns = 0

    @torch.no_grad()
    def run(self, inputs: Sequence[tuple[Any, ...]], num_microbatches: int) -> list[Any]:
        """Return the output of each microbatch on the rank with the last stage; elsewhere an empty list.

        Args:
            inputs: The arguments of each microbatch; empty on ranks without the first stage.
            num_microbatches: Number of microbatches.
        """
        outputs: list[Any] = []
        self._start_ns = now()
        for stage in sorted(self._modules):
            deferred: list[tuple[int, Any]] = []
            for microbatch in range(num_microbatches):
                args = inputs[microbatch] if stage == 0 else self._inputs(stage, microbatch)
                start = device_clock.moment(self._devices[stage])
                with suppress_spans("forward"):
                    output = self._modules[stage](*args)
                self._record("F", start, (stage, microbatch))
                if stage == self._last:
                    outputs.append(output)
                elif self._must_defer_sends(stage):
                    deferred.append((microbatch, output))
                else:
                    self._send_output(stage, microbatch, output)
            for microbatch, output in deferred:
                self._send_output(stage, microbatch, output)
        for handle, _ in self._sent:
            handle.wait()
        self._reshard()
        return outputs

    def _must_defer_sends(self, stage: int) -> bool:
        # When two ranks send to each other at once, NCCL processes all messages in order, one at a time.
        sender, receiver = self._rank_of(stage), self._rank_of(stage + 1)
        return self._group.size() == 2 and receiver < sender

    def _inputs(self, stage: int, microbatch: int) -> tuple[Any, ...]:
        if stage - 1 in self._modules:
            return self._local_inputs[stage].pop(0)
        source = self._rank_of(stage - 1)
        start = Moment(now())
        with suppress_spans("wait"):
            count = int(recv(source, group=self._group))
            args = tuple(recv(source, group=self._group) for _ in range(count))
        self._record("RECV_F", start, (stage, microbatch), sum(arg.nbytes for arg in args))
        return args

    def _send_output(self, stage: int, microbatch: int, output: Any) -> None:
        parts = tuple(output) if isinstance(output, (tuple, list)) else (output,)
        if stage + 1 in self._modules:
            self._local_inputs.setdefault(stage + 1, []).append(parts)
            return
        start = Moment(now())
        device = parts[0].device
        for tensor in (torch.tensor(len(parts), device=device), *parts):
            handle = send(tensor, self._rank_of(stage + 1), group=self._group, async_op=True)
            self._sent.append((handle, tensor))
        self._record("SEND_F", start, (stage, microbatch), sum(part.nbytes for part in parts))

    def _record(self, name: str, since: Moment, position: tuple[int, int], size: int = 0) -> None:
        if self._spans:
            kind, group = "forward" if name == "F" else "p2p", self._group
            rank, group_name = group.ranks[group.rank()], group.torch_group.group_name
            span = Span(rank, kind, name, since.ns, now(), group_name, size, *position, self._start_ns)
            device_clock.emit(span, since)

    def _reshard(self) -> None:
        # An FSDP2 root keeps parameters unsharded for backward. There is none here, and an optimizer step may be next.
        for module in self._modules.values():
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()
