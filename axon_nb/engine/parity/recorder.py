"""Watches a model on all ranks and as a whole on one: what its modules compute, its gradients, what its optimizer does.

Tensors are recorded as digests: norm, largest value and random projections, which need the same memory for any size.
For the reference, the parts of all ranks are loaded into a plain model, with the optimizers that train it.
"""

from __future__ import annotations

import builtins
import contextlib
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from msgspec import Struct, field
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from axon_nb.comm.placements import placed
from axon_nb.engine.elastic import sharded_states
from axon_nb.engine.parity.batch import Cuts, gather_on_first
from axon_nb.engine.sharding import is_sharded, is_stage
from axon_nb.errors import UsageError
from axon_nb.records.ranks import name_ranks
from axon_nb.records.training.digests import Bounds, Digest, Place

_COUNT, _BLOCK = 16, 4096
_SEED = 20506
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
Sink = Callable[..., torch.Tensor | None]
"""Takes each tensor as it is computed, by kind, name and value, with `index`, `call` and `module`: the fields of
`records.comparison.Observation`. Returns what replaces a gradient or an output, or None."""
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class Projector:
    """Computes digests, with the same random signs on every rank and in every run."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(_SEED)
        signs = torch.randint(0, 2, (2, _COUNT, _BLOCK), generator=generator, device="cpu")
        self._signs = signs.double() * 2 - 1

    @torch.no_grad()
    def digest(self, tensor: torch.Tensor) -> Digest:
        """Return the digest of a tensor; numbers that are not finite count as 0."""
        flat = tensor.detach().reshape(-1).to("cpu", torch.float64)
        is_finite = bool(torch.isfinite(flat).all())
        if not is_finite:
            flat = torch.nan_to_num(flat, 0.0, 0.0, 0.0)
        if not flat.numel():
            return Digest(0.0, 0.0, True, (0.0,) * _COUNT)
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % _BLOCK)).view(-1, _BLOCK)
        # A block has its own sign in each projection, so that equal blocks do not add up.
        of_blocks = self._signs[1].T.repeat(math.ceil(len(padded) / _BLOCK), 1)[: len(padded)]
        projections = ((padded @ self._signs[0].T) * of_blocks).sum(0)
        return Digest(float(flat.norm()), float(flat.abs().max()), is_finite, tuple(projections.tolist()))


def epsilon_of(tensor: torch.Tensor) -> float:
    """Return the relative spacing of a tensor's numbers; 0 for integers."""
    return torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0


def local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, Bounds | None]:
    """Return what this rank holds of a tensor, and which part that is; None: nothing says so."""
    found = placed(tensor)
    if found is None or any(placement.is_partial() for placement in found.placements):
        return tensor, None
    from axon_nb.engine.sharding import placement_of

    offset = placement_of(tensor).offset
    ends = (start + size for start, size in zip(offset, found.local.shape, strict=True))
    return found.local, tuple(zip(offset, ends, strict=True))


def part_of(
    shape: tuple[int, ...], whole: tuple[int, ...], place: Place, *, of_batch: bool, call: int
) -> Bounds | None:
    """Return which part of the reference's tensor a rank computed, from the shapes; None if they do not fit.

    Args:
        shape: Shape of the rank's tensor.
        whole: Shape of the reference's tensor.
        place: The rank's place.
        of_batch: Whether the first dimension may be that of the batch.
        call: Which microbatch of the rank's part of the batch.
    """
    if len(shape) != len(whole):
        return None
    bounds = []
    for dim, (size, length) in enumerate(zip(shape, whole, strict=True)):
        if of_batch and dim == 0 and (start := _batch_start(size, length, place, call)) is not None:
            bounds.append((start, start + size))
        elif size == length:
            bounds.append((0, length))
        elif size * place.count == length:
            bounds.append((place.index * size, (place.index + 1) * size))
        else:
            return None
    return tuple(bounds)


def _batch_start(size: int, length: int, place: Place, call: int) -> int | None:
    """Return where a rank's part of the batch starts; None if the first dimension is not that of a batch."""
    if not size or length * place.length % place.total or length * place.start % place.total:
        return None
    rows = length * place.length // place.total
    if size == length or rows % size:
        return None
    return length * place.start // place.total + call % (rows // size) * size


def microbatches(shape: tuple[int, ...], whole: tuple[int, ...], place: Place) -> int:
    """Return in how many calls a rank computed its part of what the reference computed in one."""
    if not shape or len(shape) != len(whole) or not shape[0] or whole[0] * place.length % place.total:
        return 1
    rows = whole[0] * place.length // place.total
    return rows // shape[0] if rows and rows % shape[0] == 0 else 1


def is_wrapped_once(module: nn.Module) -> bool:
    """Whether the module only wraps another one under the name ``module``, as DDP does."""
    children = dict(module.named_children())
    return list(children) == ["module"] and type(module).__module__.startswith(
        ("torch.nn.parallel", "axon_nb.parallel")
    )


def clean_name(name: str) -> str:
    """Return a path without the names that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def inner_model(model: nn.Module) -> nn.Module:
    """Return the model within such wrappers."""
    while is_wrapped_once(model):
        model = model.get_submodule("module")
    return model


def _named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in inner_model(model).named_modules():
        inside = [part for part in clean_name(name).split(".") if part]
        yield ".".join(inside), module


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters under the names that they have without wrappers."""
    for name, parameter in inner_model(model).named_parameters():
        yield clean_name(name), parameter


class Recorder:
    """Passes tensors to a sink while it is entered.

    Args:
        models: By prefix, the models.
        sink: Takes the tensors.
        is_discarded: Says whether a forward that runs is discarded, as one that only infers shapes.
        cuts: Sees what the models get; entered with the recorder.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        sink: Sink,
        is_discarded: Callable[[], bool] = lambda: False,
        *,
        cuts: Cuts,
    ) -> None:
        self._models, self._cuts = models, cuts
        self._is_discarded = is_discarded
        self._sink = sink
        self._handles: list[Any] = []
        self.steps = 0
        """Steps of optimizers."""
        self._calls: Counter[tuple[str, str]] = Counter()
        self._depth = 0

    def __enter__(self) -> Recorder:
        for prefix, model in self._models.items():
            for name, parameter in named_parameters(model):
                self._sink("start", prefix + name, parameter)
            seen = set()
            for name, module in _named_modules(model):
                path = prefix + name
                if path in seen:  # a wrapper and what it wraps
                    continue
                seen.add(path)
                self._handles += [
                    module.register_forward_pre_hook(self._before(path), with_kwargs=True),
                    module.register_forward_hook(self._after(path)),
                ]
        self._handles += [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def finish(self) -> None:
        """Pass the gradients on, if the cell made no optimizer step."""
        if not self.steps:
            self._gradients()

    def _before(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            args, kwargs = self._cuts.enter_module(path, args, kwargs)
            self._tensors("input", path, module, (*args, *kwargs.values()))
            return args, kwargs

        return hook

    def _after(self, path: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if isinstance(module, _DROPOUT) and module.training and module.p and args and not self._is_discarded():
                # Each world draws its own masks: only those of replicas can be compared.
                call = self._calls["mask", path]
                self._calls["mask", path] += 1
                self._sink("mask", path, (output != 0).to(output.dtype), call=call, module=module)
                output = args[0]
            others = self._tensors("output", path, module, output if isinstance(output, tuple) else (output,))
            if not isinstance(output, tuple):
                output = others[0]
            elif type(output) is tuple:
                output = tuple(others)
            self._cuts.leave_module(output)
            return output

        return hook

    def _tensors(self, kind: str, path: str, module: nn.Module, values: Iterable[Any]) -> list[Any]:
        """Pass tensors on, and return what replaces them."""
        values = list(values)
        if self._is_discarded() or (module.training and not torch.is_grad_enabled()):
            return values  # a pipeline infers its shapes so, with or without gradients
        call = self._calls[kind, path]
        self._calls[kind, path] += 1
        for index, value in enumerate(values):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                other = self._sink(kind, path, value, index=index, call=call, module=module)
                if value.requires_grad:
                    value.register_hook(self._gradient(f"grad_{kind}", path, index, call, module))
                if other is not None:
                    values[index] = other
        return values

    def _gradient(self, kind: str, path: str, index: int, call: int, module: nn.Module) -> Callable[..., Any]:
        def hook(gradient: torch.Tensor) -> torch.Tensor | None:
            if not self._handles:
                return None
            return self._sink(kind, path, gradient, index=index, call=call, module=module)

        return hook

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for prefix, model in self._models.items():
            for name, parameter in named_parameters(model):
                if parameter.requires_grad:
                    yield prefix + name, parameter

    def _gradients(self) -> None:
        for name, parameter in self._parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            self._sink("gradient", name, gradient, call=self.steps)

    def _before_step(self, *_: Any) -> None:
        self._depth += 1
        if self._depth == 1:  # an optimizer may step another one
            self._gradients()

    def _after_step(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        for name, parameter in self._parameters():
            self._sink("weight", name, parameter, call=self.steps)
        self.steps += 1


def settings_of(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers and words of each optimizer among some variables, such as ``lr of optimizer``."""
    found: dict[str, Any] = {}
    for name, optimizer in namespace.items():
        groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else ()
        for number, group in enumerate(groups):
            place = f"{name}.param_groups[{number}]" if len(groups) > 1 else name
            plain = {key: value for key, value in group.items() if isinstance(value, int | float | str | tuple | None)}
            found |= {f"{key} of {place}": value for key, value in plain.items()}
    return found


def difference(settings: Sequence[Mapping[str, Any]]) -> str:
    """Say how the first setting that differs between ranks does."""
    for name, value in (settings[0] if settings else {}).items():
        values = {rank: of.get(name, value) for rank, of in enumerate(settings)}
        if any(other != value for other in values.values()):
            ranks: dict[Any, list[int]] = defaultdict(list)
            for rank, other in values.items():
                ranks[other].append(rank)
            return f"{name} is " + ", ".join(f"{other} on {name_ranks(of)}" for other, of in ranks.items())
    return ""


@contextlib.contextmanager
def watched_writes(written: list[str]) -> Iterator[None]:
    """Note the files that Python or torch.save, whose C++ code opens its own, open to write."""
    real_open, real_save = builtins.open, torch.save

    def watched_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if set(mode) & set("wax+") and isinstance(file, str | os.PathLike):
            path = os.fspath(file)
            if not str(path).startswith(("/dev/", "/proc/")):
                written.append(str(path))
        return real_open(file, mode, *args, **kwargs)

    def watched_save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(f, "write"):
            written.append(str(f))
        return real_save(obj, f, *args, **kwargs)

    builtins.open, torch.save = cast(Any, watched_open), cast(Any, watched_save)
    try:
        yield
    finally:
        builtins.open, torch.save = real_open, real_save


class Pieces(Struct):
    """What one rank holds of a model."""

    tensors: dict[str, tuple[torch.Tensor, Bounds | None]] = field(default_factory=dict)
    """Parameters and buffers by name, and which part of the whole each is, if it says so."""
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    """States of the optimizer by parameter."""


def is_whole(model: nn.Module) -> bool:
    """Whether each rank holds all of the model, as far as the model says so."""
    return not any(is_sharded(one) or is_stage(one) or getattr(one, "shard_dims", {}) for one in model.modules()) and (
        not any(is_sharded(parameter) for parameter in model.parameters())
    )


def gather_pieces(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[Pieces]:
    """Send what each rank holds to rank 0; collective over all ranks. Other ranks get an empty list."""
    pieces, names = Pieces(), {}
    for name, parameter in named_parameters(model):
        local, bounds = local_part(parameter)
        pieces.tensors[name] = local.detach().cpu().clone(), bounds
        names[id(parameter)] = name
    for name, tensor in model.named_buffers():
        pieces.tensors[clean_name(name.removeprefix("module."))] = tensor.detach().cpu().clone(), None
    for optimizer in optimizers:
        for trained, state in optimizer.state.items():
            if id(trained) in names:
                pieces.states[names[id(trained)]] = {
                    key: local_part(value)[0].detach().cpu().clone() if isinstance(value, torch.Tensor) else value
                    for key, value in state.items()
                }
    return gather_on_first(pieces) or []


def gather_zero_states(optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[tuple[int, str], Any]]:
    """Send the states of ZeRO-1 optimizers to rank 0; collective over all ranks. Other ranks get an empty list."""
    if not optimizers:
        return []
    mine = [
        {
            key: value.cpu() if isinstance(value, torch.Tensor) else value
            for key, value in sharded_states.zero_states(one).items()
        }
        for one in optimizers
    ]
    gathered = gather_on_first(mine)
    return [dict(item for held in of_ranks for item in held.items()) for of_ranks in zip(*gathered or (), strict=True)]


@torch.no_grad()
def fill(plain: nn.Module, pieces: Sequence[Pieces], places: Mapping[int, Place]) -> None:
    """Load the parts of all ranks into a plain model.

    Raises:
        UsageError: a part is missing, or has a shape that fits nowhere.
    """
    buffers = dict(plain.named_buffers())
    wholes: list[tuple[str, torch.Tensor]] = [*named_parameters(plain), *buffers.items()]
    for name, whole in wholes:
        parts = {rank: piece.tensors[name] for rank, piece in enumerate(pieces) if name in piece.tensors}
        if not parts and name in buffers:
            continue
        if not parts:
            raise UsageError(f"No rank's model has the parameter {name} of the plain model: both need the same names.")
        _join(whole, parts, places, name)


def _join(
    whole: torch.Tensor, parts: Mapping[int, tuple[torch.Tensor, Bounds | None]], places: Mapping[int, Place], name: str
) -> None:
    filled = 0
    seen = set()
    for rank, (part, known) in parts.items():
        bounds = known or part_of(tuple(part.shape), tuple(whole.shape), places[rank], of_batch=False, call=0)
        if bounds is None or len(bounds) != whole.ndim:
            raise UsageError(
                f"{name} has the shape {tuple(part.shape)} on rank {rank}, and {tuple(whole.shape)} in the plain model."
            )
        if bounds in seen:
            continue
        seen.add(bounds)
        whole[tuple(slice(*bound) for bound in bounds)].copy_(part)
        filled += part.numel()
    if filled < whole.numel():
        raise UsageError(f"The ranks hold {filled} of the {whole.numel()} elements of {name} in the plain model.")


def replace_optimizer(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    plain: nn.Module,
    *,
    pieces: Sequence[Pieces],
    places: Mapping[int, Place],
) -> None:
    """Make an optimizer of this rank's part one of the plain model, with the states of all ranks."""
    names = {id(parameter): name for name, parameter in named_parameters(model)}
    wholes = dict(named_parameters(plain))
    left = dict(wholes)
    for group in optimizer.param_groups:
        kept = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
        group["params"] = [wholes[name] for name in kept]
        for name in kept:
            left.pop(name, None)
    held = [name for name in left if any(name in piece.tensors for piece in pieces)]
    optimizer.param_groups[0]["params"] += [wholes[name] for name in held]  # those of other stages
    optimizer.state.clear()
    for name, parameter in wholes.items():
        states = {rank: piece.states[name] for rank, piece in enumerate(pieces) if name in piece.states}
        for key, first in next(iter(states.values()), {}).items():
            if not isinstance(first, torch.Tensor) or not first.ndim:
                optimizer.state[parameter][key] = first
                continue
            value = torch.zeros_like(parameter, dtype=first.dtype)
            parts = {rank: (state[key], pieces[rank].tensors[name][1]) for rank, state in states.items()}
            _join(value, parts, places, name)
            optimizer.state[parameter][key] = value


def use_alone(model: nn.Module) -> None:
    """Make the DDP wrappers in a model call what they wrap, and nothing else: DDP's own forward may communicate."""
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            module.require_backward_grad_sync = module.require_forward_param_sync = False
            vars(module)["forward"] = module.module.__call__


class WholePipeline:
    """Stands in for a `Pipeline` on one rank: its step runs the whole model on the whole batch.

    Args:
        plain: The whole model.
        loss: The pipeline's own loss.
    """

    is_first = is_last = True

    def __init__(self, plain: nn.Module, loss: Any) -> None:
        self.module = plain
        self._loss = loss

    def __call__(self, *args: Any) -> Any:
        with torch.no_grad():
            return self.module(*args)

    def step(self, x: Any = None, target: Any = None, loss: Any = None) -> torch.Tensor:
        """Run forward and backward; return the loss, shape (1,)."""
        value = (loss or self._loss)(self.module(*x) if isinstance(x, tuple) else self.module(x), target)
        value.backward()
        return torch.as_tensor(value).detach().reshape(1)

    def parameters(self) -> Any:
        """Return the parameters of the whole model."""
        return self.module.parameters()

    def clip_grad_norm(self, max_norm: float, *, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> float:
        """Clip the gradients of the whole model."""
        norm = nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type, error_if_nonfinite)
        return float(norm)
