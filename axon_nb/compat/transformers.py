"""Says so when ranks that share a tensor-parallel model of transformers call it with different inputs.

Each rank then computes with a part of another text, and nothing fails: `generate(do_sample=True)` draws other tokens on
each rank that is not seeded alike. So before each call of the model its ranks compare a few numbers of its inputs, and
of what the last split layer got in the call before, which unseeded dropout changes. One operation of 6 numbers a call.

Private hook: the function that splits a model. Without it nothing is compared.
"""

from __future__ import annotations

import functools
import sys
import zlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from axon_nb.comm.samples import sample
from axon_nb.records.environment import CHECK_INPUTS
from axon_nb.records.hooks import missing_hooks
from axon_nb.records.ranks import name_ranks

_TOLERANCE = 0.02
"""Of a norm, by which activations may differ: ranks round alike, dropout changes much more."""

Where = Callable[[], tuple[object, str]]
"""Returns the cell that runs, as any object, and the line, such as `` at line 3``."""


def compare_inputs(tensor_parallel: ModuleType, *, where: Where) -> None:
    """Make models compare their inputs between ranks from the moment they are split.

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


def watch_inputs(model: torch.nn.Module, mesh: Any, split: Mapping[str, str], where: Where) -> None:
    """Compare the inputs of a model between ranks before each of its calls.

    Args:
        model: The model.
        mesh: torch's mesh of the ranks that share it, with one axis.
        split: The names of its split modules, in any order.
        where: Says where the model is called.
    """
    checks = _Checks(type(model).__name__, mesh, where)
    # Closures: a copy of the model shares what they hold, as it shares the groups of its layers.
    model.register_forward_pre_hook(
        lambda module, args, kwargs: checks.begin((*args, *kwargs.values())), with_kwargs=True
    )
    names = {name for name, _ in model.named_modules() if name in split}
    last = next((name for name, _ in reversed(list(model.named_modules())) if name in names), None)
    # The input of a split layer that takes whole ones: of the first beside the last, such as q_proj or gate_proj.
    whole = next((name for name in names if last and split[name].startswith("colwise") and _near(name, last)), None)
    if whole is not None:
        model.get_submodule(whole).register_forward_pre_hook(lambda module, args: checks.note(whole, module, args[0]))


def _near(name: str, other: str) -> bool:
    return name.rpartition(".")[0] == other.rpartition(".")[0]


class _Checks:
    """The checks of one model."""

    def __init__(self, model: str, mesh: Any, where: Where) -> None:
        self._model, self._mesh, self._where = model, mesh, where
        self._calls = 0
        self._noted: tuple[str, torch.Tensor] | None = None
        self._pending: Callable[[], None] | None = None
        self._reported: object = self
        """The cell that showed a difference last."""

    def begin(self, inputs: tuple[Any, ...]) -> None:
        """Compare the inputs of a call that begins."""
        if torch.compiler.is_compiling():
            return
        if self._pending is not None:
            self._pending()
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        if not tensors:
            return
        self._calls += 1
        name, noted = self._noted or ("", torch.zeros(2, dtype=torch.float64))
        self._noted = None
        numbers = _numbers(tensors)
        own = torch.cat([numbers, noted.to(numbers), numbers.new_full((1,), self._calls)])
        both = torch.cat([own, -own])
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self._mesh.get_group())
        if not both.is_cuda:
            self._compare(both, name)
            return
        # The device is not waited for: the next call reports what it finds.
        found = both.to("cpu", non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()

        def compare_later() -> None:
            ready.synchronize()
            self._compare(found, name)

        self._pending = compare_later

    def note(self, name: str, module: torch.nn.Module, value: Any) -> None:
        """Keep numbers of a split layer's input, which must be equal on all ranks, for the next call in training."""
        if module.training and isinstance(value, torch.Tensor) and not torch.compiler.is_compiling():
            self._noted = (name, sample(value))

    def _compare(self, both: torch.Tensor, name: str) -> None:
        self._pending = None
        most, least = both[:6].tolist(), (-both[6:]).tolist()
        calls = self._calls
        is_same_call = most[5] == least[5]
        if not is_same_call:
            self._calls = 0  # an aborted call had begun on some of the ranks only
        if most[0] != least[0] or most[1] - least[1] > _TOLERANCE * most[2]:
            self._tell(f"the inputs of {self._model}", f"in call {calls}", "")
        elif name and is_same_call and most[3] - least[3] > _TOLERANCE * most[4]:
            reason = ", though those of the model do not (unseeded dropout?)"
            self._tell(f"the inputs of {name} in {self._model}", f"since call {calls - 1}", reason)

    def _tell(self, what: str, when: str, reason: str) -> None:
        cell, place = self._where()
        if self._reported == cell:
            return
        self._reported = cell
        if self._mesh.get_local_rank() == 0:
            ranks = name_ranks(dist.get_process_group_ranks(self._mesh.get_group()))
            print(
                f"axon_nb: {what} differ between {ranks} {when}{place}{reason}, so each rank computes a part of "
                "another result. Run `%distributed seed 0`, or torch.manual_seed(0) on all ranks, and pass the "
                "same inputs to all.",
                file=sys.stderr,
                flush=True,
            )


def _numbers(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return a hash of the integers in some tensors, and a sample of their fractions: three numbers in float64."""
    fractions = [sample(tensor) for tensor in tensors if tensor.is_floating_point()]
    integers = [tensor for tensor in tensors if not tensor.is_floating_point() and not tensor.is_complex()]
    device = tensors[0].device
    if device.type == "cpu":
        total = 0
        for tensor in integers:
            total = zlib.crc32(tensor.numpy(force=True).tobytes(), total)
        hashed = torch.tensor([total], dtype=torch.float64)
    else:  # without waiting for the device
        number = torch.zeros(1, device=device, dtype=torch.int64)
        for tensor in integers:
            flat = tensor.reshape(-1).to(number)
            number = number * 31 + (flat * torch.arange(1, 2 * flat.numel(), 2, device=device)).sum() + flat.numel()
        hashed = (number % (1 << 40)).double()
    return torch.cat([hashed, torch.stack(fractions).sum(0) if fractions else hashed.new_zeros(2)])
