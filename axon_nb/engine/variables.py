"""Variables of the rank's namespace: taken from the notebook, and given to it.

Where both are on one host they travel in a `host.parcels` parcel of the notebook's, else in messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from axon_nb.engine.parcel_pickle import pack, unpack
from axon_nb.engine.session import current
from axon_nb.engine.whole import as_arrays, local_value, portable, split_over, whole_value
from axon_nb.errors import UsageError
from axon_nb.host.free_memory import free_memory
from axon_nb.host.parcels import BlockAddress, block_size, join_parts, read_block, split_parts, write_block
from axon_nb.records.quantity import format_bytes
from axon_nb.records.ranks import format_ranks

__all__ = ["OtherRanks", "give", "last_value", "put", "take", "take_offer"]

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
    session.extras.pop("offer", None)
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
        session.extras["offer"] = join_parts(parts)
        return
    size, free = block_size(parts), free_memory()
    if free is not None and size > free:
        raise UsageError(f"it takes {format_bytes(size)}, and {format_bytes(free)} of memory are free: take a part")
    write_block(address, parts, writers=sum(place is not None for place in addresses.values()))


def take_offer() -> bytes:
    """What `give` has kept, once; empty when it was another rank that gave it."""
    return bytes(current().extras.pop("offer", b""))


def last_value(token: str, address: BlockAddress | None) -> tuple[bytes | None, str]:
    """The value of a cell's last expression, and its text for where it cannot be loaded.

    Args:
        token: The cell's.
        address: The notebook's parcel for a large value; None: there is none.

    Returns:
        The bytes of its parts; None: they are in the parcel; empty: it does not pickle, and there is the text alone.
    """
    value = portable(current().extras["runner"].take_value(token))
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
