"""Notes what ranks that share a tensor-parallel model of transformers call it with, for the notebook to compare.

Each rank computes with a part of another text if they differ, and nothing fails: `generate(do_sample=True)` draws other
tokens on each rank that is not seeded alike. So each rank notes numbers of the model's inputs, and of what the last
split layer gets, which unseeded dropout changes. The notebook compares them when the cell ends: the ranks exchange
nothing.

It also restores the cache of a generation that is interrupted.

Private hooks: the function that splits a model, without which nothing is noted; `generate` and the layers of a cache.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from axon_nb.comm.samples import sample
from axon_nb.records.environment import CHECK_INPUTS
from axon_nb.records.hooks import missing_hooks
from axon_nb.records.protocol.cells import ModelCalls, NotedInput

_ALL = 64
"""Of so many calls in a cell each is noted; then every one that is a power of two."""
_SAMPLED = 4
"""Likewise where a note takes longer: of fractions, and on GPUs, which are not waited for."""

_order = itertools.count()
_watched: WeakValueDictionary[int, _Calls] = WeakValueDictionary()
"""In the order in which models were split, which is the same on all ranks that share them."""

Where = Callable[[], str]
"""Returns the line of the cell that runs, such as `` at line 3``."""


def compare_inputs(tensor_parallel: ModuleType, *, where: Where) -> None:
    """Note the inputs of models from the moment they are split.

    Args:
        tensor_parallel: The module ``transformers.distributed.tensor_parallel``, just imported.
        where: Says where the model is called.
    """
    if not CHECK_INPUTS.is_enabled() or missing_hooks("transformers.split", tensor_parallel=tensor_parallel):
        return
    original = tensor_parallel.apply_tensor_parallelism

    @functools.wraps(original)
    def apply_tensor_parallelism(model: Any, tp_mesh: Any, tp_plan: Mapping[str, str]) -> Any:
        model = original(model, tp_mesh, tp_plan)
        if tp_mesh.size() > 1:
            watch_inputs(model, tp_mesh, tp_plan, where)
        return model

    vars(tensor_parallel)["apply_tensor_parallelism"] = apply_tensor_parallelism


def keep_caches(utils: ModuleType) -> None:
    """Have `generate` leave the cache that it got as it was if it fails or is interrupted.

    Else some layers hold more tokens than others, on each rank differently. What cannot be cut, such as a sliding
    window, is emptied with the rest; the next call fills it again.

    Args:
        utils: The module ``transformers.generation.utils``, just imported.
    """
    if missing_hooks("transformers.generate", utils=utils):
        return
    original = utils.GenerationMixin.generate

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values")
        shapes = [layer.keys.shape for layer in getattr(cache, "layers", ()) if layer.get_seq_length()]
        try:
            return original(self, *args, **kwargs)
        except BaseException:
            if layers := getattr(cache, "layers", ()):
                _cut(layers, shapes)
            raise

    utils.GenerationMixin.generate = generate


def _cut(layers: Sequence[Any], shapes: Sequence[torch.Size]) -> None:
    """Cut layers of a cache to the shapes that their keys had, if all had tokens; empty them otherwise."""
    is_whole = len(layers) == len(shapes) and all(type(layer).__name__ == "DynamicLayer" for layer in layers)
    # Beams make more rows.
    if is_whole and all(layer.keys.shape[0] == shape[0] for layer, shape in zip(layers, shapes, strict=True)):
        for layer, shape in zip(layers, shapes, strict=True):
            layer.keys, layer.values = layer.keys[..., : shape[-2], :], layer.values[..., : shape[-2], :]
        return
    for layer in layers:
        layer.reset()


def watch_inputs(model: torch.nn.Module, mesh: Any, split: Mapping[str, str], where: Where) -> None:
    """Note the inputs of a model in each of its calls.

    Args:
        model: The model.
        mesh: torch's mesh of the ranks that share it, with one axis.
        split: The names of its split modules, in any order.
        where: Says where the model is called.
    """
    calls = _Calls(type(model).__name__, tuple(dist.get_process_group_ranks(mesh.get_group())), where)
    # Closures: a copy of the model shares what they hold, as it shares the groups of its layers.
    model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.begin((*args, *kwargs.values())), with_kwargs=True
    )
    names = {name for name, _ in model.named_modules() if name in split}
    last = next((name for name, _ in reversed(list(model.named_modules())) if name in names), None)
    # The input of a split layer that takes whole ones: of the first beside the last, such as q_proj or gate_proj.
    whole = next((name for name in names if last and split[name].startswith("colwise") and _near(name, last)), None)
    if whole is not None:
        model.get_submodule(whole).register_forward_pre_hook(lambda module, args: calls.note(whole, module, args[0]))


def _near(name: str, other: str) -> bool:
    return name.rpartition(".")[0] == other.rpartition(".")[0]


class _Calls:
    """The calls of one model in the cell that runs."""

    def __init__(self, model: str, ranks: tuple[int, ...], where: Where) -> None:
        self._model, self._ranks, self._where = model, ranks, where
        self._number, self._digest, self._line = 0, 0, ""
        self._noted: list[tuple[str, str, int, int, torch.Tensor | None]] = []
        _watched[next(_order)] = self

    def begin(self, inputs: tuple[Any, ...]) -> None:
        """Note the inputs of a call that begins."""
        if torch.compiler.is_compiling():
            return
        self._number += 1
        self._line = self._where()
        is_sampled, sampled = self._is_noted(_SAMPLED), None
        for value in inputs:
            if type(value) is not torch.Tensor or value.is_complex():
                continue
            if value.device.type == "cpu" and not value.is_floating_point():
                self._digest = zlib.crc32(value.numpy(force=True).tobytes(), self._digest)
            elif is_sampled:
                numbers = sample(value) if value.is_floating_point() else _hashed(value)
                sampled = numbers if sampled is None else sampled + numbers
        if self._is_noted(_ALL):
            self._add("", sampled)

    def note(self, name: str, module: torch.nn.Module, value: Any) -> None:
        """Note a split layer's input, which must be equal on all ranks, in training."""
        if module.training and self._is_noted(_SAMPLED) and not torch.compiler.is_compiling():
            self._add(name, sample(value))

    def take(self) -> ModelCalls | None:
        """Return what was noted since the last time; None if the model was not called."""
        if not self._number:
            return None
        if not self._is_noted(_ALL):
            self._add("", None)
        notes = []
        for module, line, call, digest, sampled in self._noted:
            number, norm = (0.0, 0.0) if sampled is None else sampled.tolist()
            notes.append(NotedInput(module, line, call, (0 if module else digest) + number, norm))
        self._noted, self._number, self._digest = [], 0, 0
        return ModelCalls(self._model, self._ranks, tuple(notes))

    def _is_noted(self, first: int) -> bool:
        return self._number <= first or not self._number & (self._number - 1)

    def _add(self, module: str, sampled: torch.Tensor | None) -> None:
        self._noted.append((module, self._line, self._number, self._digest, sampled))


def take_calls() -> tuple[ModelCalls, ...]:
    """Return the calls of all models since the last time, for the end of a cell."""
    return tuple(filter(None, (calls.take() for _, calls in sorted(_watched.items()))))


def _hashed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a hash of integers on a device, which is not waited for, and 0."""
    flat = tensor.reshape(-1).long()
    number = (flat * torch.arange(1, 2 * flat.numel(), 2, device=flat.device)).sum() + flat.numel()
    return torch.stack([number % (1 << 40), torch.zeros_like(number)]).double()
