"""Variables of the rank's namespace: taken from the notebook, and given to it.

Where both are on one host they travel in a `host.parcels` parcel of the notebook's, else in messages.

Values made fit to travel: split tensors put together, everything on the CPU, without history of autograd.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from axon_nb.engine.session import current
from axon_nb.engine.sharding.sharded import is_dtensor, is_sharded
from axon_nb.engine.transfer.value_pickle import pack, unpack
from axon_nb.errors import UsageError
from axon_nb.host.resources import free_memory
from axon_nb.host.shared_memory import BlockAddress, block_size, join_parts, read_block, split_parts, write_block
from axon_nb.records.ranks import format_ranks
from axon_nb.records.units import format_bytes

__all__ = [
    "OtherRanks",
    "as_arrays",
    "give",
    "last_value",
    "local_value",
    "portable",
    "put",
    "split_over",
    "take",
    "take_offer",
    "whole_value",
]


def _convert(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The value with each tensor changed that is in it, in its dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        changed = {key: _convert(item, change) for key, item in value.items()}
        if type(value) is dict:
            return changed
        made = copy.copy(value)  # such as a state_dict, which carries versions besides its entries
        made.update(changed)
        return made
    if type(value) in (list, tuple):
        return type(value)(_convert(item, change) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(_convert(item, change) for item in value)
    return value


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def split_over(value: Any) -> set[int]:
    """The ranks that hold parts of the distributed tensors in a value; empty when each rank has all of it.

    Raises:
        UsageError: a module or an optimizer with such tensors inside: it cannot leave its ranks as an object.
    """
    found: set[int] = set()
    inside: list[Any] = []
    if isinstance(value, torch.nn.Module):
        inside = [*value.parameters(), *value.buffers()]
    elif isinstance(value, torch.optim.Optimizer):
        inside = [parameter for group in value.param_groups for parameter in group["params"]]
    if (is_sharded(value) and not is_dtensor(value)) or any(map(is_dtensor, inside)):
        raise UsageError("a module or optimizer that is split over ranks stays there: take its state_dict()")
    for tensor in _tensors(value):
        if is_dtensor(tensor) and not all(placement.is_replicate() for placement in tensor.placements):
            found.update(int(rank) for rank in tensor.device_mesh.mesh.flatten().tolist())
    return found


def whole_value(value: Any, *, keep: bool) -> Any:
    """The value with its distributed tensors whole, on the CPU; collective over the ranks that hold parts.

    Args:
        value: What `split_over` was asked of.
        keep: Whether this rank needs the result; elsewhere each tensor is let go of before the next is put together.
    """

    def change(tensor: Any) -> Any:
        full = tensor.detach().full_tensor() if is_dtensor(tensor) else tensor.detach()
        return full.cpu() if keep else None

    return _convert(value, change)


def _local(tensor: Any) -> Any:
    return tensor.to_local() if is_dtensor(tensor) else tensor


def local_value(value: Any) -> Any:
    """The value with this rank's own parts in the place of distributed tensors."""
    return _convert(value, _local)


def portable(value: Any) -> Any:
    """The value with its tensors on the CPU and without history."""
    return _convert(value, lambda tensor: tensor.detach().cpu())


def as_arrays(value: Any) -> Any:
    """The value with NumPy arrays in the place of tensors; bfloat16 and float8, which NumPy lacks, become float32."""

    def change(tensor: torch.Tensor) -> Any:
        dense = tensor.detach().cpu().resolve_conj().resolve_neg()
        known = dense.dtype.itemsize > 2 or not dense.is_floating_point() or dense.dtype is torch.float16
        return (dense if known else dense.float()).numpy()

    return _convert(value, change)


_WITHIN = 64 << 10
"""A cell's value of fewer bytes travels in the reply itself."""


class OtherRanks(Exception):
    """The value is split over ranks that were not asked; the message names all that are needed."""


def take(addresses: Mapping[int, BlockAddress]) -> None:
    """Set the variables in the notebook's shared block for this rank."""
    put(read_block(addresses[current().config.rank]))


def put(parts: Any) -> None:
    """Set variables.

    Args:
        parts: A packed dictionary: its parts, or their bytes as `join_parts` makes them.
    """
    variables = unpack(parts if isinstance(parts, list) else split_parts(bytearray(parts)))
    current().kernel.shell.user_ns.update(variables)


def give(
    expression: str,
    addresses: Mapping[int, BlockAddress | None],
    ranks: Sequence[int],
    *,
    shards: bool = False,
    arrays: bool = False,
) -> None:
    """Hand the value of a name or expression to the notebook.

    Args:
        expression: What is evaluated here.
        addresses: The ranks that were asked, each with the parcel that it fills; None: it keeps the bytes for
            `take_offer`.
        ranks: The ranks that run this.
        shards: Whether of a distributed tensor each rank gives its own part; else the first of them gives the whole
            one, and the others nothing.
        arrays: Whether tensors become NumPy arrays.

    Raises:
        OtherRanks: see there.
        UsageError: it cannot be given; reads after the ranks' names.
    """
    session = current()
    own = session.config.rank
    session.offer = b""
    value = eval(expression, session.kernel.shell.user_ns)
    parts: list[Any] = []
    holders = split_over(value) if not shards else set()
    if holders and not holders & set(addresses):
        raise UsageError(f"it is split over ranks {format_ranks(holders)}: ask one of those")
    if holders - set(ranks):
        raise OtherRanks(format_ranks(holders | set(ranks)))
    if holders:
        giver = min(holders & set(addresses))
        value = whole_value(value, keep=own == giver)
        if own != giver:
            addresses = {rank: address for rank, address in addresses.items() if rank != own}
    if own not in addresses:
        return
    value = portable(local_value(value))
    parts = pack(as_arrays(value) if arrays else value)
    address = addresses[own]
    if address is None:
        session.offer = join_parts(parts)
        return
    size, free = block_size(parts), free_memory()
    if free is not None and size > free:
        raise UsageError(f"it takes {format_bytes(size)}, and {format_bytes(free)} of memory are free: take a part")
    write_block(address, parts, writers=sum(place is not None for place in addresses.values()))


def take_offer() -> bytes:
    """What `give` has kept, once; empty when it was another rank that gave it."""
    session = current()
    kept, session.offer = bytes(session.offer), b""
    return kept


def last_value(token: str, address: BlockAddress | None) -> tuple[bytes | None, str]:
    """The value of a cell's last expression, and its text for where it cannot be loaded.

    Args:
        token: The cell's.
        address: The notebook's parcel for a large value; None: there is none.

    Returns:
        The bytes of its parts; None: they are in the parcel; empty: it does not pickle, and there is the text alone.
    """
    value = portable(current().runner.take_value(token))
    try:
        parts = pack(value)
    except Exception:
        return b"", repr(value)
    text = "" if _plain(value) else repr(value)
    if address is None or block_size(parts) < _WITHIN:
        return bytes(join_parts(parts)), text
    write_block(address, parts)
    return None, text


def _plain(value: Any) -> bool:
    """Whether any Python with our dependencies loads it: numbers, texts, tensors, arrays, and containers of them."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype)):
        return True
    if type(value) in (list, tuple, set):
        return all(map(_plain, value))
    if type(value) is dict:
        return all(_plain(key) and _plain(item) for key, item in value.items())
    return type(value) is torch.Tensor or type(value).__module__ == "numpy"
