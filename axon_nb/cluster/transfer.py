"""Moves values between the notebook and the ranks, among the ranks, and to and from a folder.

`axon_nb.engine.transfer` is the other end. Values go through shared memory on one host, in messages between hosts. A
push sends one message per host: its first rank holds the values in shared memory for the others. A scattered part has
the class, the attributes and the mask of the whole, and the whole those of its parts. What cannot be split so is
refused, and what cannot be joined so becomes a list.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from axon_nb.cluster import rpc
from axon_nb.cluster.cells.manager import CellManager
from axon_nb.cluster.cells.result import await_reply, ranks_on_this_host, read_value
from axon_nb.cluster.failures import cell_error, hint_for, root_cause
from axon_nb.errors import UsageError
from axon_nb.host.shared_memory import BlockAddress, SharedBlock, block_size, join_parts
from axon_nb.records.protocol import transfer as protocol
from axon_nb.records.protocol.wire import RankCall, cell_source
from axon_nb.records.ranks import name_ranks
from axon_nb.records.units import count_of, format_bytes

if TYPE_CHECKING:
    from axon_nb.cluster.state import ClusterState

_MIN_HELD_BYTES = 64 << 10
"""Fewer bytes go to each rank in its own message, which takes one exchange instead of three."""
_SEQUENCES = (list, tuple, range, str, bytes)
_ALTERNATIVE = "load a checkpoint on all ranks, or rebuild it"
_MAX_SEED = (1 << 63) - 1


def push(cells: CellManager, variables: Mapping[int, Mapping[str, Any]], *, as_is: bool = False) -> None:
    """Set variables in the namespaces of ranks; return when each rank has them.

    Args:
        cells: The cells of the cluster.
        variables: The variables of each rank; a mapping that several ranks share is sent once.
        as_is: Whether arrays of other libraries on a device, such as CuPy's, stay such arrays.

    Raises:
        UsageError: a name is not valid, or a value cannot be pickled or is too large.
        ClusterLostError: the cluster is gone, or one of the ranks is dead or stuck.
    """
    names = list(dict.fromkeys(name for namespace in variables.values() for name in namespace))
    for name in names:
        if not name.isidentifier():
            raise UsageError(f"{name!r} is not a valid variable name.")
    task = f"receive {', '.join(names)}"
    cells.state.health.ensure_available(list(variables))
    _report_queue(cells.state, variables)
    packed = {id(namespace): _packed(namespace, as_is=as_is) for namespace in variables.values()}
    local = ranks_on_this_host(cells.state, variables)
    _check_memory(sum(block_size(parts) for parts in packed.values()), what=", ".join(names))
    with contextlib.ExitStack() as open_blocks:
        addresses: dict[int, BlockAddress] = {}
        for key, parts in packed.items():
            recipients = [rank for rank in local if id(variables[rank]) == key]
            if recipients:
                block = open_blocks.enter_context(SharedBlock())
                block.write(parts)
                addresses.update(dict.fromkeys(recipients, block.address))
        data = _joined(packed, variables, [rank for rank in variables if rank not in addresses])
        addresses |= open_blocks.enter_context(_held(cells.state, data, task))
        unreached = _run(cells, list(addresses), protocol.ReceiveValues(addresses), task) if addresses else {}
    remote = {rank: content for rank, content in data.items() if rank not in addresses}
    remote |= _joined(packed, variables, unreached)
    _call_remote(cells.state, {rank: protocol.SetVariables(content) for rank, content in remote.items()}, task)


def _joined(
    packed: Mapping[int, Sequence[Any]], variables: Mapping[int, Mapping[str, Any]], ranks: Iterable[int]
) -> dict[int, bytes]:
    """Return the bytes that each of these ranks gets; ranks with the same variables get the same object."""
    keys = {rank: id(variables[rank]) for rank in ranks}
    joined = {key: bytes(join_parts(packed[key])) for key in set(keys.values())}
    return {rank: joined[key] for rank, key in keys.items()}


@contextlib.contextmanager
def _held(state: ClusterState, data: Mapping[int, bytes], task: str) -> Iterator[dict[int, BlockAddress]]:
    """Send large data once per host, where one rank holds it in shared memory; give the block that each rank reads.

    Args:
        state: The cluster.
        data: The bytes for each rank on another host; ranks that get the same share one object.
        task: What the ranks do, for messages.
    """
    sharing: dict[tuple[str, int], list[int]] = {}
    for rank, content in data.items():
        if len(content) >= _MIN_HELD_BYTES:
            sharing.setdefault((state.rank_info[rank].host, id(content)), []).append(rank)
    groups = {ranks[0]: ranks for ranks in sharing.values() if len(ranks) > 1}
    try:
        blocks = _call_remote(state, {holder: protocol.HoldValues(data[holder]) for holder in groups}, task)
        yield {rank: block for holder, block in blocks.items() if block is not None for rank in groups[holder]}
    except BaseException:
        for holder in groups:
            with contextlib.suppress(Exception):  # it is dead
                rpc.call(state.connection.client, holder, protocol.ReleaseValues())  # not awaited: it may be stuck
        raise
    _call_remote(state, {holder: protocol.ReleaseValues() for holder in groups}, task)


def pull(
    cells: CellManager,
    ranks: Sequence[int],
    expression: str,
    *,
    shards: bool = False,
    arrays: bool = False,
    as_is: bool = False,
) -> tuple[dict[int, Any], bool]:
    """Fetch the value of a name or expression from each rank.

    Args:
        cells: The cells of the cluster.
        ranks: Where to evaluate it.
        expression: The name or expression.
        shards: Whether each rank sends its own shard of a distributed tensor; else the full tensor is gathered.
        arrays: Whether tensors arrive as NumPy arrays.
        as_is: Whether arrays of other libraries on a device arrive as such; this process then needs the library.

    Returns:
        The values by rank, and whether they are copies of one value that was gathered from several ranks.

    Raises:
        UsageError: the expression is not valid or fails, or its value cannot be pickled or loaded.
        ClusterLostError: the cluster is gone, or one of the ranks is dead or stuck.
    """
    try:
        compile(expression, "<pull>", "eval")
    except (SyntaxError, ValueError):
        raise UsageError(f"{expression!r} is not a name or an expression.") from None
    cells.state.health.ensure_available(ranks)
    _report_queue(cells.state, ranks)
    task = f"send {expression!r}"
    local = ranks_on_this_host(cells.state, ranks)
    participants = list(ranks)
    with contextlib.ExitStack() as open_blocks:
        while True:
            blocks = {rank: open_blocks.enter_context(SharedBlock()) for rank in local}
            addresses = {rank: blocks[rank].address if rank in blocks else None for rank in ranks}
            call = protocol.SendValue(expression, addresses, tuple(participants), shards, arrays, as_is)
            unreached = _run(cells, participants, call, task)
            if needed := {rank for reason in unreached.values() for rank in reason.needed}:
                participants = sorted(needed)
                continue
            if not unreached:
                break
            local = [rank for rank in local if rank not in unreached]
        remote = [rank for rank in ranks if rank not in blocks]
        received = _call_remote(cells.state, dict.fromkeys(remote, protocol.TakePendingValue()), task)
        sources: dict[int, SharedBlock | bytes] = {rank: block for rank, block in blocks.items() if not block.empty}
        sources |= {rank: data for rank, data in received.items() if data}
        # A gathered value comes from one rank; the entry of each rank is still a separate copy.
        is_gathered = len(sources) < len(ranks) or participants != list(ranks)
        first = sources[min(sources)]
        return {rank: _loaded(rank, expression, sources.get(rank, first)) for rank in ranks}, is_gathered


def _loaded(rank: int, expression: str, source: SharedBlock | bytes) -> Any:
    try:
        return read_value(source)
    except Exception as error:
        raise UsageError(
            f"Rank {rank} sent {expression!r}, but the notebook cannot load it: {type(error).__name__}: {error}"
        ) from None


def _packed(variables: Mapping[str, Any], *, as_is: bool) -> list[Any]:
    from axon_nb.shell.value_pickle import cannot_pickle, pack

    try:
        return pack(dict(variables), with_names=True, as_is=as_is)
    except Exception as error:
        reason = cannot_pickle(error)
    for name, value in variables.items():
        try:
            pack(value, with_names=True, as_is=as_is)
        except Exception as error:
            raise UsageError(f"{name!r} cannot be sent to ranks: {cannot_pickle(error)}") from None
    raise UsageError(f"{', '.join(variables)} cannot be sent to ranks: {reason}")


def _check_memory(size: int, *, what: str) -> None:
    from axon_nb.host.resources import free_memory
    from axon_nb.records.units import format_bytes

    free = free_memory()
    if free is not None and size > free:
        raise UsageError(
            f"{what} needs {format_bytes(size)} but only {format_bytes(free)} is free: send part of it, or load it on "
            "the ranks."
        )


def _report_queue(state: ClusterState, ranks: Iterable[int]) -> None:
    ahead = [rank for rank in state.busy if rank in ranks]
    if ahead:
        print(f"Waiting for the cell that is running on {name_ranks(ahead)}.")


def _run(
    cells: CellManager, ranks: Sequence[int], call: RankCall[protocol.Undelivered | None], task: str
) -> dict[int, protocol.Undelivered]:
    """Make a call as a cell, so that a death, an interrupt or a deadlock aborts it like any other cell.

    Args:
        cells: The cells of the cluster.
        ranks: Where to call it.
        call: The call.
        task: What the ranks do, for messages; reads after "cannot".

    Returns:
        By rank that could not transfer its value in this way, the reason.
    """
    result = cells.run(cell_source(call), ranks=ranks, quiet=True, check=False)
    undelivered = {rank: value for rank, value in result.values.items() if isinstance(value, protocol.Undelivered)}
    if not result.errors or any(reason.needed for reason in undelivered.values()):
        return undelivered
    cause = root_cause(result.errors)
    if cause.kind != "raised":
        hint = hint_for(result.errors.values())
        if cause.kind == "aborted" and len(ranks) < cells.state.world_size:
            hint = (
                f"{task.removeprefix('send ')} communicates with ranks that do not run it: leave --ranks out, or "
                "compute it in a cell and pull the result."
            )
        raise cell_error(result.errors, first=(), hint=hint)
    reason = cause.evalue if cause.ename == "UsageError" else str(cause)
    raise UsageError(f"Rank {cause.rank} cannot {task}: {reason}")


def _call_remote(state: ClusterState, calls: Mapping[int, RankCall[Any]], task: str) -> dict[int, Any]:
    """Make calls to ranks that share no memory with the notebook; their arguments and results are not cached."""
    client = state.connection.client
    futures = {rank: rpc.call(client, rank, call) for rank, call in calls.items()}
    return {rank: await_reply(state, rank, future, task) for rank, future in futures.items()}


def split_value(value: Any, count: int, *, dim: int = 0, name: str = "the value") -> list[Any]:
    """Split a value into `count` contiguous parts without copying arrays; if uneven, the first ones are longer by one.

    Args:
        value: A tensor, an array, a table, or a Python sequence.
        count: Number of parts.
        dim: Dimension of a tensor or an array to split along.
        name: The value's name in messages.

    Raises:
        UsageError: it has no such dimension, or its type cannot be split.
    """
    if _is_table(value) or type(value) in _SEQUENCES:
        if dim:
            raise UsageError(f"--dim {dim}: {name} has type {type(value).__name__}; only --dim 0 is possible.")
        rows = value.iloc if hasattr(value, "iloc") else value
        return [rows[start:end] for start, end in _bounds(len(value), count)]
    if _is_array(value) or _is_tensor(value):
        if not -value.ndim <= dim < value.ndim:
            raise UsageError(f"--dim {dim}: {name} has {count_of(value.ndim, 'dimension')}.")
        before = (slice(None),) * (dim % value.ndim)
        plain = _plain(value)
        return [_like(value, plain[(*before, slice(start, end))]) for start, end in _bounds(value.shape[dim], count)]
    kind = type(value).__name__
    if "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor):
        layout = str(value.layout).removeprefix("torch.")
        layout = "quantized" if value.is_quantized else "nested" if value.is_nested else layout
        kind = f"{kind} ({layout})"
    raise UsageError(
        f"{name} has type {kind}: only dense tensors, arrays, tables and sequences can be split. "
        "Use `%push` to send all of it to each rank."
    )


def join_values(parts: Sequence[Any], *, dim: int = 0) -> Any:
    """Join parts: tensors and arrays along `dim`, tables by rows, lists and tuples end to end; others become a list.

    Raises:
        UsageError: their shapes do not match.
    """
    first = parts[0]
    if any(_class(part) != _class(first) for part in parts):
        return list(parts)
    if _is_table(first):
        return _join_tables(parts)
    if type(first) in (list, tuple):
        return type(first)(itertools.chain.from_iterable(parts))
    if not all(_is_tensor(part) or _is_array(part) for part in parts) or not _alike(parts):
        return list(parts)
    join = _joins(first)[0 if first.ndim else 1]
    try:
        joined = join([_plain(part) for part in parts], dim if first.ndim else 0)
    except (IndexError, RuntimeError, TypeError, ValueError):
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise UsageError(
            f"Cannot join parts of shapes {shapes} along dimension {dim}: all other dimensions must be equal. Use "
            "`%pull` to fetch them as they are."
        ) from None
    whole = _like(first, joined, requires_grad=all(getattr(part, "requires_grad", False) for part in parts))
    holds_exactly = importlib.import_module("axon_nb.shell.value_pickle").holds_exactly
    return whole if all(holds_exactly(joined, _plain(part)) for part in parts) else list(parts)


def _bounds(length: int, count: int) -> list[tuple[int, int]]:
    size, num_longer = divmod(length, count)
    starts = [index * size + min(index, num_longer) for index in range(count + 1)]
    return list(itertools.pairwise(starts))


def _class(value: Any) -> Any:
    """Its class; one of a cell, which each rank has defined for itself, by name."""
    kind = type(value)
    return kind if kind.__module__ != "__main__" else kind.__qualname__


def _join_tables(parts: Sequence[Any]) -> Any:
    pandas = sys.modules["pandas"]
    first = parts[0]
    if isinstance(first, (pandas.DataFrame, pandas.Series)):
        is_alike = all(_facts(part)[0] == _facts(first)[0] for part in parts)
        dtypes = zip(*(_facts(part)[1] for part in parts), strict=is_alike)
        is_kept = all(len(set(kinds)) == 1 or all(map(pandas.api.types.is_numeric_dtype, kinds)) for kinds in dtypes)
        holds_exactly = importlib.import_module("axon_nb.shell.value_pickle").holds_exactly
        joined = pandas.concat(list(parts)) if is_alike and is_kept else parts
        return joined if joined is not parts and all(holds_exactly(joined, one) for one in parts) else list(parts)
    if isinstance(first, pandas.Index):
        joined = first.append(list(parts[1:]))
    else:
        joined = pandas.concat([pandas.Series(part) for part in parts], ignore_index=True).array
    return joined if joined.dtype == first.dtype else list(parts)


def _facts(table: Any) -> tuple[Any, list[Any]]:
    """What tables must have in common to be joined, and the dtypes of their columns, of which numbers may differ."""
    names = list(table.columns) if table.ndim == 2 else [table.name]
    facts = names, list(table.index.names), _identity(table.attrs)
    return facts, list(table.dtypes) if table.ndim == 2 else [table.dtype]


def _joins(first: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    if _is_tensor(first):
        torch = sys.modules["torch"]
        return torch.cat, torch.stack
    numpy = sys.modules["numpy"]
    module = numpy.ma if isinstance(first, numpy.ma.MaskedArray) else numpy
    return module.concatenate, module.stack


def _plain(value: Any) -> Any:
    """Return a tensor without class, attributes and history, or an array without its class; both share its memory."""
    if _is_tensor(value):
        return value.detach().as_subclass(sys.modules["torch"].Tensor)
    numpy = sys.modules["numpy"]
    return value if isinstance(value, numpy.ma.MaskedArray) else value.view(numpy.ndarray)


def _like(value: Any, plain: Any, *, requires_grad: bool | None = None) -> Any:
    """Return what `_plain` has made a part or a whole of, as one of the class of `value`, with its attributes."""
    from axon_nb.shell.value_pickle import dressed

    if _is_tensor(value):
        wanted = value.requires_grad and value.is_leaf if requires_grad is None else requires_grad
        return dressed(plain, type(value), vars(value), requires_grad=wanted)
    if isinstance(value, sys.modules["numpy"].ma.MaskedArray):
        plain.fill_value = value.fill_value
        return plain.harden_mask() if value.hardmask else plain
    if type(value) is not type(plain):
        plain = plain.view(type(value))
        vars(plain).update(_attributes(value))
    return plain


def _attributes(value: Any) -> dict[str, Any]:
    if _is_array(value) and isinstance(value, ((numpy := sys.modules["numpy"]).memmap, numpy.ma.MaskedArray)):
        return {}
    return getattr(value, "__dict__", {})


def _alike(parts: Sequence[Any]) -> bool:
    """Whether all have the same attributes, so that the whole can have them."""
    return len({_identity(_attributes(part)) for part in parts}) == 1


def _identity(attributes: Any) -> bytes:
    """Return what is equal for equal attributes."""
    if not attributes:
        return b""
    import cloudpickle

    return bytes(cloudpickle.dumps(attributes))


def _is_tensor(value: Any) -> bool:
    """Whether this is a tensor that is what lies in its memory, or has none (on the device meta)."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return False
    from axon_nb.shell.value_pickle import is_dense

    return is_dense(value) or (value.is_meta and type(value) in (torch.Tensor, torch.nn.Parameter))


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_table(value: Any) -> bool:
    pandas = sys.modules.get("pandas")
    if pandas is None:
        return False
    return isinstance(value, (pandas.DataFrame, pandas.Series, pandas.Index, pandas.api.extensions.ExtensionArray))


class SyncReport(Struct, frozen=True):
    """What `Cluster.sync` copied, and what it could not copy; prints as sentences."""

    source: int
    """The rank that the variables were copied from."""
    copied: tuple[str, ...]
    """Names of the copied variables."""
    size: int
    """Bytes of the copied modules."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """By name of each variable that was not copied, the reason; reads after the name."""

    def __str__(self) -> str:
        names = ", ".join(f"`{name}`" for name in self.copied)
        lines = [f"Copied {names} from rank {self.source} to all ranks ({format_bytes(self.size)} of weights)."]
        lines += [f"Not copied: `{name}` {reason}: {_ALTERNATIVE}." for name, reason in self.skipped.items()]
        return "\n".join(lines)

    __repr__ = __str__


def plan_sync(
    reports: Mapping[int, Mapping[str, protocol.SyncRecord]], source: int, names: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Decide which variables to copy, in order, and why the others cannot be copied.

    Args:
        reports: The variables of each rank, by rank and name.
        source: The rank to copy from.
        names: What the user named; empty: everything on rank `source`.

    Raises:
        UsageError: a named variable cannot be copied, or there is nothing to copy.
    """
    skipped = {name: reason for name in names or reports[source] if (reason := _why_not(reports, source, name))}
    if names and skipped:
        name, reason = next(iter(skipped.items()))
        raise UsageError(
            f"`{name}` {reason}: {_ALTERNATIVE}. `%distributed sync` copies only what every rank holds in full."
        )
    possible = [name for name in reports[source] if name not in skipped]
    selection = [
        name for name in possible if not all(reports[rank][name].contained_in in possible for rank in reports)
    ]  # the others come with the variable that contains them
    if not selection:
        more = "".join(f" `{name}` {reason}." for name, reason in skipped.items())
        raise UsageError(f"Rank {source} has no module, optimizer or scheduler that can be copied.{more}")
    return selection, {
        name: reason for name, reason in skipped.items() if reports[source][name].contained_in not in skipped
    }


def _why_not(reports: Mapping[int, Mapping[str, protocol.SyncRecord]], source: int, name: str) -> str:
    absent = [rank for rank in reports if name not in reports[rank]]
    if absent:
        return f"does not exist on {name_ranks(absent)}"
    entries = {rank: report[name] for rank, report in reports.items()}
    reasons = [entry.obstacle for entry in entries.values() if entry.obstacle]
    if reasons:
        return reasons[0]
    reference = entries[source]
    different = [
        rank for rank, entry in entries.items() if (entry.kind, entry.digest) != (reference.kind, reference.digest)
    ]
    return f"has different types or shapes on {name_ranks(different)}" if different else ""


def sync(cells: CellManager, source: int, names: Sequence[str]) -> SyncReport:
    """Copy one rank's models, optimizers and schedulers to all others; see `Cluster.sync`."""
    if source not in cells.state.ranks:
        raise UsageError(f"--from {source}: ranks are 0 to {cells.state.world_size - 1}.")
    cells.state.raise_if_busy("wait until it finishes, or interrupt it")
    reports: Mapping[int, Mapping[str, protocol.SyncRecord]] = _run_quietly(
        cells, protocol.DescribeModels(tuple(names))
    )
    selection, skipped = plan_sync(reports, source, names)
    _run_quietly(cells, protocol.BroadcastModels(source, tuple(selection)))
    size = sum(reports[source][name].bytes for name in selection if reports[source][name].kind == "module")
    return SyncReport(source, tuple(selection), size, skipped)


def _run_quietly(cells: CellManager, call: RankCall[Any]) -> Mapping[int, Any]:
    # It runs as a cell, so that a death, an interrupt or a failure aborts it like any other cell.
    return cells.run(cell_source(call), quiet=True).values


def seed(cells: CellManager, value: int, *, per_rank: bool = False) -> str:
    """Seed `random`, NumPy and torch (every device) on all ranks; return a sentence that says so.

    Args:
        cells: The cells of the cluster.
        value: The seed.
        per_rank: Whether each rank's seed is `value` plus its rank.

    Raises:
        UsageError: torch does not accept the seed.
    """
    highest = _MAX_SEED - cells.state.world_size
    if not 0 <= value <= highest:
        raise UsageError(f"seed must be an integer from 0 to {highest}; got {value}.")
    cells.run(cell_source(protocol.Seed(value, per_rank)), quiet=True)
    done = f"Seeded random, numpy and torch on {name_ranks(cells.state.ranks)}"
    if per_rank:
        return f"{done}: {value} on rank 0, {value + 1} on rank 1, and so on."
    return f"{done} with {value}."


def save_session(cells: CellManager, folder: str) -> str:
    """Write the state of all ranks to a folder; return a report.

    Args:
        cells: The cells of the cluster.
        folder: Its path, on a disk that all ranks see; a session that was saved there is replaced.

    Raises:
        UsageError: that is not possible.
    """
    path = Path(folder).expanduser().absolute()
    saved: dict[int, protocol.SavedSession] = _run_unchecked(cells, protocol.SaveSession(str(path)))
    first = saved[0]
    lines = [f"Saved the session of {cells.state.world_size} ranks to {folder} ({format_bytes(first.bytes)})."]
    if first.models:
        lines.append(f"Other numbers of ranks can load `{'`, `'.join(first.models)}`.")
    lines += [f"Only as many ranks can load `{name}`: {reason}." for name, reason in first.not_portable.items()]
    left_out = {name: reason for one in saved.values() for name, reason in one.left_out.items()}
    return "\n".join([*lines, *(f"Not saved: `{name}` {reason}." for name, reason in left_out.items())])


def load_session(cells: CellManager, folder: str) -> str:
    """Load what `save_session` has written; return a report.

    On as many ranks, everything comes back: variables, training states and random states. On another number, models
    and their optimizers and schedulers do; the cells that create them must have run.

    Args:
        cells: The cells of the cluster.
        folder: The path.

    Raises:
        UsageError: that is not possible.
    """
    loaded: protocol.LoadedSession = _run_unchecked(
        cells, protocol.LoadSession(str(Path(folder).expanduser().absolute()))
    )[0]
    size = cells.state.world_size
    if loaded.world_size == size:
        return f"Loaded the session from {folder}: all variables and random states of {size} ranks."
    what = f"`{'`, `'.join(loaded.models)}`" if loaded.models else "no model"
    return (
        f"Loaded {what} from {folder}, which {loaded.world_size} ranks have saved. Other variables and random states "
        f"stay as they are: they belong to {loaded.world_size} ranks."
    )


def _run_unchecked(cells: CellManager, call: RankCall[Any]) -> dict[int, Any]:
    # It runs as a cell, so that a death, an interrupt or a failure aborts it like any other cell.
    result = cells.run(cell_source(call), quiet=True, check=False)
    if not result.errors:
        return dict(result.values)
    cause = root_cause(result.errors)
    if cause.kind != "raised":
        raise cell_error(result.errors, first=(), hint=hint_for(result.errors.values()))
    raise UsageError(cause.evalue if "Checkpoint" in cause.ename else str(cause))
