"""Counts what a step computes and keeps, operation by operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from axon_nb.plan.step_time_work import Work

__all__ = ["OpCounter", "tensors_in"]

aten = torch.ops.aten


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors among arguments or results, however they are nested."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_back(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape))


# torch counts the attention of GPUs only.
_FORMULAS: Mapping[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_back,
}


class OpCounter(TorchDispatchMode):
    """Counts what is computed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = "forward"
        """What is counted now; empty: nothing."""
        self.found: dict[str, dict[str, Work]] = {}
        self.saved: Counter[tuple[str, tuple[str, ...]]] = Counter()
        """Bytes kept for backward, by the module that keeps them and those from whose outputs they were computed."""
        # A matrix product keeps its weight as a view, which is no parameter.
        self._kept = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        self._sources: dict[int, frozenset[str]] = {}
        self._alive: list[torch.Tensor] = []  # so that no storage has the address of another before it
        self.uses: Counter[int] = Counter()
        """How often the optimizer takes each tensor, by its id."""
        self.tracker: Any = None
        self._prefix = f"{type(model).__name__}."

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.phase == "forward":
            self._follow(tensors_in((args, kwargs)), tensors_in(result))
        if self.phase and not func.is_view:
            place = self.found.setdefault(self.phase, {})
            child = "" if self.phase == "optimizer" else self._child()
            if self.phase == "optimizer":
                self.uses.update(map(id, tensors_in((args, kwargs))))
            place[child] = place.get(child, Work()) + _work_of(func._overloadpacket, args, kwargs, result)
        return result

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note a tensor that is saved for backward."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._kept:
            self._kept.add(storage._cdata)
            sources = tuple(sorted(self._sources.get(storage._cdata, ())))
            self.saved[self._module(), sources] += storage.nbytes()
        return tensor

    def _follow(self, given: Iterable[torch.Tensor], made: Iterable[torch.Tensor]) -> None:
        """Note from whose outputs tensors are computed."""
        sources: frozenset[str] = frozenset().union(
            *(self._sources.get(one.untyped_storage()._cdata, ()) for one in given)
        )
        for tensor in made:
            self._alive.append(tensor)
            if sources:
                self._sources[tensor.untyped_storage()._cdata] = sources

    def note_output(self, name: str, output: Any) -> None:
        """Note what a module with parameters of its own returns: from there on it is the source."""
        for tensor in tensors_in(output):
            self._alive.append(tensor)
            self._sources[tensor.untyped_storage()._cdata] = frozenset((name,))

    def _child(self) -> str:
        for name in self.tracker.parents:
            if name.startswith(self._prefix):
                return str(name[len(self._prefix) :].partition(".")[0])
        return ""

    def _module(self) -> str:
        """The innermost module that runs."""
        inside = [str(name) for name in self.tracker.parents if name.startswith(self._prefix)]
        return max(inside, key=len, default=self._prefix)[len(self._prefix) :]


def _work_of(packet: Any, args: Any, kwargs: Any, result: Any) -> Work:
    if packet in flop_registry:
        return Work(flops=float(flop_registry[packet](*args, **kwargs, out_val=result)), ops=1)
    if packet in _FORMULAS:
        return Work(flops=float(_FORMULAS[packet](*args, **kwargs)), ops=1)
    return Work(bytes=float(sum(tensor.nbytes for tensor in tensors_in((args, kwargs, result)))), ops=1)
