"""The result of a cell: what users get, its record for programs, and the values that are fetched from ranks.

`axon_nb/records/cell_result.schema.json` describes the record: `CellResult.to_dict`, `CellError.to_dict`, and a part of
the cell's display. It takes at most 4 KiB, whatever the ranks did.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from axon_nb._version import RECORD_VERSION
from axon_nb.cluster import rpc
from axon_nb.cluster.divergence import NumbersVerdict
from axon_nb.cluster.failures import Failure, RankError, failure_place, next_commands
from axon_nb.errors import CellError, CellInterrupt, CellTimeoutError, ClusterLostError, UsageError
from axon_nb.host.shared_memory import SharedBlock, memfd_supported, split_parts
from axon_nb.records.protocol.cells import Profile
from axon_nb.records.protocol.transfer import LastValue
from axon_nb.records.ranks import format_ranks, name_ranks, ranks_by

if TYPE_CHECKING:
    from axon_nb.cluster.cells.run import CellRun
    from axon_nb.cluster.state import ClusterState

MIME_TYPE = "application/vnd.axon-nb.result+json"
MAX_RECORD_BYTES = 4096
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_TEXT_LIMITS = (600, 240, 100, 40)
"""Characters of one text; the next lower limit applies while the record is too large."""
_MAX_GROUPS = 12
_POLL_INTERVAL_S = 0.1


class CellViews(Protocol):
    """The views of one finished cell."""

    def show(self) -> None:
        """Open them again."""


@dataclass(frozen=True)
class CellResult:
    """Values, errors, times and text of one cell, by rank."""

    values: Mapping[int, Any] = field(default_factory=dict)
    """Value of the last expression on each rank that has one."""
    errors: Mapping[int, RankError] = field(default_factory=dict)
    """The ranks on which the cell failed."""
    seconds: Mapping[int, float] = field(default_factory=dict)
    """How long the cell ran on each rank, in seconds."""
    text: Mapping[int, str] = field(default_factory=dict)
    """What each rank printed (bounded)."""
    cpu_seconds: Mapping[int, float] = field(default_factory=dict)
    """Processor time that all threads of each rank used meanwhile, in seconds."""
    repetitions: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """With `--repeat`: how long each run took on each rank, in seconds."""
    profiles: Mapping[int, Profile] = field(default_factory=dict)
    """With `--profile`: the operations that took longest, and the path of the trace, by profiled rank."""

    numbers: NumbersVerdict | None = None
    """With `config watch_numbers`: whether replicas were equal and all numbers finite; None: nothing was watched."""
    record: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """What `to_dict` returns."""
    views: CellViews | None = field(default=None, repr=False, compare=False)
    """With `--watch`: what was shown; `show` opens it again. Not pickled."""

    @property
    def ok(self) -> bool:
        """Whether the cell failed on no rank."""
        return not self.errors

    def to_dict(self) -> dict[str, Any]:
        """Return state, ranks, cause and verdict as plain JSON values, at most 4 KiB.

        `axon_nb/records/cell_result.schema.json` describes them. `CellError.to_dict` returns the same of a cell that
        failed.
        """
        return dict(self.record)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {"text/plain": repr(self), **({MIME_TYPE: self.to_dict()} if self.record else {})}

    def __getitem__(self, rank: int) -> Any:
        """Return the value of one rank.

        Raises:
            KeyError: that rank has no value.
        """
        if rank not in self.values:
            raise KeyError(f"rank {rank} has no value; ranks with one: {format_ranks(self.values) or 'none'}")
        return self.values[rank]

    def show(self) -> None:
        """Reopen the views of a cell that ran with `--watch`: to zoom, point at and search.

        Raises:
            UsageError: it ran without.
        """
        if self.views is None:
            raise UsageError(
                "No live view was recorded: rerun the cell as `%%distributed --watch --out result`. `%timeline --cell "
                "N` shows what is still known about a finished cell."
            )
        self.views.show()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "views": None}

    def __repr__(self) -> str:
        lines = [f"rank {rank}: {value!r}" for rank, value in self.values.items()]
        lines += [f"rank {rank} failed: {error}" for rank, error in self.errors.items()]
        longest = max(self.seconds.values(), default=0.0)
        return "\n".join([f"CellResult of {name_ranks(self.seconds)}, {longest:.3g} s", *lines])


def cell_record(run: CellRun, failure: BaseException | None = None) -> dict[str, Any]:
    """Return what programs read about a cell that is done, as plain JSON values.

    Args:
        run: The cell.
        failure: The exception that it raises in the notebook; None: it did not fail, or nothing is raised.
    """
    for limit in _TEXT_LIMITS:
        record = _record(run, failure, limit)
        if len(json.dumps(record)) <= MAX_RECORD_BYTES:
            break
    return record


def _record(run: CellRun, failure: BaseException | None, limit: int) -> dict[str, Any]:
    details = getattr(failure, "failure", None)
    known = details if isinstance(details, Failure) else None
    commands = next_commands(known, run.ranks) if known is not None else ()
    return {
        "version": RECORD_VERSION,
        "state": _state(failure, run.errors),
        "cell": run.number,
        "ranks": _short(format_ranks(run.ranks), limit),
        "seconds": round(max(run.cell.seconds.values(), default=0.0), 6),
        "cause": None if known is None else _cause(known, run.number, limit),
        "groups": _groups(run.ranks, run.errors, limit),
        "verdict": _short(run.explanation, 2 * limit),
        "hint": _short("" if known is None else known.hint, limit),
        "next": [{"command": command, "does": text} for command, text in commands],
    }


def _state(failure: BaseException | None, errors: Mapping[int, RankError]) -> str:
    if isinstance(failure, CellInterrupt):
        return "interrupted"
    if isinstance(failure, CellTimeoutError):
        return "timed_out"
    return "failed" if errors or isinstance(failure, CellError) else "ok"


def _cause(failure: Failure, cell: int | None, limit: int) -> dict[str, Any]:
    cause, place = failure.cause, failure_place(failure.cause, cell)
    return {
        "ranks": _short(format_ranks(failure.alike), limit),
        "kind": cause.kind,
        "type": _short(cause.ename, limit),
        "message": _short(cause.evalue, limit),
        "file": None if place is None else _short(place.file, limit),
        "line": None if place is None else place.line,
    }


def _groups(ranks: Sequence[int], errors: Mapping[int, RankError], limit: int) -> list[dict[str, str]]:
    """Return what the ranks did; those that did the same share an entry."""
    did = {rank: (error.kind, _short(_words(error), limit)) for rank, error in errors.items()}
    alike = ranks_by((did.get(rank, ("finished", "")), rank) for rank in ranks)
    entries = [
        {"ranks": _short(format_ranks(sharing), limit), "did": kind, "text": text}
        for (kind, text), sharing in list(alike.items())[:_MAX_GROUPS]
    ]
    rest = [rank for sharing in list(alike.values())[_MAX_GROUPS:] for rank in sharing]
    if rest:
        entries.append({"ranks": _short(format_ranks(rest), limit), "did": "other", "text": ""})
    return entries


def _words(error: RankError) -> str:
    return str(error) if error.kind == "raised" else error.evalue


def _short(text: str, limit: int) -> str:
    text = _ANSI.sub("", text)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def last_values(state: ClusterState, ranks: Iterable[int], token: str) -> dict[int, Any]:
    """Fetch the value of the last expression of the cell with this token; its text if it cannot be sent."""
    client, values = state.connection.client, {}
    if not (requested := list(ranks)):
        return {}
    local = ranks_on_this_host(state, requested)
    with contextlib.ExitStack() as stack:
        blocks = {rank: stack.enter_context(SharedBlock()) for rank in local}
        futures = {}
        for rank in requested:
            address = blocks[rank].address if rank in blocks else None
            futures[rank] = rpc.call(client, rank, LastValue(token, address))
        for rank, future in futures.items():
            data, text = await_reply(state, rank, future, "give the cell's value")
            if data == b"":
                values[rank] = text
                continue
            try:
                values[rank] = read_value(blocks[rank] if data is None else data)
            except Exception:
                values[rank] = text
    return values


def read_value(source: SharedBlock | bytes) -> Any:
    """Unpack a value that a rank has sent, in shared memory or in a message."""
    from axon_nb.shell.value_pickle import unpack

    return unpack(source.read() if isinstance(source, SharedBlock) else split_parts(bytearray(source)))


def ranks_on_this_host(state: ClusterState, ranks: Iterable[int]) -> list[int]:
    """Return those of the ranks that run on the notebook's own host; none if it has no shared memory."""
    if not memfd_supported():
        return []
    host = socket.gethostname()
    return [rank for rank in ranks if state.rank_info[rank].host == host]


def await_reply(state: ClusterState, rank: int, future: Any, what: str) -> Any:
    """Wait for the result of a call on a rank.

    Args:
        state: The cluster.
        rank: The rank.
        future: The call's future.
        what: What the call does, such as ``give 'x'``: completes "Rank 2 cannot …" in messages.

    Raises:
        ClusterLostError: the rank is dead, or the cluster is gone.
        UsageError: the call raised.
    """
    try:
        while not future.wait(_POLL_INTERVAL_S):
            if state.health.disconnect_reason:
                raise ClusterLostError(
                    f"The cluster {state.name!r} {state.health.disconnect_reason}: it cannot {what}."
                )
            if rank in state.health.dead:
                why, remedy = state.health.dead[rank], state.health.remedy
                raise ClusterLostError(f"Rank {rank} {why}, and cannot {what}. {remedy}")
        return future.result()
    except (ClusterLostError, KeyboardInterrupt):
        with contextlib.suppress(Exception):
            state.connection.client.abort(future, block=False)
        raise
    except Exception as error:
        ename, evalue = getattr(error, "ename", type(error).__name__), getattr(error, "evalue", str(error))
        raise UsageError(f"Rank {rank} cannot {what}: {ename}: {evalue}") from None
    finally:
        with contextlib.suppress(Exception):  # still on its way
            state.connection.client.purge_local_results(future)
