"""Variables of the rank's namespace: received from the notebook, and sent to it.

On one host they travel in a shared-memory block of the notebook (`host.shared_memory`), otherwise in messages; one rank
of another host then holds what others there read. Before a
transfer, sharded tensors are gathered; the pickle moves everything to the CPU, without autograd history.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from axon_nb.engine.session import current
from axon_nb.engine.sharding.sharded import is_dtensor, is_sharded
from axon_nb.errors import UsageError
from axon_nb.host.resources.cgroups import free_memory
from axon_nb.host.shared_memory import (
    BlockAddress,
    SharedBlock,
    SharedBlockUnavailableError,
    block_size,
    join_parts,
    memfd_supported,
    read_block,
    split_parts,
    write_block,
)
from axon_nb.records.protocol.transfer import Undelivered
from axon_nb.records.ranks import name_ranks
from axon_nb.records.units import format_bytes
from axon_nb.shell.value_pickle import cannot_pickle, is_dense, pack, unpack

_MAX_INLINE_BYTES = 64 << 10
"""A smaller value of a cell travels in the reply itself."""


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


def receive_block(addresses: Mapping[int, BlockAddress]) -> Undelivered | None:
    """Set the variables that a shared-memory block on this host holds for this rank."""
    try:
        parts = read_block(addresses[current().config.rank])
    except SharedBlockUnavailableError:
        return Undelivered()
    set_variables(parts)
    return None


def hold_block(parts: Any) -> BlockAddress | None:
    """Hold packed variables in shared memory for the ranks of this host; return where, or None without shared memory.

    Args:
        parts: Their bytes from `join_parts`.
    """
    release_block()
    if not memfd_supported():
        return None
    block = current().held_block = SharedBlock()
    block.write(split_parts(parts))
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
    variables = unpack(parts if isinstance(parts, list) else split_parts(bytearray(parts)))
    current().kernel.shell.user_ns.update(variables)


def send_value(
    expression: str,
    addresses: Mapping[int, BlockAddress | None],
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
        session.pending_value = join_parts(parts)
        return None
    size, free = block_size(parts), free_memory()
    if free is not None and size > free:
        raise UsageError(f"it needs {format_bytes(size)} but only {format_bytes(free)} is free; pull part of it")
    try:
        write_block(address, parts, writers=sum(other is not None for other in addresses.values()))
    except SharedBlockUnavailableError:
        return Undelivered()
    return None


def take_pending_value() -> bytes:
    """Return the bytes that `send_value` has kept, once; empty if another rank sent the value."""
    session = current()
    value, session.pending_value = bytes(session.pending_value), b""
    return value


def last_value(token: str, address: BlockAddress | None) -> tuple[bytes | None, str]:
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
    if address is None or block_size(parts) < _MAX_INLINE_BYTES:
        return bytes(join_parts(parts)), text
    write_block(address, parts)
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
