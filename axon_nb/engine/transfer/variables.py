"""Variables of the rank's namespace: received from the notebook and sent to it, or copied in place to all other ranks.

On one host they travel in a shared-memory block of the notebook (`host.shared_memory`), otherwise in messages; one rank
of another host then holds what others there read. Before a transfer, sharded tensors are gathered; the pickle moves
everything to the CPU, without autograd history. Models, optimizers and schedulers of one rank are broadcast in place:
whatever holds them stays usable.
"""

from __future__ import annotations

import copy
import hashlib
import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from axon_nb.engine.session import current, user_variables
from axon_nb.engine.sharding import is_dtensor, is_sharded, is_stage, local_shard, unreplicated_reason
from axon_nb.errors import UsageError
from axon_nb.host import shared_memory
from axon_nb.host.resources import free_memory
from axon_nb.records.protocol.transfer import SyncRecord, Undelivered
from axon_nb.records.ranks import name_ranks
from axon_nb.records.units import format_bytes
from axon_nb.shell.value_pickle import cannot_pickle, is_dense, pack, unpack

_MAX_INLINE_BYTES = 64 << 10
"""A smaller value of a cell travels in the reply itself."""
_KINDS = {"module": torch.nn.Module, "optimizer": Optimizer, "scheduler": LRScheduler}
_CHUNK_BYTES = 64 << 20


def _convert(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return the value with `change` applied to each tensor in it, in its dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        changed = {key: _convert(item, change) for key, item in value.items()}
        if type(value) is dict:
            return changed
        converted = copy.copy(value)  # such as a state_dict, which carries versions besides its entries
        converted.update(changed)
        return converted
    if type(value) in (list, tuple):
        return type(value)(_convert(item, change) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(_convert(item, change) for item in value)
    return value


def _tensors(value: Any, within: tuple[int, ...] = ()) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)) and id(value) not in within:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item, (*within, id(value)))


def sharded_over(value: Any) -> set[int]:
    """Return the ranks that hold shards of the distributed tensors in a value; empty if each rank has all of it.

    Raises:
        UsageError: a module or an optimizer with such tensors, which cannot leave its ranks as an object.
    """
    ranks: set[int] = set()
    contents: list[Any] = []
    if isinstance(value, torch.nn.Module):
        contents = [*value.parameters(), *value.buffers()]
    elif isinstance(value, torch.optim.Optimizer):
        contents = [parameter for group in value.param_groups for parameter in group["params"]]
    if (is_sharded(value) and not is_dtensor(value)) or any(map(is_dtensor, contents)):
        raise UsageError("a sharded module or optimizer cannot leave its ranks; pull its state_dict()")
    if isinstance(value, DistributedDataParallel):
        raise UsageError("a DDP model needs its process group, which only ranks have; pull its `.module`")
    for tensor in _tensors(value):
        if is_dtensor(tensor) and not all(placement.is_replicate() for placement in tensor.placements):
            ranks.update(int(rank) for rank in tensor.device_mesh.mesh.flatten().tolist())
    return ranks


def gather_full(value: Any, *, keep: bool) -> Any:
    """Return the value with its distributed tensors gathered, on the CPU; collective over the ranks of `sharded_over`.

    Args:
        value: A value with distributed tensors.
        keep: Whether this rank needs the result. If not, each tensor is freed before the next one is gathered.
    """

    def change(tensor: Any) -> Any:
        full = tensor.detach().full_tensor() if is_dtensor(tensor) else tensor.detach()
        return full.cpu() if keep else None

    return _convert(value, change)


def _local(tensor: Any) -> Any:
    return tensor.to_local() if is_dtensor(tensor) else tensor


def to_local(value: Any) -> Any:
    """Return the value with this rank's shards in place of distributed tensors."""
    return _convert(value, _local) if any(map(is_dtensor, _tensors(value))) else value


def to_numpy(value: Any) -> Any:
    """Return the value with NumPy arrays in place of tensors; bfloat16 and float8, unknown to NumPy, become float32.

    Raises:
        UsageError: NumPy has no array for a tensor.
    """

    def change(tensor: torch.Tensor) -> Any:
        if not is_dense(tensor):
            kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else tensor.device.type
            kind = str(tensor.layout).removeprefix("torch.") if tensor.layout is not torch.strided else kind
            raise UsageError(f"a tensor of this kind ({kind}) has no NumPy form; fetch it without --numpy")
        dense = tensor.detach().cpu().resolve_conj().resolve_neg()
        has_numpy_dtype = dense.dtype.itemsize > 2 or not dense.is_floating_point() or dense.dtype is torch.float16
        return (dense if has_numpy_dtype else dense.float()).numpy()

    return _convert(value, change)


def receive_block(addresses: Mapping[int, shared_memory.BlockAddress]) -> Undelivered | None:
    """Set the variables that a shared-memory block on this host holds for this rank."""
    try:
        parts = shared_memory.read_block(addresses[current().config.rank])
    except shared_memory.SharedBlockUnavailableError:
        return Undelivered()
    set_variables(parts)
    return None


def hold_block(parts: Any) -> shared_memory.BlockAddress | None:
    """Hold packed variables in shared memory for the ranks of this host; return where, or None without shared memory.

    Args:
        parts: Their bytes from `join_parts`.
    """
    release_block()
    if not shared_memory.memfd_supported():
        return None
    block = current().held_block = shared_memory.SharedBlock()
    block.write(shared_memory.split_parts(parts))
    return block.address


def release_block() -> None:
    """Free what `hold_block` holds."""
    block, current().held_block = current().held_block, None
    if block is not None:
        block.close()


def set_variables(parts: Any) -> None:
    """Set variables.

    Args:
        parts: A packed dictionary: its parts, or their bytes from `join_parts`.
    """
    variables = unpack(parts if isinstance(parts, list) else shared_memory.split_parts(bytearray(parts)))
    current().kernel.shell.user_ns.update(variables)


def send_value(
    expression: str,
    addresses: Mapping[int, shared_memory.BlockAddress | None],
    ranks: Sequence[int],
    *,
    shards: bool = False,
    arrays: bool = False,
    as_is: bool = False,
) -> Undelivered | None:
    """Send the value of a name or expression to the notebook.

    Args:
        expression: The expression to evaluate here.
        addresses: The ranks whose value is requested, each with the block that it fills; None: the rank keeps the bytes
            for `take_pending_value`.
        ranks: The ranks that run this.
        shards: Whether each rank sends its own shard of a distributed tensor. If not, the first of `addresses` that
            holds a shard sends the full tensor, and the others send nothing.
        arrays: Whether to convert tensors to NumPy arrays.
        as_is: Whether arrays of other libraries on a device, such as CuPy's, stay such arrays.

    Returns:
        Why the value was not sent although it can be; None: it was, or this rank sends none.

    Raises:
        UsageError: it cannot be sent; the message follows the rank and a colon.
    """
    session = current()
    self_rank = session.config.rank
    session.pending_value = b""
    value = eval(expression, session.kernel.shell.user_ns)
    parts: list[Any] = []
    holders = sharded_over(value) if not shards else set()
    if holders and not holders & set(addresses):
        raise UsageError(f"it is sharded over {name_ranks(holders)}; pull it from one of those")
    if holders - set(ranks):
        return Undelivered(needed=tuple(sorted(holders | set(ranks))))
    if holders:
        sender = min(holders & set(addresses))
        value = gather_full(value, keep=self_rank == sender)
        if self_rank != sender:
            addresses = {rank: address for rank, address in addresses.items() if rank != self_rank}
    if self_rank not in addresses:
        return None
    value = to_local(value)
    value = to_numpy(value) if arrays else value
    try:
        parts = pack(value, as_is=as_is)
    except Exception as error:  # whatever an odd object raises
        raise UsageError(cannot_pickle(error)) from None
    address = addresses[self_rank]
    if address is None:
        session.pending_value = shared_memory.join_parts(parts)
        return None
    size, free = shared_memory.block_size(parts), free_memory()
    if free is not None and size > free:
        raise UsageError(f"it needs {format_bytes(size)} but only {format_bytes(free)} is free; pull part of it")
    try:
        shared_memory.write_block(address, parts, writers=sum(other is not None for other in addresses.values()))
    except shared_memory.SharedBlockUnavailableError:
        return Undelivered()
    return None


def take_pending_value() -> bytes:
    """Return the bytes that `send_value` has kept, once; empty if another rank sent the value."""
    session = current()
    value, session.pending_value = bytes(session.pending_value), b""
    return value


def last_value(token: str, address: shared_memory.BlockAddress | None) -> tuple[bytes | None, str]:
    """Return the value of a cell's last expression, and its text in case it cannot be loaded.

    Args:
        token: The token of the cell.
        address: The notebook's shared-memory block for a large value; None if there is none.

    Returns:
        The bytes of its parts; None: they are in the block; empty: it does not pickle, and there is only the text.
    """
    value = current().runner.take_value(token)
    try:
        parts = pack(value)
    except Exception:
        return b"", repr(value)
    text = "" if _plain(value) else repr(value)
    if address is None or shared_memory.block_size(parts) < _MAX_INLINE_BYTES:
        return bytes(shared_memory.join_parts(parts)), text
    shared_memory.write_block(address, parts)
    return None, text


def _plain(value: Any) -> bool:
    """Whether any Python with our dependencies can load it: numbers, text, tensors, arrays, and containers of them."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype)):
        return True
    if type(value) in (list, tuple, set):
        return all(map(_plain, value))
    if type(value) is dict:
        return all(_plain(key) and _plain(item) for key, item in value.items())
    return type(value) is torch.Tensor or type(value).__module__ == "numpy"


def describe_models(names: Sequence[str] = ()) -> dict[str, SyncRecord]:
    """Describe what could be copied to or from this rank, by name of the variable.

    Args:
        names: Which variables; empty: all modules, optimizers and schedulers.
    """
    variables = {name: value for name, value in _model_variables() if not names or name in names}
    parts = {
        name: {id(tensor) for tensor in _model_tensors(value)} for name, value in variables.items() if _kind(value)
    }
    records: dict[str, SyncRecord] = {}
    for name, value in variables.items():
        kind = _kind(value)
        if not kind:
            if name in names:
                records[name] = SyncRecord("", obstacle="is not a module, optimizer or scheduler")
            continue
        earlier = (
            other for other, record in records.items() if record.kind == kind == "module" and not record.contained_in
        )
        contained_in = next((other for other in earlier if parts[name] <= parts[other]), "") if parts[name] else ""
        records[name] = SyncRecord(
            kind,
            digest=_digest(value),
            bytes=sum(tensor.nbytes for tensor in map(local_shard, _model_tensors(value))) if not _lazy(value) else 0,
            obstacle=_copy_obstacle(value),
            contained_in=contained_in,
        )
    return records


def broadcast_models(source: int, names: Sequence[str]) -> None:
    """Copy these variables of rank `source` to all others; collective over all ranks, which all have them."""
    variables = dict(_model_variables())
    for name in names:
        value = variables[name]
        if isinstance(value, torch.nn.Module):
            for tensor in _model_tensors(value):
                _broadcast(local_shard(tensor), source)
        else:
            _share_state(value, source)


def _model_variables() -> Iterator[tuple[str, Any]]:
    variables = user_variables(current().kernel.shell)
    yield from sorted(variables.items(), key=lambda item: (not _wraps(item[1]), item[0]))


def _wraps(value: Any) -> bool:
    # A wrapper comes before its content: `model = DDP(net)` is reported, and `net` is copied with it.
    return issubclass(type(value), torch.nn.parallel.DistributedDataParallel)


def _kind(value: Any) -> str:
    # type() and not isinstance: lazy proxies answer the latter with side effects.
    return next((name for name, kind in _KINDS.items() if issubclass(type(value), kind)), "")


def _model_tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.nn.Module):
        return [*value.parameters(), *value.buffers()]
    if isinstance(value, Optimizer):
        return [parameter for group in value.param_groups for parameter in group["params"]]
    return []


def _lazy(value: Any) -> bool:
    return any(torch.nn.parameter.is_lazy(tensor) or tensor.is_meta for tensor in _model_tensors(value))


def _copy_obstacle(value: Any) -> str:
    if is_stage(value):
        return "is a pipeline stage"
    if is_sharded(value):
        return "is sharded over ranks"
    if _lazy(value):
        return "has parameters without values yet"
    zero = getattr(sys.modules.get("torch.distributed.optim"), "ZeroRedundancyOptimizer", None)
    if zero is not None and issubclass(type(value), zero):
        return "has its state sharded over ranks"
    return unreplicated_reason(_model_tensors(value))


def _digest(value: Any) -> str:
    shapes = [type(value).__qualname__]
    shapes += [f"{tuple(tensor.shape)}{tensor.dtype}" for tensor in _model_tensors(value) if not _lazy(value)]
    return hashlib.sha256("\n".join(shapes).encode()).hexdigest()[:16]


def _broadcast(tensor: torch.Tensor, source: int) -> None:
    """Broadcast in place, as bytes, because Gloo lacks some dtypes."""
    dense = tensor.detach().to(_transfer_device(tensor)).contiguous()
    buffer = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)  # one element may have any stride
    for chunk in buffer.split(_CHUNK_BYTES):
        dist.broadcast(chunk, source)
    if current().config.rank != source:
        tensor.copy_(buffer.view(tensor.dtype).reshape(tensor.shape))


def _transfer_device(tensor: torch.Tensor) -> torch.device:
    return current().device if dist.get_backend() == "nccl" else tensor.device


def _share_state(value: Any, source: int) -> None:
    is_source, steps = current().config.rank == source, current().steps
    counts_steps = isinstance(value, Optimizer)
    size = torch.zeros(1, dtype=torch.int64, device="cpu")
    payload = torch.empty(0, dtype=torch.uint8, device="cpu")
    if is_source:
        file = io.BytesIO()
        torch.save({"state": value.state_dict(), "steps": steps.of(value) if counts_steps else 0}, file)
        payload = torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)
        size[0] = payload.numel()
    _broadcast(size, source)
    if not is_source:
        payload = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    _broadcast(payload, source)
    if is_source:
        return
    # Weights only: the content is numbers, and Gloo's connections are not authenticated.
    content = torch.load(io.BytesIO(payload.numpy().tobytes()), map_location="cpu", weights_only=True)
    value.load_state_dict(content["state"])
    if counts_steps:
        steps.set(value, content["steps"])
