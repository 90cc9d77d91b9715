"""The commands of `axon-nb` for agents: `mcp` and `skill`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from axon_nb.errors import UsageError
from axon_nb.usage import CommandParser, ProgramCommand

_MIN_CHARS = 500


def _mcp_arguments(parser: CommandParser) -> None:
    parser.add_argument("--allow-run", action="store_true", help="also start clusters and run cells")
    parser.add_argument(
        "--max-seconds", type=float, default=60.0, metavar="S", help="longest time of one call (default: 60)"
    )
    parser.add_argument(
        "--max-chars", type=int, default=8000, metavar="N", help="most characters of one reply (default: 8000)"
    )


def _mcp(options: argparse.Namespace) -> int:
    from axon_nb.remote.mcp_server import serve
    from axon_nb.remote.tools import Limits

    if options.max_seconds <= 0 or options.max_chars < _MIN_CHARS:
        raise UsageError(f"axon-nb mcp: --max-seconds must be above 0, and --max-chars at least {_MIN_CHARS}.")
    serve(Limits(options.max_seconds, options.max_chars), can_run=options.allow_run)
    return 0


def _skill(options: argparse.Namespace) -> int:
    from axon_nb.remote.mcp_server import skill

    print(skill(), end="")
    return 0


AGENT_COMMANDS: Mapping[str, ProgramCommand] = {
    "mcp": ProgramCommand(
        "serve tools for agents over the Model Context Protocol",
        "Serve tools for agents over the Model Context Protocol, on standard input and output. They only read, unless "
        "--allow-run is given. Example: axon-nb mcp --allow-run",
        _mcp_arguments,
        _mcp,
    ),
    "skill": ProgramCommand(
        "print the instructions for agents",
        "Print SKILL.md, the instructions for agents. Example: axon-nb skill",
        lambda parser: None,
        _skill,
    ),
}
