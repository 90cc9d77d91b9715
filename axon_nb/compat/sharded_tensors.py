"""What distributed tensors and split models do on valid input and nobody expects: one sentence in the cell."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from axon_nb.compat.hints import after, before, tell
from axon_nb.records.hooks import missing_hooks

_MEAN = 1
"""torch's number of the reduction "mean"."""
_SUM = 2
_LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy")
_LOOKS = 64
"""How many casts of arguments are looked at in a process."""
_casts = itertools.count()
shard_draw = ""
"""Digest of the generator's state after the last draw into a shard on a CPU; empty: there was none."""


def watch_dtensors(module: ModuleType) -> None:
    """Look at what operations on distributed tensors return."""
    if missing_hooks("surprises.dtensor"):
        return
    aten: Any = torch.ops.aten
    for name in _LOSSES:
        _handle(module, getattr(aten, f"{name}_backward").default, functools.partial(_check_mean, name))
    for name in (*_LOSSES, "binary_cross_entropy_with_logits"):
        _handle(module, getattr(aten, name).default, functools.partial(_check_average, name))
    _handle(module, aten._local_scalar_dense.default, _check_scalar)
    for operator in (aten.uniform_.default, aten.normal_.default):
        _handle(module, operator, _note_draw)
    for operator in (aten.zero_.default, aten.fill_.Scalar, aten.copy_.default, aten.mul_.Tensor, aten.add_.Tensor):
        _handle(module, operator, _check_write)
    for operator in (aten.sum.default, aten.sum.dim_IntList, aten._to_copy.default):
        _handle(module, operator, _check_pending)
    for operator in (aten.amax.default, aten.amin.default, aten.linalg_vector_norm.default):
        _handle(module, operator, _check_extreme)
    if torch.__version__.startswith(("2.13.", "2.14.", "2.15.")):
        # Of a split height or width these handlers compute a part and call it whole; torch's rules, which gather it,
        # are right: https://github.com/pytorch/pytorch/issues/191926
        for operator in (aten.convolution.default, aten.convolution_backward.default):
            module.DTensor._op_dispatcher._custom_op_handlers.pop(operator, None)
    after(torch, "load", functools.partial(_check_loaded, module.DTensor))
    after(torch.optim.Muon, "__init__", _check_muon)


def _handle(module: ModuleType, operator: Any, look: Callable[..., None]) -> None:
    """After each call of `operator` with distributed tensors, call `look` with its result, it, and its arguments."""
    dispatcher = module.DTensor._op_dispatcher

    def handler(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handlers = dispatcher._custom_op_handlers
        del handlers[operator]  # so that torch goes its own way
        try:
            result = call(*args, **kwargs)
            with contextlib.suppress(Exception):
                look(result, call, args)
        finally:
            handlers[operator] = handler
        return result

    dispatcher._custom_op_handlers[operator] = handler


def _check_mean(name: str, result: Any, operator: Any, args: tuple[Any, ...]) -> None:
    """Compare the gradient of a mean over sharded rows with that of the sum, divided by the number of all elements."""
    values = list(args)
    at = next(number for number, value in enumerate(values) if type(value) is int)
    local, count = result.to_local(), result.numel()
    if values[at] != _MEAN or not local.numel() or local.numel() == count:
        return
    values[at] = _SUM
    own = [value.to_local() if hasattr(value, "to_local") else value for value in values]
    if not torch.allclose(operator(*own) / count, local, equal_nan=True):
        tell(
            f"the gradient of {name} of sharded tensors{{place}} is {count / local.numel():.3g} times too large: torch "
            "divides by the elements of this rank's shard. Write the formula, such as `(a - b).square().mean()`."
        )


def _check_average(name: str, result: Any, operator: Any, args: tuple[Any, ...]) -> None:
    """Look for shards of other sizes, whose averages torch averages."""
    mesh, shape = args[0].device_mesh, args[0].shape
    is_uneven = any(one.is_shard() and shape[one.dim] % mesh.size(dim) for dim, one in enumerate(args[0].placements))
    if is_uneven and any(one.is_partial("avg") for one in result.placements):
        tell(
            f"{name} of sharded tensors{{place}} is an average of the ranks' averages, and their shards differ in "
            "size: call `full_tensor()` on the tensors first, or write the formula, as `(a - b).square().mean()`."
        )


def _check_scalar(result: Any, operator: Any, args: tuple[Any, ...]) -> None:
    mesh, placements = args[0].device_mesh, args[0].placements
    if any(placement.is_partial() and mesh.size(dim) > 1 for dim, placement in enumerate(placements)):
        tell(
            "a number taken from a sharded tensor{place}, by item(), float() or bool(), is this rank's part only: use "
            "`.full_tensor().item()` on all ranks."
        )


def _check_write(result: Any, operator: Any, args: tuple[Any, ...]) -> None:
    view, base = args[0], args[0]._base
    if (
        base is not None
        and view.to_local().untyped_storage().data_ptr() != base.to_local().untyped_storage().data_ptr()
    ):
        tell(
            "a write to rows of a sharded tensor{place} is lost, as they are a gathered copy: write to the rows of "
            "`to_local()` that this rank has, or to `full_tensor()` and distribute it again."
        )


def _check_pending(result: Any, operator: Any, args: tuple[Any, ...]) -> None:
    """Look for what is summed, though torch has yet to combine it otherwise."""
    tensor, is_sum = args[0], operator is not torch.ops.aten._to_copy.default
    pending = [
        one for dim, one in enumerate(tensor.placements) if one.is_partial() and tensor.device_mesh.size(dim) > 1
    ]
    if is_sum and any(type(one).__name__ == "_NormPartial" for one in pending):
        tell(
            "the sum of norms of a sharded tensor{place} is one norm of the ranks' sums, which is less: call "
            "`full_tensor()` on the norms first."
        )
    if tensor.dtype is torch.bool and any(one.is_partial("sum") for one in pending):
        tell("any() of a sharded tensor{place}, taken as a number, counts each rank: use `.int().amax()` instead.")


def _check_extreme(result: Any, operator: Any, args: tuple[Any, ...]) -> None:
    """Look for extremes that get a gradient: torch divides it by how many equal them, and counts this rank's alone."""
    name = operator.name().partition("::")[2]
    if name == "linalg_vector_norm":
        if len(args) < 2 or not math.isinf(args[1]):
            return
        name = "a norm of order inf"
    if args[0].requires_grad and torch.is_grad_enabled() and any(one.is_partial() for one in result.placements):
        tell(
            f"the gradient of {name} of a sharded tensor{{place}} is NaN or infinite, as torch counts equal values in "
            "this rank's part alone: use `max()` or `min()` of the whole tensor."
        )


def _note_draw(result: Any, operator: Any, args: tuple[Any, ...]) -> None:
    global shard_draw
    _check_write(result, operator, args)
    tensor = args[0]
    if tensor.device.type == "cpu" and any(placement.is_shard() for placement in tensor.placements):
        state = torch.get_rng_state().numpy().tobytes() + repr(tuple(tensor.shape)).encode()
        shard_draw = hashlib.blake2b(state, digest_size=8).hexdigest()


def _check_loaded(kind: type, loaded: Any, *_: Any) -> None:
    if any(isinstance(value, kind) and _is_of_other_rank(value) for value in tree_leaves(loaded)):
        tell(
            "torch.load{place} returned the shard of another rank, so the whole tensor repeats rows: save sharded "
            "tensors with torch.distributed.checkpoint, or one file for each rank."
        )


def _is_of_other_rank(tensor: Any) -> bool:
    saver = getattr(tensor.device_mesh, "_rank", None)
    return saver not in (None, dist.get_rank()) and any(placement.is_shard() for placement in tensor.placements)


def _check_muon(_: None, optimizer: Any, *args: Any) -> None:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    if any(one.is_shard() for parameter in parameters for one in getattr(parameter, "placements", ())):
        tell(
            "torch.optim.Muon{place} works on sharded matrices in bfloat16, in parts: its updates may differ by some "
            "percent from those of whole matrices. Use axon_nb.parallel.Muon."
        )


def prepare_parallelize(module: ModuleType) -> None:
    """Look for weights that several layers share, and that become a parameter of each layer."""
    original = module.parallelize_module

    @functools.wraps(original)
    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        shared: dict[torch.nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            shared.setdefault(parameter, []).append(name)
        result = original(model, *args, **kwargs)
        parted = [names for names in shared.values() if len({model.get_parameter(name) for name in names}) > 1]
        if parted:
            tell(
                f"{' and '.join(parted[0])} were one parameter, and are a parameter each after "
                "parallelize_module{place}: assign one to the others again."
            )
        return result

    vars(module)["parallelize_module"] = call


def prepare_fully_shard(module: ModuleType) -> None:
    """Look for writes to gathered weights, which are lost when these are freed."""

    def look(parameter: Any) -> None:
        seen, version = getattr(parameter, "axon_nb_version", 0), parameter._unsharded_param._version
        if version > seen:  # torch's own writes do not count
            parameter.axon_nb_version = version
            tell(
                "weights under fully_shard that were written in place since their last forward have their old values "
                "again{place}, as the gathered copies were written: call `model.reshard()` before you write to them."
            )

    if not missing_hooks("surprises.fully_shard"):
        before(module.FSDPParam, "to_sharded", look)


def prepare_casts(module: ModuleType) -> None:
    """Look for whole numbers that a mixed-precision policy rounds, such as time steps."""

    def look(dtype: torch.dtype, value: Any) -> None:
        is_list = isinstance(value, torch.Tensor) and value.dtype is torch.float32 and value.ndim == 1
        if not is_list or dtype.itemsize >= value.itemsize or next(_casts) >= _LOOKS:  # a look waits for the GPU
            return
        if torch.equal(value, value.round()) and not torch.equal(value, value.to(dtype).float()):
            tell(
                f"fully_shard{{place}} rounds whole numbers among a module's arguments to {dtype}, as 999 to 1000: "
                "pass integers, or MixedPrecisionPolicy(cast_forward_inputs=False)."
            )

    if not missing_hooks("surprises.fully_shard"):
        before(module, "_cast_fp_tensor", look)
