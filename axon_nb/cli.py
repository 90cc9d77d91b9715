"""The command-line program `axon-nb`."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from axon_nb._version import __version__
from axon_nb.errors import AxonError, UsageError
from axon_nb.records.commands import EndpointError, ErrorCode
from axon_nb.remote.commands import AGENT_COMMANDS, REMOTE_COMMANDS
from axon_nb.troubleshooting import explain, more
from axon_nb.usage import CommandParser, ProgramCommand, nearest_option, unknown_command

_PROGRAM = "axon-nb"
_BAD_USAGE = 2


def _export_arguments(parser: CommandParser) -> None:
    parser.add_argument("notebook", type=Path, metavar="NOTEBOOK", help="an .ipynb file")
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="the script to write, a .py file")
    parser.add_argument("--live-only", action="store_true", help="omit cells that the final state does not depend on")
    parser.add_argument("--force", action="store_true", help="overwrite existing files")


def _export(options: argparse.Namespace) -> int:
    from axon_nb.export import export_notebook

    print(export_notebook(options.notebook, options.script, live_only=options.live_only, force=options.force))
    return 0


def _help_arguments(parser: CommandParser) -> None:
    parser.add_argument("words", nargs="*", metavar="NAME", help="its name, or words of it; default: list all")


def _explain(options: argparse.Namespace) -> int:
    print(explain(options.words))
    return 0


def _host_arguments(parser: CommandParser) -> None:
    ways = parser.add_mutually_exclusive_group(required=True)
    ways.add_argument("--join", metavar="IP:PORT", help="where the notebook's host listens")
    ways.add_argument(
        "--k8s-template", action="store_true", help="print the Job that `--hosts k8s` makes for each host"
    )
    parser.add_argument("--name", default="", help="name of this host in the cluster; default: its host name")
    parser.add_argument(
        "--read-key", action="store_true", help="read the cluster's key from standard input, not AXON_NB_JOIN_KEY"
    )
    parser.add_argument(
        "--tunnel",
        nargs="+",
        type=int,
        default=(),
        metavar="PORT",
        help="of the notebook's host, in a pod: `--hosts k8s`",
    )


def _host(options: argparse.Namespace) -> int:
    if options.k8s_template:
        from axon_nb.host.schedulers.k8s import TEMPLATE

        print(TEMPLATE, end="")
        return 0
    from axon_nb.host.agent import join_cluster

    return join_cluster(options.join, name=options.name, read_key=options.read_key, tunnel=options.tunnel)


def _import_arguments(parser: CommandParser) -> None:
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="a script for torchrun, a .py file")
    parser.add_argument(
        "-o", "--out", type=Path, default=None, metavar="NOTEBOOK", help="the .ipynb file; default: beside the script"
    )
    parser.add_argument(
        "--args", default="", metavar="WORDS", help="the script's arguments, such as --args='--epochs 3'"
    )
    parser.add_argument("--force", action="store_true", help="overwrite the notebook")


def _import(options: argparse.Namespace) -> int:
    from axon_nb.script import import_script

    print(import_script(options.script, options.out, arguments=options.args, force=options.force))
    return 0


def _json_argument(parser: CommandParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _doctor_arguments(parser: CommandParser) -> None:
    _json_argument(parser)
    parser.add_argument("--hosts", default=None, help="check ray, ray:ADDRESS, k8s or k8s:NAMESPACE instead")


def _doctor(options: argparse.Namespace) -> int:
    from axon_nb.doctor.examine import examine

    report = examine(options.hosts)
    print(report.json() if options.json else report.text())
    return report.status


def _list_arguments(parser: CommandParser) -> None:
    _json_argument(parser)
    parser.add_argument("--all", action="store_true", help="of all users, as far as this user may see them")


def _list(options: argparse.Namespace) -> int:
    from axon_nb.doctor.clusters import find_all, find_clusters, overview, table

    clusters: Any = find_all() if options.all else find_clusters()
    if options.json:
        print(json.dumps([one.to_json() for one in clusters], indent=2))
    else:
        print(overview(clusters) if options.all else table(clusters))
    return 0


def _quickstart_arguments(parser: CommandParser) -> None:
    default = Path("axon_nb_quickstart")
    text = f"where to put it; default: {default}"
    parser.add_argument("folder", nargs="?", type=Path, default=default, metavar="DIR", help=text)
    parser.add_argument("--no-open", action="store_true", help="only copy it")


def _quickstart(options: argparse.Namespace) -> int:
    from axon_nb.quickstart import copy_notebook, open_notebook

    notebook, is_original = copy_notebook(options.folder)
    print(f"The notebook is {notebook}." if is_original else f"{notebook} has been changed and stays as it is.")
    return 0 if options.no_open else open_notebook(notebook)


def _stop_arguments(parser: CommandParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="default: the only cluster that no notebook uses")
    parser.add_argument("--all", action="store_true", help="stop all clusters that no notebook uses")
    parser.add_argument("--force", action="store_true", help="also stop clusters that a notebook uses")


def _stop(options: argparse.Namespace) -> int:
    from axon_nb.doctor.clusters import stop_clusters

    print("\n".join(stop_clusters(options.name, everything=options.all, force=options.force)))
    return 0


def _folder_argument(parser: CommandParser) -> None:
    parser.add_argument("folder", nargs="?", type=Path, metavar="DIR")


def _without_course(options: argparse.Namespace) -> int:
    raise UsageError("The course is a package of its own: run `pip install ./course` in a checkout of axon_nb.")


def _course_commands() -> Mapping[str, ProgramCommand]:
    """Return the commands of the course; if it is not installed, ones that say how to get it."""
    try:
        commands: Mapping[str, ProgramCommand] = importlib.import_module("axon_course.program").COURSE_COMMANDS
    except ModuleNotFoundError:
        text = "the course, a package of its own: says how to get it"
        missing = ProgramCommand(text, text, _folder_argument, _without_course)
        return {"class": missing, "course": missing}
    return commands


_COMMANDS: Mapping[str, ProgramCommand] = {
    **_course_commands(),
    "doctor": ProgramCommand(
        "check this machine and installation",
        "Show versions, what works with this torch, GPUs, limits, network and clusters, and a fix for each problem. "
        "Exit status: 1 if there is a problem, else 0. Example: axon-nb doctor --json",
        _doctor_arguments,
        _doctor,
    ),
    "export": ProgramCommand(
        "write a notebook's %%distributed cells as a script for torchrun",
        "Write the %%distributed cells of a notebook that has run, in the order of their prompts, as one "
        "script for torchrun. Example: axon-nb export digits.ipynb train.py",
        _export_arguments,
        _export,
    ),
    "help": ProgramCommand(
        "explain a message",
        "Show the cause of a message, and what to do. Example: axon-nb help no-cluster",
        _help_arguments,
        _explain,
    ),
    "host": ProgramCommand(
        "let this host run ranks of a notebook's cluster on another host",
        "Join the cluster of a notebook on another host, and run ranks here until it stops. `%distributed start "
        "--hosts join` prints the whole command. Example: axon-nb host --join 10.0.0.1:40123",
        _host_arguments,
        _host,
    ),
    "import": ProgramCommand(
        "cut a script for torchrun into the cells of a notebook",
        "Cut a script for torchrun into cells: imports, definitions, set-up, loop. Values of its command line are in "
        "one cell; functions such as main() become cells where that is safe. "
        "Example: axon-nb import train.py -o train.ipynb",
        _import_arguments,
        _import,
    ),
    "list": ProgramCommand(
        "show your clusters on this host",
        "Show your clusters on this host, attached and detached, and when a cell last started or ended in each. "
        "Example: axon-nb list --json",
        _list_arguments,
        _list,
    ),
    "quickstart": ProgramCommand(
        "copy the first notebook into a folder and open it in Jupyter",
        "Copy the first notebook and its data into a folder and open it in Jupyter. A notebook that you have changed "
        "is kept. Example: axon-nb quickstart learn",
        _quickstart_arguments,
        _quickstart,
    ),
    "stop": ProgramCommand(
        "stop a detached cluster",
        "Stop a detached cluster through its host agent, and remove the files of dead clusters. "
        "Example: axon-nb stop digits",
        _stop_arguments,
        _stop,
    ),
    **REMOTE_COMMANDS,
    **AGENT_COMMANDS,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 0, 1 if it fails or finds a problem, 2 for bad usage.

    Commands on a running cluster have further ones, by `ErrorCode`.

    Args:
        argv: Its arguments; None for those of this process.
    """
    word, *rest = (sys.argv[1:] if argv is None else list(argv)) or [""]
    if word in ("-h", "--help") or [word, *rest] == ["help"]:
        print(_help())
        return 0
    if word in ("-V", "--version"):
        print(f"axon_nb {__version__}")
        return 0
    if word == "help" and len(rest) == 1 and rest[0] in _COMMANDS:
        word, rest = rest[0], ["--help"]
    try:
        options = _parse(word, rest)
    except UsageError as error:
        _report(EndpointError(ErrorCode.BAD_REQUEST, str(error)) if "--json" in rest else error)
        return _BAD_USAGE
    try:
        return _COMMANDS[word].run(options)
    except EndpointError as error:
        _report(error if getattr(options, "json", False) else AxonError(str(error)))
        return error.code.exit_status
    except AxonError as error:
        _report(error)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `axon-nb doctor | head`
        sys.stderr.close()
        return 1


def _parse(word: str, rest: list[str]) -> argparse.Namespace:
    """Parse the options of a subcommand.

    Raises:
        UsageError: the command is unknown or does not accept them.
    """
    if word not in _COMMANDS:
        if word.startswith("-"):
            raise UsageError(f"{_PROGRAM} has no {word!r}{nearest_option(word, ['--help', '--version'])}")
        raise unknown_command(_PROGRAM, word, _COMMANDS)
    command = _COMMANDS[word]
    parser = CommandParser(prog=f"{_PROGRAM} {word}", description=command.description, allow_abbrev=False)
    command.add_arguments(parser)
    options, unknown = parser.parse_known_args(rest)
    for item in unknown:
        if item.startswith("-"):
            raise UsageError(f"{parser.prog} has no {item!r}{nearest_option(item, parser.options())}")
        raise UsageError(f"{parser.prog} does not accept {item!r}; see `{parser.prog} --help`.")
    return options


def _help() -> str:
    width = max(map(len, _COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {command.summary}" for name, command in _COMMANDS.items())
    head = f"usage: {_PROGRAM} COMMAND ..., or {_PROGRAM} --version\n\nDistributed PyTorch in a notebook.\n"
    return f"{head}\n{rows}\n\nSee `{_PROGRAM} COMMAND --help` for the options of a command."


def _report(error: AxonError) -> None:
    """Print an error: one for a program as JSON on standard output."""
    if isinstance(error, EndpointError):
        print(json.dumps(error.to_json()))
    else:
        print(_format_error(error), file=sys.stderr)


def _format_error(error: AxonError) -> str:
    text = str(error)
    shown = text if text.startswith(_PROGRAM) else f"{_PROGRAM}: {text}"
    return shown if isinstance(error, UsageError) else "\n".join([shown, *more(text, f"{_PROGRAM} help")])


if __name__ == "__main__":
    sys.exit(main())
