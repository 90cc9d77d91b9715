"""`axon-nb mcp`: serves the tools over the Model Context Protocol on standard input and output."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Callable, Coroutine
from importlib.resources import files
from typing import Any

from axon_nb._version import __version__
from axon_nb.errors import UsageError
from axon_nb.remote.tools import TOOLS, WRITING, Limits, Tools


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
        method = getattr(tools, name)
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
