"""`%distributed`: the cluster's commands."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from typing import Any

from IPython.core.magic import Magics, line_magic, magics_class
from IPython.display import display

from axon_nb.cluster.cells.driver import CellHandle
from axon_nb.cluster.inspection.status import ClusterStatus
from axon_nb.cluster.inspection.variables import summary_of
from axon_nb.cluster.launch.placement import explain_number
from axon_nb.cluster.session import current, kept, start
from axon_nb.cluster.session.discovery import stop_detached
from axon_nb.magics.arguments import LineParser, command, raw_command
from axon_nb.magics.scripts import import_parser, import_script, run_parser, script_cell
from axon_nb.magics.subcommands import SUBCOMMANDS, doctor, export_parser, export_session
from axon_nb.records.ranks import name_ranks
from axon_nb.troubleshooting import explain
from axon_nb.usage import unknown_command


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer; got {text!r}") from None


def _start_parser() -> LineParser:
    parser = LineParser("%distributed start", "Start a cluster.")
    parser.add_argument("-n", type=_number, default=None, help="number of ranks")
    parser.add_argument("--devices", default="auto", help="auto, cpu, or GPU numbers such as 2,5")
    parser.add_argument("--backend", default="auto", help="auto, shm, gloo or nccl")
    parser.add_argument("--engines", default=None, help="axon: forked ranks (the default), or local: plain processes")
    parser.add_argument("--name", default=None, help="name of the cluster")
    parser.add_argument(
        "--interface", default=None, help="network interface through which ranks on other hosts connect"
    )
    parser.add_argument("--hosts", default=None, help="other hosts with ranks: ssh:a,b, slurm, mpi:a,b or join")
    parser.add_argument(
        "--protect", nargs="?", const="on", metavar="K", help="keep every step, or every K-th, for dead ranks"
    )
    parser.add_argument(
        "--force", action="store_true", help="stop ranks that this notebook left running even while a cell runs there"
    )
    return parser


def _attach_parser() -> LineParser:
    parser = LineParser("%distributed attach", "Reconnect to a cluster that is still running.")
    parser.add_argument("name", nargs="?", default=None, metavar="NAME")
    return parser


def _config_parser() -> LineParser:
    parser = LineParser("%distributed config", "Show or change settings, and report when a change takes effect.")
    parser.add_argument("assignments", nargs="*", metavar="key=value", help="such as keep_alive=5min output_limit=4MiB")
    return parser


def _diff_parser() -> LineParser:
    parser = LineParser("%distributed diff", "Show where a variable differs between ranks.")
    parser.add_argument("name", metavar="NAME")
    help_text = "the rank to compare with (default: 0)"
    parser.add_argument("--from", dest="source", type=_number, default=0, metavar="R", help=help_text)
    return parser


def _stacks_parser() -> LineParser:
    parser = LineParser("%distributed stacks", "Show where each rank is.")
    parser.add_argument("--ranks", default=None, help="which ranks (default: all)")
    return parser


def _repair_parser() -> LineParser:
    parser = LineParser("%distributed repair", "Replace dead ranks; all others keep their state.")
    parser.add_argument("--ranks", default=None, help="which ranks (default: those that are dead)")
    parser.add_argument("--from", dest="source", type=_number, default=None, metavar="R", help="copy R's variables")
    parser.add_argument("--on", dest="host", default=None, metavar="HOST", help="where (default: where they were)")
    parser.add_argument("names", nargs="*", help="which variables (default: all that can be copied)")
    return parser


def _resize_parser() -> LineParser:
    parser = LineParser("%distributed resize", "Change the number of ranks; models and variables are carried over.")
    parser.add_argument("n", type=_number, metavar="N", help="number of ranks afterwards")
    return parser


def _undo_parser() -> LineParser:
    parser = LineParser("%distributed undo", "Take back the last cells on all their ranks, bit for bit.")
    parser.add_argument("count", nargs="?", type=_number, default=1, metavar="K", help="how many cells (default: 1)")
    return parser


def _sync_parser() -> LineParser:
    parser = LineParser("%distributed sync", "Copy models, optimizers and schedulers of one rank to all.")
    parser.add_argument("--from", dest="source", type=_number, default=0, metavar="R", help="copy R's (default: 0)")
    parser.add_argument("names", nargs="*", help="which variables (default: all that can be copied)")
    return parser


@magics_class
class DistributedMagics(Magics):
    """The subcommands of `%distributed`."""

    @line_magic
    def distributed(self, line: str) -> Any:
        """`%distributed COMMAND`, such as `%distributed start -n 4`; `%distributed start?` documents one command.

        status · stop · restart, and:

        vars: the ranks' variables, and which differ · diff NAME [--from R]: where one differs
        sync [--from R] [names …]: copy models and optimizers of rank R (default: 0) to all ranks
        undo [K]: take back the last K cells (large models: after `config undo_memory=1GiB`)
        save NAME · load NAME: write the state of all ranks to a folder; load it, on any number of ranks
        resize N: grow or shrink to N ranks; models, optimizers and samplers are carried over
        repair [--ranks R] [--from R [names …]] [--on HOST] · stacks [--ranks R] · attach [NAME] · cancel
        config [key=value …]
        run train.py [arguments]: run a script on the ranks, as torchrun would; its variables stay
        import train.py [-o NOTEBOOK] [--args WORDS] [--force]: cut a script into the cells of a notebook
        export FILE [--live-only] [--force]: write the cells that ran on ranks as a script for torchrun
        start [-n N] [--devices auto|cpu|2,5] [--backend auto|shm|gloo|nccl] [--engines axon|local] [--name NAME]
              [--protect [K]]: keep every step, or every K-th, for ranks that die
              [--force]: end ranks that were left even while a cell runs there
        start -n N --hosts ssh:a,b or mpi:a,b: run ranks there, too · --hosts slurm: on the nodes of the allocation
        start -n N --hosts join --interface eth0: print a command that lets another host run ranks
        slow [--ranks R --factor X] [--link A-B|--all-links] [--mbit M] [--latency T] · slow off: ends it
        auto on|off: run plain cells on ranks · seed 0 [--per-rank] · debug [--ranks 2]: after a failed cell
        doctor [--json]: check versions, GPUs, limits, network and clusters of this machine; a fix for each problem
        help [NAME or words of a message]: explain a message

        Example: `%distributed start -n 4`.
        """
        commands = self.commands()
        word, *rest = line.split() or [""]
        if word == "help" and rest:
            print(explain(rest))
            return None
        if word in ("--help", "help", "?"):
            print(inspect.getdoc(DistributedMagics.distributed))
            return None
        if word not in commands:
            raise unknown_command("%distributed", word, commands)
        return commands[word](rest)

    def commands(self) -> dict[str, Callable[[list[str]], Any]]:
        """Return the functions of the commands by name; each takes the command's arguments."""
        return {
            "start": self._start,
            "status": self._status,
            "stacks": self._stacks,
            "stop": self._stop,
            "repair": self._repair,
            "resize": self._resize,
            "restart": self._restart,
            "attach": self._attach,
            "cancel": self._cancel,
            "sync": self._sync,
            "undo": self._undo,
            "vars": self._vars,
            "diff": self._diff,
            "config": self._config,
            "export": self._export,
            "run": self._run,
            "import": self._import,
            "doctor": doctor,
            **SUBCOMMANDS,
        }

    @command(_start_parser)
    def _start(self, options: argparse.Namespace) -> None:
        if options.protect is not None:
            print("\n".join(current.session().settings.set(f"protect={options.protect}")))
        cluster = start.start(
            options.n,
            devices=options.devices,
            backend=options.backend,
            engines=options.engines,
            name=options.name,
            interface=options.interface,
            hosts=options.hosts,
            force=options.force,
        )
        if options.n is None and (reason := explain_number(cluster.state.layout)):
            print(reason)
        display(cluster)

    @command(lambda: LineParser("%distributed status", "Show the ranks."))
    def _status(self, options: argparse.Namespace) -> Any:
        return ClusterStatus(kept.require("%distributed status").info())

    @command(lambda: LineParser("%distributed vars", "Show the variables of the ranks."))
    def _vars(self, options: argparse.Namespace) -> Any:
        return kept.require("%distributed vars").variables()

    @command(_diff_parser)
    def _diff(self, options: argparse.Namespace) -> Any:
        differences = kept.require("%distributed diff").diff(options.name, options.source)
        if summary := summary_of(options.name, differences):
            print(summary)
        return None if differences.empty else differences

    @command(_stacks_parser)
    def _stacks(self, options: argparse.Namespace) -> None:
        print(kept.require("%distributed stacks").stacks(options.ranks))

    @command(lambda: LineParser("%distributed stop", "Stop the cluster."))
    def _stop(self, options: argparse.Namespace) -> None:
        session = current.session()
        if session.cluster is None and (lines := [*filter(None, [session.loss]), *stop_detached()]):
            session.drop()
            print("\n".join(lines))
            return
        cluster = kept.require("%distributed stop")
        cluster.stop()
        session.drop(cluster)
        count = f"{cluster.world_size} rank{'' if cluster.world_size == 1 else 's'}"
        print(f"Stopped the cluster {cluster.name!r} ({count}).")

    @command(lambda: LineParser("%distributed restart", "Stop all ranks and start new ones."))
    def _restart(self, options: argparse.Namespace) -> None:
        kept.require("%distributed restart")
        display(start.restart())

    @command(_repair_parser)
    def _repair(self, options: argparse.Namespace) -> None:
        cluster = kept.require("%distributed repair")
        print(cluster.repair(options.ranks, from_rank=options.source, names=options.names, host=options.host))

    @command(_resize_parser)
    def _resize(self, options: argparse.Namespace) -> None:
        print(kept.require("%distributed resize").resize(options.n))

    @command(_sync_parser)
    def _sync(self, options: argparse.Namespace) -> None:
        print(kept.require("%distributed sync").sync(options.source, options.names))

    @command(_undo_parser)
    def _undo(self, options: argparse.Namespace) -> None:
        print(kept.require("%distributed undo").undo(options.count))

    @command(_attach_parser)
    def _attach(self, options: argparse.Namespace) -> CellHandle | None:
        cluster = start.attach(options.name)
        display(cluster)
        handle = cluster.running_cell
        return None if handle is None or handle.done() else handle

    @command(lambda: LineParser("%distributed cancel", "Interrupt the cells that run in the background."))
    def _cancel(self, options: argparse.Namespace) -> None:
        ranks = kept.require("%distributed cancel").cancel()
        print(f"Interrupted the cell on {name_ranks(ranks)}." if ranks else "No cell is running.")

    @raw_command(run_parser)
    def _run(self, words: list[str]) -> None:
        line = " ".join(words)
        if script_cell(line) is not None:  # raises what is to be raised before ranks start
            self.shell.magics_manager.registry["CellMagics"].run_blocking("run", line, "")

    @raw_command(import_parser)
    def _import(self, words: list[str]) -> None:
        import_script(" ".join(words))  # a line, whose quotes enclose the script's arguments

    @command(export_parser)
    def _export(self, options: argparse.Namespace) -> None:
        print(export_session(self.shell, options))

    @command(_config_parser)
    def _config(self, options: argparse.Namespace) -> None:
        settings = current.session().settings
        print("\n".join(settings.set(" ".join(options.assignments)) or settings.lines()))
