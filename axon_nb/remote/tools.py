"""Requests to the notebook that uses a cluster, and the tools of `axon-nb mcp`: what a model can ask and do.

Each method of `Tools` is a tool; its docstring and its signature are what the model reads. Calls are within limits of
time and size. They are served over the Model Context Protocol on standard input and output.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from msgspec import Struct

from axon_nb._version import __version__
from axon_nb.doctor.clusters import FoundCluster, find_clusters
from axon_nb.errors import AxonError, UsageError
from axon_nb.records.commands import COMMANDS, PLAN, EndpointError, ErrorCode

_TIMEOUT_S = 60.0
"""A notebook replies within seconds, unless its kernel is in C code that holds the GIL."""
_CUTS = ((64, 4000), (32, 1500), (16, 600), (8, 240), (4, 100), (2, 40))
"""Entries of a list and characters of a text that are kept; the next step applies while the reply is too large."""
TOOLS = (
    "clusters",
    *COMMANDS,
    "timeline",
    "logs",
    "plan",
    "export",
    "start",
    "stop",
    "run_start",
    "run_poll",
    "run_tail",
    "run_cancel",
)
WRITING = frozenset({"start", "stop", "run_start", "run_poll", "run_tail", "run_cancel", "interrupt"}) | {
    name for name, command in COMMANDS.items() if command.changes
}
"""Tools that are refused without ``--allow-run``."""


class NotebookClient:
    """Sends requests to the notebook that uses one cluster; each has a connection of its own."""

    def __init__(self, cluster: FoundCluster) -> None:
        self.name = cluster.name
        self._path = cluster.run_dir.endpoint_socket

    def request(self, operation: str, /, *, timeout_s: float = _TIMEOUT_S, **arguments: Any) -> dict[str, Any]:
        """Send a request and return the reply.

        Args:
            operation: Its name, such as ``status``.
            timeout_s: How long to wait for the reply, in seconds.
            arguments: Its arguments.

        Raises:
            EndpointError: it was refused, it failed, or there was no reply in time.
        """
        request = json.dumps({"do": operation, "with": arguments}).encode() + b"\n"
        deadline = time.monotonic() + timeout_s
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(timeout_s)
                connection.connect(str(self._path))
                connection.sendall(request)
                reply = _read_line(connection, deadline)
        except TimeoutError:
            raise EndpointError(
                ErrorCode.NO_REPLY,
                f"The notebook of {self.name!r} did not reply within {timeout_s:g} s. It may run code that does not "
                "let other threads work; try again, or restart its kernel: the ranks keep running.",
            ) from None
        except OSError:
            raise EndpointError(ErrorCode.NO_CLUSTER, _no_notebook(self.name)) from None
        if not reply:
            raise EndpointError(ErrorCode.NO_CLUSTER, f"The notebook of {self.name!r} closed the connection.")
        answer = json.loads(reply)
        if "error" in answer:
            error = answer["error"]
            raise EndpointError(ErrorCode(error["code"]), error["message"])
        result: dict[str, Any] = answer["ok"]
        return result


def _read_line(connection: socket.socket, deadline: float) -> bytes:
    parts = bytearray()
    while not parts.endswith(b"\n"):
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError
        connection.settimeout(left)
        part = connection.recv(1 << 16)
        if not part:
            return b""
        parts += part
    return bytes(parts)


def connect(name: str | None = None) -> NotebookClient:
    """Return a client of the notebook that uses a cluster.

    Args:
        name: The cluster's name, or that of its folder; None: the only one.

    Raises:
        EndpointError: there is no such cluster, no notebook uses it, or there are several.
    """
    living = [cluster for cluster in find_clusters() if cluster.state != "dead"]
    chosen = [cluster for cluster in living if name in (None, cluster.name, cluster.folder)]
    if not chosen:
        which = f"There is no cluster {name!r}" if name is not None else "You have no clusters"
        others = f"; running are {', '.join(cluster.name for cluster in living)}" if living else ""
        raise EndpointError(ErrorCode.NO_CLUSTER, f"{which} on this host{others}.")
    used = [cluster for cluster in chosen if cluster.state != "detached"]
    if len(used or chosen) > 1:
        names = ", ".join(cluster.name for cluster in used or chosen)
        raise EndpointError(ErrorCode.BAD_REQUEST, f"You have several clusters: {names}. Name one.")
    if not used:
        raise EndpointError(ErrorCode.NO_CLUSTER, _no_notebook(chosen[0].name))
    return NotebookClient(used[0])


def _no_notebook(name: str) -> str:
    return (
        f"No notebook uses the cluster {name!r} now, or it has an older axon_nb. Run `%distributed attach {name}` in a "
        "notebook to reconnect."
    )


def within(reply: dict[str, Any], characters: int) -> dict[str, Any]:
    """Return the reply, or as much of it as `characters` of JSON hold, then with ``"cut": true``.

    Lists keep their first entries, texts their end, which says more than their start.
    """
    if len(json.dumps(reply)) <= characters:
        return reply
    for entries, length in _CUTS:
        cut = {**_cut(reply, entries, length), "cut": True}
        if len(json.dumps(cut)) <= characters:
            return cut
    return {"cut": True, "keys": sorted(reply)}


def _cut(value: Any, entries: int, length: int) -> Any:
    if isinstance(value, dict):
        return {key: _cut(each, entries, length) for key, each in list(value.items())[: 4 * entries]}
    if isinstance(value, list):
        return [_cut(each, entries, length) for each in value[:entries]]
    if isinstance(value, str) and len(value) > length:
        return f"…{value[-length:]}"
    return value


class Limits(Struct, frozen=True):
    """What one call of a tool may take."""

    seconds: float = 60.0
    characters: int = 8000
    """Of the reply, as JSON."""


class Tools:
    """Performs the calls; each returns plain JSON values.

    Args:
        limits: What one call may take.
        can_run: Whether the tools of `WRITING` are allowed.
    """

    def __init__(self, limits: Limits, *, can_run: bool) -> None:
        self._limits = limits
        self._can_run = can_run

    def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Perform a call within the limits; an error is ``{"error": {"code", "message"}}``."""
        try:
            if name in WRITING and not self._can_run:
                raise EndpointError(
                    ErrorCode.REFUSED, f"{name} is not allowed: the server runs without --allow-run, so it only reads."
                )
            reply = self.function(name)(**arguments)
        except EndpointError as error:
            reply = error.to_json()
        except (AxonError, OSError) as error:
            reply = EndpointError(ErrorCode.FAILED, str(error)).to_json()
        return within(reply, self._limits.characters)

    def function(self, name: str) -> Callable[..., dict[str, Any]]:
        """Return the function of a tool; its docstring and its signature are what a model reads."""
        if name == "plan":
            return _described(self._plan, name, PLAN.tool, PLAN.parameters)
        if (command := COMMANDS.get(name)) is None:
            method: Callable[..., dict[str, Any]] = getattr(self, name)
            return method

        def ask(cluster: str | None = None, **options: Any) -> dict[str, Any]:
            return self._ask(cluster, name, **options)

        which = inspect.Parameter("cluster", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=str | None)
        return _described(ask, name, command.tool, [*command.parameters, which])

    def _ask(self, cluster: str | None, operation: str, /, **arguments: Any) -> dict[str, Any]:
        reply = connect(cluster).request(operation, timeout_s=self._limits.seconds, **arguments)
        return {key: value for key, value in reply.items() if key != "text"}

    def clusters(self) -> dict[str, Any]:
        """List the clusters of this user on this host: name, state, number of ranks."""
        keys = ("name", "state", "num_ranks", "backend", "keep_alive_left_s")
        clusters = [one.to_json() for one in find_clusters()]
        return {"clusters": [{key: one[key] for key in keys} for one in clusters]}

    def timeline(self, limit: int = 20, cluster: str | None = None) -> dict[str, Any]:
        """Summarize where time went by call: seconds over all ranks, time spent waiting, the rank waited for."""
        return self._ask(cluster, "timeline", limit=limit)

    def logs(self, cluster: str | None = None) -> dict[str, Any]:
        """Show what the ranks printed in the last cell, also while it runs, and outside of cells."""
        return self._ask(cluster, "logs")

    def _plan(self, model: str, **given: Any) -> dict[str, Any]:
        flags = {option.name: option.flag for option in PLAN.options}
        words = [f"{flags[name]}={value}" for name, value in given.items() if value is not None]
        return self._program("plan", *words, "--", model)

    def export(self, notebook: str, live_only: bool = False) -> dict[str, Any]:
        """Return the %%distributed cells of a saved notebook as one script for torchrun."""
        from axon_nb.export import export_notebook

        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "script.py"
            report = export_notebook(Path(notebook), script, live_only=live_only, force=False)
            return {"script": script.read_text(encoding="utf-8"), "report": str(report).replace(f"{folder}/", "")}

    def start(self, n: int, name: str | None = None, devices: str = "auto") -> dict[str, Any]:
        """Start a cluster of n ranks that lives as long as this server. devices: "auto", "cpu" or GPU numbers."""
        from axon_nb.cluster.session import current
        from axon_nb.cluster.session.clusters import start

        with _standard_output_kept():
            cluster = start(n, name=name, devices=devices)
        current.session().settings.set(share=True)
        return {"name": cluster.name, "num_ranks": cluster.world_size, "backend": cluster.backend}

    def stop(self) -> dict[str, Any]:
        """Stop the cluster that this server has started."""
        from axon_nb.cluster.session import current

        cluster = current.get()
        if cluster is None:
            raise EndpointError(ErrorCode.NO_CLUSTER, "This server has started no cluster.")
        with _standard_output_kept():
            cluster.stop()
        return {"stopped": cluster.name}

    def run_start(
        self, code: str, ranks: str | None = None, timeout: float | None = None, cluster: str | None = None
    ) -> dict[str, Any]:
        """Start a cell on the ranks and return its run id at once; then use run_poll. Print what you want to see.

        code: Python; each rank has `rank`, `world_size`, `device`, `torch` and `dist` (torch.distributed).
        timeout: seconds after which the cell is aborted; give one, as a cell may hang.
        """
        return self._ask(cluster, "run", code=code, ranks=ranks, timeout=timeout)

    def run_poll(self, run: str, wait_s: float = 5.0, cluster: str | None = None) -> dict[str, Any]:
        """Wait up to wait_s seconds for a run; return whether it is done, and its result (state, cause, verdict)."""
        reply = self._ask(cluster, "poll", run=run, wait_s=min(wait_s, self._limits.seconds))
        return {key: reply[key] for key in ("run", "done", "result")}

    def run_tail(self, run: str, since: dict[str, int] | None = None, cluster: str | None = None) -> dict[str, Any]:
        """Return what a run printed; pass since from the last reply to get only what is new."""
        return self._ask(cluster, "poll", run=run, since=since)

    def run_cancel(self, run: str, cluster: str | None = None) -> dict[str, Any]:
        """Interrupt a run; the ranks and their variables stay."""
        return self._ask(cluster, "cancel", run=run)

    def _program(self, *words: str) -> dict[str, Any]:
        """Run a command of `axon-nb` in another process, which the limit of time can end."""
        try:
            done = subprocess.run(
                [sys.executable, "-m", "axon_nb.cli", words[0], "--json", *words[1:]],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=self._limits.seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise EndpointError(
                ErrorCode.NO_REPLY, f"{words[0]} took longer than {self._limits.seconds:g} s (--max-seconds)."
            ) from None
        try:
            reply: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            raise EndpointError(ErrorCode.FAILED, done.stderr.strip()[-500:] or f"{words[0]} failed.") from None
        return reply


def _described(
    run: Callable[..., dict[str, Any]], name: str, text: str, parameters: list[inspect.Parameter]
) -> Callable[..., dict[str, Any]]:
    """Return a tool's function with what a model reads of it."""

    def tool(**arguments: Any) -> dict[str, Any]:
        return run(**arguments)

    signature = inspect.Signature(parameters, return_annotation=dict[str, Any])
    tool.__name__, tool.__doc__ = name, text
    tool.__annotations__ = {key: each.annotation for key, each in signature.parameters.items()}
    vars(tool)["__signature__"] = signature
    return tool


@contextlib.contextmanager
def _standard_output_kept() -> Iterator[None]:
    """Send prints to standard error: standard output belongs to the protocol."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def skill() -> str:
    """Return the instructions for agents, `SKILL.md`."""
    return (files("axon_nb") / "remote" / "SKILL.md").read_text(encoding="utf-8")


def serve(limits: Limits, *, can_run: bool) -> None:
    """Serve until standard input ends.

    Args:
        limits: What one call may take.
        can_run: Whether tools may start clusters and run cells.

    Raises:
        UsageError: the package `mcp` is missing.
    """
    try:
        from mcp.server.mcpserver import MCPServer
    except ImportError:
        raise UsageError('axon-nb mcp needs the package mcp 2.3 or newer: run `pip install "mcp>=2.3"`.') from None
    from mcp.types import ToolAnnotations

    tools = Tools(limits, can_run=can_run)
    server: Any = MCPServer("axon_nb", version=__version__, instructions=skill(), log_level="WARNING")
    for name in TOOLS:
        method = tools.function(name)
        server.tool(
            name=name,
            description=inspect.getdoc(method),
            annotations=ToolAnnotations(read_only_hint=name not in WRITING),
            structured_output=False,
        )(_in_thread(tools, method))
    server.run("stdio")


def _in_thread(tools: Tools, method: Callable[..., Any]) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Return a tool's function: it has the signature of `method`, and calls it in a thread."""
    from mcp.types import CallToolResult, TextContent

    @functools.wraps(method)
    async def call(**arguments: Any) -> CallToolResult:
        perform = functools.partial(tools.call, method.__name__, arguments)
        reply = await asyncio.to_thread(perform)
        text = TextContent(type="text", text=json.dumps(reply))
        return CallToolResult(content=[text], structured_content=reply, is_error="error" in reply)

    return call
