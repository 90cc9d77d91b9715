"""Transfers of values: between the notebook and ranks, and from rank to rank."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from axon_nb.records.protocol.wire import Packed, RankCall

Address = tuple[tuple[str, int], tuple[str, int]]
"""A shared-memory block of the notebook or of another rank, as `host.shared_memory.BlockAddress`."""


class Undelivered(Struct, frozen=True):
    """A rank can transfer a value, but not in this way."""

    needed: tuple[int, ...] = ()
    """The ranks that must take part, because it is distributed over them; empty: the rank cannot open its block."""


class ReceiveValues(RankCall[Undelivered | None], frozen=True):
    """In a cell: set the variables that shared-memory blocks on the rank's host hold."""

    target = "axon_nb.engine.transfer.variables:receive_block"
    addresses: Mapping[int, Address]
    """By rank."""


class SendValue(RankCall[Undelivered | None], frozen=True):
    """In a cell: write an expression's value into the notebook's shared memory, or keep it for `TakePendingValue`."""

    target = "axon_nb.engine.transfer.variables:send_value"
    expression: str
    addresses: Mapping[int, Address | None]
    """The ranks whose value is requested, each with its block; None: the rank keeps the bytes."""
    ranks: tuple[int, ...]
    """The ranks that run this."""
    shards: bool = False
    """Whether each rank sends its own shard of a distributed tensor; else one of them sends the full tensor."""
    arrays: bool = False
    """Whether to convert tensors to NumPy arrays."""
    as_is: bool = False
    """Whether arrays of other libraries on a device stay such arrays."""


class SetVariables(RankCall[None], frozen=True):
    """Set variables on a rank that shares no memory with the notebook."""

    target = "axon_nb.engine.transfer.variables:set_variables"
    parts: Packed
    """Bytes, as `join_parts` makes them."""


class HoldValues(RankCall[Address | None], frozen=True):
    """Hold variables in shared memory for the ranks of this host; None: it has no shared memory."""

    target = "axon_nb.engine.transfer.variables:hold_block"
    parts: Packed
    """Bytes, as `join_parts` makes them."""


class ReleaseValues(RankCall[None], frozen=True):
    """Free what `HoldValues` holds."""

    target = "axon_nb.engine.transfer.variables:release_block"


class TakePendingValue(RankCall[Packed], frozen=True):
    """Fetch the bytes that `SendValue` kept, once; empty if another rank sent the value."""

    target = "axon_nb.engine.transfer.variables:take_pending_value"


class LastValue(RankCall[tuple[Packed, str]], frozen=True):
    """Fetch the value of a cell's last expression: its bytes, and its text in case it cannot be loaded.

    The bytes are None if they are in the shared-memory block, and empty if the value does not pickle.
    """

    target = "axon_nb.engine.transfer.variables:last_value"
    token: str
    """The cell's."""
    address: Address | None
    """A block for a large value; None if there is none."""


class ListGroupVariables(RankCall[dict[str, str]], frozen=True):
    """List the variables that are process groups, with the names of the groups."""

    target = "axon_nb.engine.transfer.namespace:group_variables"


class PackedNamespace(Struct, frozen=True):
    """The packed variables of a rank, without the payload."""

    copied: tuple[str, ...]
    """Names."""
    skipped: Mapping[str, str]
    """By name, why it cannot be copied; reads after the name."""
    size: int
    """Bytes."""
    digest: str
    """SHA-256, because Gloo's connections are not authenticated."""


class PackNamespace(RankCall[PackedNamespace], frozen=True):
    """Pack variables for `SendNamespace`."""

    target = "axon_nb.engine.transfer.namespace:pack"
    names: tuple[str, ...] = ()
    """Which; empty: all that can be copied."""


class SendNamespace(RankCall[None], frozen=True):
    """Send the payload of `PackNamespace` to ranks that are in `ReceiveNamespace`."""

    target = "axon_nb.engine.transfer.namespace:send"
    ranks: tuple[int, ...]


class ReceiveNamespace(RankCall[None], frozen=True):
    """Receive the payload from a rank that is in `SendNamespace`."""

    target = "axon_nb.engine.transfer.namespace:receive"
    source: int
    size: int
    digest: str
    groups: Mapping[str, str]
    """Variables that are process groups, with the names of the groups."""


class SyncRecord(Struct, frozen=True):
    """A model, optimizer or scheduler that could be copied to other ranks."""

    kind: str
    """``module``, ``optimizer`` or ``scheduler``; empty for another variable that was named."""
    digest: str = ""
    """Of its tensors' shapes; equal if a copy fits."""
    bytes: int = 0
    obstacle: str = ""
    """Why it cannot be copied; reads after its name. Empty if it can be."""
    contained_in: str = ""
    """A variable that holds the same tensors; empty if there is none."""


class DescribeModels(RankCall[dict[str, SyncRecord]], frozen=True):
    """In a cell: describe models, optimizers and schedulers by variable."""

    target = "axon_nb.engine.transfer.variables:describe_models"
    names: tuple[str, ...] = ()
    """Which; empty: all."""


class BroadcastModels(RankCall[None], frozen=True):
    """In a cell: copy variables of one rank to all others; collective over all ranks."""

    target = "axon_nb.engine.transfer.variables:broadcast_models"
    source: int
    names: tuple[str, ...]


class Seed(RankCall[int], frozen=True):
    """In a cell: seed the random generators; returns the rank's seed."""

    target = "axon_nb.engine.kernel.cells:seed"
    value: int
    per_rank: bool = False
    """Whether each rank adds its number."""


class SavedSession(Struct, frozen=True):
    """What was written of a session."""

    bytes: int
    """By all ranks, without the checkpoints of models."""
    models: tuple[str, ...]
    """The models that any number of ranks can load."""
    left_out: Mapping[str, str]
    """By variable of this rank, why it was not written; reads after its name."""
    not_portable: Mapping[str, str]
    """By model, why only as many ranks can load it."""


class SaveSession(RankCall[SavedSession], frozen=True):
    """Write the session of all ranks; collective."""

    target = "axon_nb.engine.protection.saved_session:save"
    folder: str
    """An absolute path, which all ranks see."""


class LoadedSession(Struct, frozen=True):
    """What was loaded of a session."""

    world_size: int
    """Number of ranks that saved it; the others load its models alone."""
    models: tuple[str, ...]
    """Its models that any number of ranks can load."""


class LoadSession(RankCall[LoadedSession], frozen=True):
    """Load a session of all ranks; collective."""

    target = "axon_nb.engine.protection.saved_session:load"
    folder: str
    """As for `SaveSession`."""
