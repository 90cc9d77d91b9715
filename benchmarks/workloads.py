"""Fixed workloads for overhead measurements: collectives of given sizes, and training steps. Runs on ranks."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

Groups = tuple[dist.ProcessGroup, dist.ProcessGroup]
"""(recoverable, plain) group of all ranks."""

_WIDTH, _LAYERS, _HEADS, _TOKENS, _BATCH, _WORDS = 256, 4, 4, 64, 4, 512


def make_groups() -> Groups:
    """Create two groups of all ranks: one as in cells, one with torch's own function without our hooks."""
    from axon_nb.engine.groups.recoverable import RecoverableGroup

    c10d: Any = dist.distributed_c10d
    ranks = list(range(dist.get_world_size()))
    recoverable = dist.new_group(ranks)
    hooked = c10d._new_process_group_helper
    c10d._new_process_group_helper = inspect.getclosurevars(hooked).nonlocals["original"]
    try:
        plain = dist.new_group(ranks)
    finally:
        c10d._new_process_group_helper = hooked
    if not isinstance(recoverable, RecoverableGroup) or isinstance(plain, RecoverableGroup):
        raise RuntimeError(
            f"must be a recoverable and a plain group; got {type(recoverable).__name__} and {type(plain).__name__}"
        )
    return recoverable, plain


def _all_reduce(size: int) -> Callable[[dist.ProcessGroup], object]:
    tensor = torch.zeros(size // 4)
    return lambda group: dist.all_reduce(tensor, group=group)


def _broadcast(size: int) -> Callable[[dist.ProcessGroup], object]:
    tensor = torch.zeros(size // 4)
    return lambda group: dist.broadcast(tensor, 0, group=group)


def _all_gather(size: int) -> Callable[[dist.ProcessGroup], object]:
    tensor, gathered = torch.zeros(size // 4), torch.zeros(dist.get_world_size() * (size // 4))
    return lambda group: dist.all_gather_into_tensor(gathered, tensor, group=group)


def _reduce_scatter(size: int) -> Callable[[dist.ProcessGroup], object]:
    part = -(-size // 4 // dist.get_world_size())
    tensor, whole = torch.zeros(part), torch.zeros(part * dist.get_world_size())
    return lambda group: dist.reduce_scatter_tensor(tensor, whole, group=group)


def _send_recv(size: int) -> Callable[[dist.ProcessGroup], object]:
    tensor, turn = torch.zeros(size // 4), [0]

    def call(group: dist.ProcessGroup) -> None:
        turn[0] ^= 1  # the ranks alternate in sending, so that neither runs ahead
        if dist.get_rank() == turn[0]:
            dist.send(tensor, 1 - turn[0], group=group)
        else:
            dist.recv(tensor, turn[0], group=group)

    return call


OPERATIONS: dict[str, Callable[[int], Callable[[dist.ProcessGroup], object]]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "reduce_scatter": _reduce_scatter,
    "send/recv": _send_recv,
}


class _Model(nn.Module):
    """A small next-token transformer with 3.4 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, _WIDTH)
        layer = [
            nn.TransformerEncoderLayer(_WIDTH, _HEADS, 4 * _WIDTH, dropout=0.0, batch_first=True)
            for _ in range(_LAYERS)
        ]
        self.layers = nn.ModuleList(layer)
        self.head = nn.Linear(_WIDTH, _WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.roll(-1, 1).flatten())


def transformer() -> nn.Module:
    """Create the model for training steps, the same on all ranks; called with tokens, it returns the loss."""
    torch.manual_seed(0)
    return _Model()


def _trainer(model: nn.Module) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    tokens = torch.randint(_WORDS, (_BATCH, _TOKENS), generator=torch.Generator().manual_seed(dist.get_rank()))

    def step() -> None:
        optimizer.zero_grad()
        model(tokens).backward()
        optimizer.step()

    return step


def _ddp(group: dist.ProcessGroup) -> Callable[[], object]:
    torch.manual_seed(0)
    return _trainer(nn.parallel.DistributedDataParallel(_Model(), process_group=group))


def _fsdp(group: dist.ProcessGroup) -> Callable[[], object]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model, mesh = _Model(), DeviceMesh.from_group(group, "cpu")
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _trainer(model)


STEPS: dict[str, Callable[[dist.ProcessGroup], Callable[[], object]]] = {"DDP": _ddp, "FSDP2": _fsdp}
"""Training steps of a small transformer."""


def _block(call: Callable[[], object], count: int, group: dist.ProcessGroup) -> float:
    dist.barrier(group=group)
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count


def _pairs(calls: tuple[Callable[[], object], ...], groups: Groups, pairs: int, count: int) -> list[tuple[float, ...]]:
    for call, group in zip(calls, groups, strict=True):
        _block(call, max(2, count // 4), group)
    measured = []
    for number in range(pairs):
        seconds = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):  # alternate which one is first
            seconds[which] = _block(calls[which], count, groups[which])
        measured.append(tuple(seconds))
    return measured


def time_operations(groups: Groups, name: str, size: int, *, pairs: int, budget_s: float) -> list[tuple[float, ...]]:
    """Measure seconds per call on both groups, in pairs; collective.

    Args:
        groups: The groups that `make_groups` made.
        name: Name of the operation.
        size: Bytes per rank.
        pairs: Number of pairs.
        budget_s: Approximate duration of one block of calls, in seconds.
    """
    call = OPERATIONS[name](size)
    once = torch.tensor(_block(lambda: call(groups[1]), 4, groups[1]))
    dist.all_reduce(once, op=dist.ReduceOp.MAX)
    count = 2 * max(1, int(budget_s / 2 / max(float(once), 1e-5)))
    return _pairs((lambda: call(groups[0]), lambda: call(groups[1])), groups, pairs, count)


def time_steps(groups: Groups, name: str, *, pairs: int, count: int) -> list[tuple[float, ...]]:
    """Measure seconds per training step on both groups, in pairs; collective."""
    steps = tuple(STEPS[name](group) for group in groups)
    return _pairs(steps, groups, pairs, count)


def time_hand_overs(count: int) -> list[float]:
    """Measure seconds to wake a second thread and be woken by it: the minimum that a send or recv adds."""
    asked, answered = threading.Lock(), threading.Lock()
    asked.acquire()
    answered.acquire()

    def answer() -> None:
        for _ in range(count):
            asked.acquire()
            answered.release()

    thread = threading.Thread(target=answer)
    thread.start()
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        asked.release()
        answered.acquire()
        seconds.append(time.perf_counter() - began)
    thread.join()
    return seconds
