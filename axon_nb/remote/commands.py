"""The commands of `axon-nb` on a running cluster, for plans, and for agents: what they accept, and what they print."""

from __future__ import annotations

import argparse
import ast
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axon_nb.errors import AxonError, UsageError
from axon_nb.records.commands import COMMANDS, PLAN, ClusterCommand, EndpointError, ErrorCode
from axon_nb.usage import CommandParser, ProgramCommand

if TYPE_CHECKING:
    from axon_nb.remote.tools import NotebookClient

_POLL_S = 0.5
_LONG_S = 600.0
"""For what takes as long as the ranks need."""
_STATUSES = (
    "Exit status: 0, or 1 if it failed, 2 for bad usage, 3 without such a cluster or notebook, 4 if the notebook does "
    "not allow it, 5 while a cell runs, 6 if the notebook does not reply."
)
SIZES: Mapping[str, tuple[int, int, int]] = {
    "125m": (768, 12, 12),
    "350m": (1024, 16, 24),
    "1.3b": (2048, 32, 24),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 56, 48),
    "66b": (9216, 72, 64),
    "175b": (12288, 96, 96),
}
"""Hidden size, heads and blocks of GPTs by number of parameters: table 1 of the OPT paper, arXiv:2205.01068."""
_VOCAB = 50304
_MIN_CHARS = 500
_WHICH = "the cluster; default: the only one"


def connect(name: str | None) -> NotebookClient:
    """Return a client of the notebook that uses the cluster."""
    from axon_nb.remote import tools  # loads psutil

    return tools.connect(name)


def _common(parser: CommandParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, also errors: {error: {code, message}}")


def _named(parser: CommandParser) -> None:
    parser.add_argument("cluster", nargs="?", default=None, metavar="NAME", help=_WHICH)
    _common(parser)


def _with_option(parser: CommandParser) -> None:
    parser.add_argument("--cluster", default=None, metavar="NAME", help=_WHICH)
    parser.add_argument("--ranks", default=None, metavar="RANKS", help="which ranks: 0 or 0,2-3 (default: all)")
    _common(parser)


def _print(options: argparse.Namespace, reply: Mapping[str, Any]) -> int:
    if options.json:
        _line({key: value for key, value in reply.items() if key != "text"})
    else:
        print(reply["text"])
    return 0


def _line(value: Mapping[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def _shared(name: str, command: ClusterCommand) -> ProgramCommand:
    """Return `axon-nb NAME` for a command that notebooks share."""
    on_named = all(option.flag for option in command.options)

    def add_arguments(parser: CommandParser) -> None:
        for option in command.options:
            option.add_to(parser)
        if on_named:  # nothing else stands without an option
            _named(parser)
        else:
            parser.add_argument("--cluster", dest="cluster", default=None, metavar="NAME", help=_WHICH)
            _common(parser)

    def run(options: argparse.Namespace) -> int:
        given = {option.name: getattr(options, option.name) for option in command.options}
        return _print(options, connect(options.cluster).request(name, timeout_s=command.timeout_s, **given))

    example = f"axon-nb {name} {command.example.partition('  ')[0]}".rstrip()
    return _command(command.summary, example, add_arguments, run, needs_share=command.changes)


def _logs_arguments(parser: CommandParser) -> None:
    parser.add_argument("--follow", action="store_true", help="go on until the cell is done")
    _named(parser)


def _logs(options: argparse.Namespace) -> int:
    client = connect(options.cluster)
    reply = client.request("logs")
    _print(options, reply)
    while options.follow and reply["running"]:
        time.sleep(_POLL_S)
        reply = client.request("logs", run=reply["run"], since=reply["since"])
        if reply["output"] or not reply["running"]:
            _print(options, reply)
    return 0


def _run_arguments(parser: CommandParser) -> None:
    parser.add_argument("code", metavar="CODE", help="Python as in a cell, a .py file, or - for standard input")
    parser.add_argument("--timeout", type=float, default=None, metavar="SECONDS", help="abort it after this time")
    _with_option(parser)


def _run(options: argparse.Namespace) -> int:
    client = connect(options.cluster)
    reply = client.request("run", code=_code(options.code), ranks=options.ranks, timeout=options.timeout)
    run = reply["run"]
    if options.json:
        _line({"event": "started", "run": run})
    since: dict[str, int] = {}
    try:
        while True:
            reply = client.request("poll", run=run, since=since, wait_s=_POLL_S)
            since = reply["since"]
            for group in reply["output"]:
                if options.json:
                    _line({"event": "output", **group})
                else:
                    print(f"[ranks {group['ranks']}]\n{group['text']}", end="", flush=True)
            if reply["done"] and not reply["more"]:
                break
    except KeyboardInterrupt:
        client.request("cancel", run=run)
        raise
    result = reply["result"]
    if options.json:
        _line({"event": "result", "result": result})
    elif result["state"] != "ok":
        print(_failure(result), file=sys.stderr)
    return 0 if result["state"] == "ok" else 1


def _code(text: str) -> str:
    if text == "-":
        return sys.stdin.read()
    if text.endswith(".py") and "\n" not in text:
        try:
            return Path(text).read_text(encoding="utf-8")
        except OSError as error:
            raise UsageError(f"axon-nb run: cannot read {text}: {error.strerror}.") from None
    return text


def _failure(result: Mapping[str, Any]) -> str:
    cause = result["cause"]
    if result["verdict"] or cause is None:
        return f"axon-nb: the cell {result['state']}. {result['verdict']}".rstrip()
    where = f" ({cause['file']}, line {cause['line']})" if cause["file"] else ""
    what = f"{cause['type']}: {cause['message']}" if cause["type"] else cause["message"]
    return f"axon-nb: the cell {result['state']} on ranks {cause['ranks']}: {what}{where}"


def _push_arguments(parser: CommandParser) -> None:
    parser.add_argument("values", nargs="+", metavar="NAME=VALUE", help="a Python literal, such as lr=0.1")
    _with_option(parser)


def _push(options: argparse.Namespace) -> int:
    values = {}
    for text in options.values:
        name, separator, literal = text.partition("=")
        try:
            values[name] = ast.literal_eval(literal)
            json.dumps(values[name])
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            separator = ""
        if not separator:
            raise UsageError(f"axon-nb push takes NAME=VALUE with a number, text, list or dict; got {text!r}.")
    return _print(
        options, connect(options.cluster).request("push", timeout_s=_LONG_S, values=values, ranks=options.ranks)
    )


def _pull_arguments(parser: CommandParser) -> None:
    parser.add_argument("expression", metavar="NAME", help="a variable or an expression")
    _with_option(parser)


def _pull(options: argparse.Namespace) -> int:
    client = connect(options.cluster)
    return _print(
        options, client.request("pull", timeout_s=_LONG_S, expression=options.expression, ranks=options.ranks)
    )


def _plan_arguments(parser: CommandParser) -> None:
    for option in PLAN.options:
        option.add_to(parser)
    _common(parser)


def _plan(options: argparse.Namespace) -> int:
    return _print(options, plan_layouts(**{option.name: getattr(options, option.name) for option in PLAN.options}))


def _with_code(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Return the command such that each of its errors has a code."""

    def run_with_code(options: argparse.Namespace) -> int:
        try:
            return run(options)
        except EndpointError:
            raise
        except AxonError as error:
            code = ErrorCode.BAD_REQUEST if isinstance(error, UsageError) else ErrorCode.FAILED
            raise EndpointError(code, str(error)) from error

    return run_with_code


def _command(
    summary: str,
    example: str,
    add_arguments: Callable[[CommandParser], None],
    run: Callable[[argparse.Namespace], int],
    *,
    needs_share: bool = False,
) -> ProgramCommand:
    needs = " The notebook must allow it with `%distributed config share=on`." if needs_share else ""
    description = f"{summary[0].upper()}{summary[1:]}.{needs} {_STATUSES} Example: {example}"
    return ProgramCommand(summary, description, add_arguments, _with_code(run))


REMOTE_COMMANDS: Mapping[str, ProgramCommand] = {
    **{name: _shared(name, command) for name, command in COMMANDS.items()},
    "logs": _command("show what the ranks printed", "axon-nb logs --follow --json", _logs_arguments, _logs),
    "run": _command(
        "run a cell on ranks, and show what it prints",
        "axon-nb run 'print(rank)' --json",
        _run_arguments,
        _run,
        needs_share=True,
    ),
    "push": _command("set variables on ranks", "axon-nb push lr=0.1", _push_arguments, _push, needs_share=True),
    "pull": _command(
        "show the value of a name or an expression on ranks",
        "axon-nb pull loss --ranks 0",
        _pull_arguments,
        _pull,
        needs_share=True,
    ),
    "plan": _command(PLAN.summary, f"axon-nb plan {PLAN.example}", _plan_arguments, _plan),
}


def plan_layouts(
    model: str,
    ranks: int,
    *,
    card: str,
    memory_gib: float | None,
    context: int,
    global_batch: int | None,
    max_ep: int | None,
    max_cp: int | None,
    optimizer: str,
    top: int,
) -> dict[str, Any]:
    """Rank the layouts of a model's training step in bfloat16.

    Args:
        model: The size of a GPT such as ``7B``, or a causal language model of Hugging Face: its name or folder.
        ranks: Number of GPUs.
        card: The GPU's name, such as ``h100``.
        memory_gib: GiB per GPU; None: the card's.
        context: Tokens in a sample.
        global_batch: Samples per step over all GPUs; None: two per GPU.
        max_ep: As in `plan.search`.
        max_cp: As in `plan.search`.
        optimizer: Its name in `torch.optim`, or Muon.
        top: How many layouts to return.

    Raises:
        UsageError: the card or a number is invalid, or the model cannot be planned.
    """
    from axon_nb import plan
    from axon_nb.plan.hardware import CARDS

    if card not in CARDS:
        raise UsageError(f"--card {card}: must be one of {', '.join(CARDS)}.")
    size = SIZES.get(model.lower())
    source: Any = model
    options: dict[str, Any] = {"seq": context, "max_ep": max_ep, "max_cp": max_cp, "optimizer": optimizer}
    if size is not None:
        from axon_nb.parallel.models import GPTConfig

        hidden, heads, blocks = size
        source = GPTConfig(vocab=_VOCAB, context=context, hidden=hidden, heads=heads, blocks=blocks)
    elif "/" not in model:
        raise UsageError(f"{model!r} must be one of {', '.join(SIZES)}, or a model of Hugging Face such as org/name.")
    limit = CARDS[card].gib if memory_gib is None else memory_gib
    table = plan.search(
        source,
        ranks,
        limit,
        rates=card,
        links=card,
        global_batch=global_batch,
        mixed_precision="bfloat16",
        **options,
    )
    layouts = [
        {
            key.removeprefix("num_"): round(value, 3) if isinstance(value, float) else value
            for key, value in one.row.items()
            if key != "simulated"
        }
        for one in table.candidates[: max(1, top)]
    ]
    return {
        "title": table.title,
        "fits": table.best is not None,
        "global_batch": table.global_batch,
        "layouts": layouts,
        "notes": list(table.notes),
        "text": str(table),
    }


def _mcp_arguments(parser: CommandParser) -> None:
    parser.add_argument("--allow-run", action="store_true", help="also start clusters and run cells")
    parser.add_argument(
        "--max-seconds", type=float, default=60.0, metavar="S", help="longest time of one call (default: 60)"
    )
    parser.add_argument(
        "--max-chars", type=int, default=8000, metavar="N", help="most characters of one reply (default: 8000)"
    )


def _mcp(options: argparse.Namespace) -> int:
    from axon_nb.remote.tools import Limits, serve

    if options.max_seconds <= 0 or options.max_chars < _MIN_CHARS:
        raise UsageError(f"axon-nb mcp: --max-seconds must be above 0, and --max-chars at least {_MIN_CHARS}.")
    serve(Limits(options.max_seconds, options.max_chars), can_run=options.allow_run)
    return 0


def _skill(options: argparse.Namespace) -> int:
    from axon_nb.remote.tools import skill

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
