"""Memory of training per rank: sharding strategies, model states by formula and as measured, recomputed activations.

The formula follows Rajbhandari et al., ZeRO (2020), and what torch does: FSDP2 shards a parameter along its first
dimension and pads parameters and gradients to equal sizes on all ranks; ZeroRedundancyOptimizer assigns whole
parameters to ranks. How much state an optimizer keeps per parameter element is found by running it. The measurement
adds up the storages of a rank's tensors.
"""

from __future__ import annotations

import enum
import functools
import math
import resource
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from axon_nb.errors import UsageError

Choice = TypeVar("Choice", bound=enum.Enum)
MIB = 1024.0 * 1024.0
"""Bytes per MiB, the unit of names that end in `_mb`."""
_PROBE = (2, 3)
_HINT = "pass the elements of state per parameter element: states_per_param=…"
_IMPLEMENTATION_OPTIONS = ("capturable", "foreach", "fused")
ModuleKinds = type | tuple[type, ...] | Callable[[nn.Module], bool]
"""Selects modules: by class, or by a function called with each module."""


class ShardingStrategy(enum.Enum):
    """Which model states are sharded over ranks."""

    FULL_SHARD = "full_shard"
    """Parameters, gradients and optimizer state (ZeRO-3)."""
    SHARD_GRAD_OP = "shard_grad_op"
    """The same between steps; parameters stay unsharded from forward to backward (torch's ZeRO-2). In the ZeRO paper's
    stage 2 each rank keeps all parameters between steps, too; torch has no such strategy."""
    NO_SHARD = "no_shard"
    """Nothing: every rank holds everything and gradients are averaged, as in DDP."""
    HYBRID_SHARD = "hybrid_shard"
    """FULL_SHARD within a node, replicated across nodes."""
    OPTIMIZER_STATE = "optimizer_state"
    """Only the optimizer state (ZeRO-1)."""


class CPUOffload(enum.Enum):
    """What is kept in host memory between uses. CPU ranks make the same moves within host memory."""

    NONE = "none"
    PARAMS = "params"
    """Parameters: copied to the device for each all-gather and for the optimizer step."""
    OPTIMIZER_STATES = "optimizer_states"
    """Optimizer states: copied to the device for the optimizer step."""
    FULL = "full"
    """Parameters, gradients and optimizer states; the optimizer step runs on the host."""


def parse_enum(kind: type[Choice], value: Any, name: str) -> Choice:
    """Return the enum member that is given itself or by its value.

    Raises:
        UsageError: there is no such member.
    """
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(f"{kind.__name__}.{item.name}" for item in kind)
        raise UsageError(f"{name} must be one of {names}; got {value!r}.") from None


_ON_HOST = {
    CPUOffload.NONE: (),
    CPUOffload.PARAMS: ("params",),
    CPUOffload.OPTIMIZER_STATES: ("states",),
    CPUOffload.FULL: ("params", "grads", "states"),
}


@dataclass(frozen=True, slots=True)
class FSDPMemoryStats:
    """Bytes of model states on one rank, between steps."""

    total_params: int
    """Parameters of the whole model."""
    param_memory_bytes: int
    grad_memory_bytes: int
    optim_memory_bytes: int
    world_size: int
    unsharded_bytes: int
    """Bytes per rank without any sharding."""
    peak_memory_mb: float = math.nan
    """Peak use since the process started, in MiB: CUDA allocator, or resident memory on CPUs; NaN in estimates."""
    allocated_mb: float = math.nan
    """Memory in use by the CUDA allocator, including activations, in MiB; NaN in estimates and on CPUs."""
    host_bytes: int = 0
    """The part of the three that is offloaded to host memory."""

    @property
    def total_bytes(self) -> int:
        """Sum of parameters, gradients and optimizer state."""
        return self.param_memory_bytes + self.grad_memory_bytes + self.optim_memory_bytes

    @property
    def device_bytes(self) -> int:
        """`total_bytes` without what is offloaded to host memory."""
        return self.total_bytes - self.host_bytes

    def total_memory_mb(self) -> float:
        """Return `total_bytes` in MiB."""
        return self.total_bytes / MIB

    @property
    def current_allocation_mb(self) -> float:
        """Memory in use now, in MiB: by the CUDA allocator; in estimates and on CPUs, `total_memory_mb()`."""
        return self.total_memory_mb() if math.isnan(self.allocated_mb) else self.allocated_mb

    def memory_savings(self) -> float:
        """Return the fraction of bytes that sharding saves, 0 to 1, padding included."""
        return 1.0 - self.total_bytes / self.unsharded_bytes if self.unsharded_bytes else 0.0


def model_states(
    shapes: Iterable[tuple[tuple[int, ...], torch.dtype] | tuple[tuple[int, ...], torch.dtype, bool]],
    strategy: ShardingStrategy,
    *,
    world_size: int,
    shard_size: int | None = None,
    rank: int = 0,
    states_per_param: float | None = None,
    state_dtype: torch.dtype | None = None,
    optimizer: OptimizerKind | Sequence[OptimizerKind] | None = None,
    cpu_offload: CPUOffload = CPUOffload.NONE,
    owned: Collection[int] | None = None,
    device_type: str = "cuda",
) -> FSDPMemoryStats:
    """Estimate the model states on one rank.

    Args:
        shapes: Shape and dtype of each parameter, and optionally whether it is trained (default True).
        strategy: What is sharded.
        world_size: Number of ranks.
        shard_size: Ranks that share one copy; None means all. For HYBRID_SHARD: the ranks of a node.
        rank: Rank among those that share one copy; rank 0 always holds the most.
        states_per_param: Elements of optimizer state per parameter element: Adam 2, SGD 1 with momentum and 0 without.
            None: determined from `optimizer`.
        state_dtype: dtype of the optimizer state; None means that of the parameter.
        optimizer: The optimizer, or that of each parameter, used if `states_per_param` is None; None means Adam.
        cpu_offload: What is kept in host memory.
        owned: The parameters whose states are on this rank, for OPTIMIZER_STATE; None: see
            `partition_parameters`.
        device_type: The ranks' compute device; on ``cpu``, offloaded gradients stay in place, padding included.

    Raises:
        UsageError: `shard_size` is missing or does not divide `world_size`, or `rank` is out of range.
    """
    if strategy is ShardingStrategy.HYBRID_SHARD and shard_size is None:
        raise UsageError("HYBRID_SHARD needs shard_size, the number of ranks that share one copy.")
    num_shards = world_size if shard_size is None else shard_size
    if world_size % num_shards:
        raise UsageError(f"shard_size must divide world_size ({world_size}); got {num_shards}.")
    if not 0 <= rank < num_shards:
        raise UsageError(f"rank must be 0 to {num_shards - 1}, as {num_shards} ranks share one copy; got {rank}.")
    table = [(shape, dtype, trained[0] if trained else True) for shape, dtype, *trained in shapes]
    zero1 = strategy is ShardingStrategy.OPTIMIZER_STATE
    if zero1 and owned is None:
        owned = partition_parameters([math.prod(shape) for shape, _, _ in table], world_size)[rank]
    num_parts = 1 if zero1 or strategy is ShardingStrategy.NO_SHARD else num_shards
    known = optimizer if isinstance(optimizer, Sequence) else [optimizer] * len(table)
    kinds = [(dtype, trained, id(one)) for (_, dtype, trained), one in zip(table, known, strict=True)]
    made = dict(zip(kinds, known, strict=True))
    widths = {kind: _state_bytes(*kind[:2], states_per_param, state_dtype, one) for kind, one in made.items()}
    copied = cpu_offload is CPUOffload.FULL and device_type != "cpu"  # without the padding
    params = grads = states = unsharded = 0
    for number, (shape, dtype, trained) in enumerate(table):
        elements = math.prod(shape)
        padded, held = _rows(shape, num_parts, rank if num_parts > 1 else 0)
        width = widths[kinds[number]]
        params += padded * dtype.itemsize
        grads += trained * (held if copied else padded) * dtype.itemsize
        states += round(held * width) if owned is None or number in owned else 0
        unsharded += (1 + trained) * elements * dtype.itemsize + round(elements * width)
    total = sum(math.prod(shape) for shape, _, _ in table)
    sizes = {"params": params, "grads": grads, "states": states}
    host = sum(sizes[role] for role in _ON_HOST[cpu_offload])
    return FSDPMemoryStats(total, params, grads, states, world_size, unsharded, host_bytes=host)


def partition_parameters(sizes: Sequence[int], world_size: int) -> list[set[int]]:
    """Assign parameters to ranks as ZeroRedundancyOptimizer does: largest first, to the rank with the least so far.

    Args:
        sizes: Elements of each parameter, in the order of the optimizer's only parameter group.
        world_size: Number of ranks.

    Returns:
        For each rank, the indices of its parameters in `sizes`.
    """
    ranks: list[set[int]] = [set() for _ in range(world_size)]
    loads = [0] * world_size
    for number in sorted(range(len(sizes)), key=lambda index: sizes[index], reverse=True):
        least = loads.index(min(loads))
        ranks[least].add(number)
        loads[least] += sizes[number]
    return ranks


def _rows(shape: tuple[int, ...], num_parts: int, rank: int) -> tuple[int, int]:
    """Return the number of elements of one rank's shard: with padding, and without."""
    # As `torch.chunk`: equal parts of the first dimension, except for the last ones. A scalar counts as one row.
    rows = shape[0] if shape else 1
    if not rows:
        return 0, 0
    width = math.prod(shape) // rows
    step = -(-rows // num_parts)
    return step * width, max(0, min(rows, (rank + 1) * step) - rank * step) * width


def _state_bytes(
    dtype: torch.dtype,
    trained: bool,
    states_per_param: float | None,
    state_dtype: torch.dtype | None,
    optimizer: OptimizerKind | None,
) -> float:
    if states_per_param is None and state_dtype is None:
        return float((optimizer or OptimizerKind()).bytes_per_element(dtype, trained=trained))
    elements = 2.0 if states_per_param is None else states_per_param
    return trained * elements * (dtype if state_dtype is None else state_dtype).itemsize


def measure_model_states(
    parameters: Iterable[torch.Tensor],
    optimizer: Optimizer | None,
    *,
    estimate: FSDPMemoryStats,
    cpu_offload: CPUOffload,
    device: torch.device,
) -> FSDPMemoryStats:
    """Measure the bytes of these tensors on this rank now.

    Args:
        parameters: The model's parameters; their gradients are included.
        optimizer: The optimizer whose states to measure; None: no states.
        estimate: The estimate for the same model; supplies the fields that are not measured.
        cpu_offload: What is offloaded; used on CPU ranks only, where everything is in host memory.
        device: The rank's compute device.
    """
    held = list(parameters)
    storages = {
        "params": _storages(held),
        "grads": _storages([parameter.grad for parameter in held if parameter.grad is not None]),
        "states": _storages(optimizer_states(optimizer)),
    }
    sizes = {role: sum(storage.nbytes() for storage in group) for role, group in storages.items()}
    if device.type == "cpu":
        host = sum(sizes[role] for role in _ON_HOST[cpu_offload])
    else:
        host = sum(item.nbytes() for group in storages.values() for item in group if item.device.type == "cpu")
    return replace(
        estimate,
        param_memory_bytes=sizes["params"],
        grad_memory_bytes=sizes["grads"],
        optim_memory_bytes=sizes["states"],
        host_bytes=host,
        peak_memory_mb=_peak_mb(device),
        allocated_mb=torch.cuda.memory_allocated(device) / MIB if device.type == "cuda" else math.nan,
    )


def _storages(tensors: Iterable[Any]) -> list[torch.UntypedStorage]:
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        # The gradients of a unit are views into the output of one reduce-scatter.
        storage = local.untyped_storage()
        storages[storage.data_ptr()] = storage
    return list(storages.values())


def _peak_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)) / MIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer that has not been created yet."""

    make: Callable[..., Optimizer] = torch.optim.Adam
    """Class of the optimizer."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the optimizer."""

    def bytes_per_element(self, dtype: torch.dtype, *, trained: bool = True) -> int:
        """Return the bytes of state per element of a parameter of this dtype, from one step on a tiny parameter.

        Parameters that are not trained have no state, except with optimizers that create it at once, such as Adagrad.
        Values per parameter, such as Adam's step count, are not included.

        Raises:
            UsageError: the states and parameters have different shapes, or a step needs more than gradients.
        """
        probe = nn.Parameter(torch.zeros(_PROBE, dtype=dtype, device="cpu"))
        probe.grad = torch.ones_like(probe) if trained else None
        # Options that only choose an implementation change no state, but need devices that the probe is not on.
        options = {name: value for name, value in self.options.items() if name not in _IMPLEMENTATION_OPTIONS}
        optimizer = self.make([probe], **options)
        # Not `optimizer.step()`: code that counts optimizer steps must not count this one.
        step = type(optimizer).step
        try:
            getattr(step, "__wrapped__", step)(optimizer)
        except TypeError as error:
            raise UsageError(f"{type(optimizer).__name__} needs more than gradients for a step; {_HINT}") from error
        states = [state for state in optimizer.state[probe].values() if isinstance(state, torch.Tensor) and state.ndim]
        if any(tuple(state.shape) != _PROBE for state in states):
            raise UsageError(f"{type(optimizer).__name__} has states and parameters of different shapes; {_HINT}")
        return sum(state.itemsize for state in states)


def local_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that holds the states: for ZeroRedundancyOptimizer, its local one."""
    inner: Optimizer = getattr(optimizer, "optim", optimizer)
    return inner


def optimizer_states(optimizer: Optimizer | None) -> list[torch.Tensor]:
    """Return the states that an optimizer holds on this rank, except scalars."""
    if optimizer is None:
        return []
    inner = local_optimizer(optimizer)
    values = [value for state in inner.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, torch.Tensor) and value.ndim > 0]


def matches(module: nn.Module, kinds: ModuleKinds) -> bool:
    """Whether `module` is selected by `kinds`."""
    if isinstance(kinds, type | tuple):
        return isinstance(module, kinds)
    return bool(kinds(module))


def checkpoint_blocks(model: nn.Module, kinds: ModuleKinds, *, every: int = 1, **options: Any) -> int:
    """Store only the inputs of these blocks for backward: less memory for about a third more time.

    Gradients are unchanged, even where random numbers are drawn. The blocks keep their places, classes and parameter
    names (torch's `checkpoint_wrapper` changes these). FSDP, DDP and tensor parallelism can be applied before or after.

    Args:
        model: The model; changed in place.
        kinds: The blocks, by class or by a function. Of nested blocks, the outer one is chosen.
        every: 1 selects all blocks, 2 every second one starting with the first, and so on.
        options: Options of `torch.utils.checkpoint.checkpoint`, such as `preserve_rng_state`.

    Returns:
        The number of checkpointed blocks.

    Raises:
        UsageError: no block matches, `every` is below 1, or a block is already checkpointed.
    """
    if every < 1:
        raise UsageError(f"every must be at least 1; got {every}. (1: all blocks, 2: every second one.)")
    blocks = _blocks(model, kinds)
    if not blocks:
        classes = ", ".join(sorted({type(inner).__name__ for inner in model.modules() if inner is not model}))
        raise UsageError(
            f"No module of {type(model).__name__} matches kinds={kinds!r}; it contains {classes or 'no modules'}."
        )
    selected = list(blocks.items())[::every]
    for name, block in selected:
        if "forward" in vars(block):
            raise UsageError(f"{name} already has its own forward; call checkpoint_blocks only once per block.")
    for _, block in selected:
        # Set on the instance, so that hooks such as FSDP's stay outside: a unit is gathered once for both forwards.
        vars(block)["forward"] = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)
    return len(selected)


def _blocks(module: nn.Module, kinds: ModuleKinds, prefix: str = "") -> dict[str, nn.Module]:
    blocks: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        blocks |= {prefix + name: child} if matches(child, kinds) else _blocks(child, kinds, f"{prefix}{name}.")
    return blocks
