"""`%distributed`: the cluster's commands."""

from __future__ import annotations

import argparse
import inspect
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.error import StdinNotImplementedError
from IPython.core.magic import Magics, line_magic, magics_class
from IPython.display import DisplayHandle, display

from axon_nb.cluster.cells.driver import CellHandle
from axon_nb.cluster.commands import perform
from axon_nb.cluster.debugger import PostMortem
from axon_nb.cluster.inspection.status import ClusterStatus
from axon_nb.cluster.inspection.variables import summary_of
from axon_nb.cluster.launch.connection import in_kernel
from axon_nb.cluster.launch.placement import explain_number
from axon_nb.cluster.session import clusters, current
from axon_nb.cluster.session.clusters import stop_detached
from axon_nb.cluster.settings import seconds
from axon_nb.cluster.transfer import load_session, save_session, seed
from axon_nb.errors import AxonError, CellInterrupt, UsageError
from axon_nb.magics.arguments import LineParser, command, raw_command
from axon_nb.records.commands import COMMANDS, integer
from axon_nb.records.ranks import name_ranks, resolve_ranks
from axon_nb.records.slowness import SlowLink, Slowness
from axon_nb.records.units import count_of
from axon_nb.troubleshooting import explain
from axon_nb.usage import unknown_command

if TYPE_CHECKING:
    import pandas as pd


def _auto_parser() -> LineParser:
    parser = LineParser(
        "%distributed auto",
        "Run plain cells on ranks, and start ranks if there are none; a %%local cell runs in the notebook.",
    )
    parser.add_argument("state", nargs="?", choices=("on", "off"), default=None, help="default: show the current mode")
    parser.add_argument("--ranks", metavar="RANKS", default=None, help="which ranks: 0 or 0,2-3 (default: all)")
    return parser


@command(_auto_parser)
def _auto(options: argparse.Namespace) -> None:
    """Turn auto mode on or off, or show it: `%distributed auto on [--ranks R]`."""
    session = current.session()
    auto = session.auto
    if options.state == "on":
        cluster = session.cluster
        if options.ranks and cluster is not None:
            resolve_ranks(options.ranks, cluster.world_size)
        auto.on, auto.ranks = True, options.ranks
    elif options.state == "off":
        auto.on, auto.ranks = False, None
    where = f"ranks {auto.ranks}" if auto.ranks else "all ranks"
    if auto.on:
        print(f"Plain cells run on {where}; cells that start with %%local or another %% magic run in the notebook.")
    else:
        print("Plain cells run in the notebook; cells that start with %%distributed run on ranks.")


def _seed_parser() -> LineParser:
    parser = LineParser("%distributed seed", "Seed random, numpy and torch (all devices) on all ranks.")
    parser.add_argument("value", metavar="SEED", help="an integer, 0 or more")
    parser.add_argument("--per-rank", action="store_true", help="seed each rank with SEED + rank instead of SEED")
    return parser


@command(_seed_parser)
def _seed(options: argparse.Namespace) -> None:
    """Seed `random`, NumPy and torch on all ranks: `%distributed seed 0 [--per-rank]`."""
    if not options.value.isdecimal():
        raise UsageError(f"%distributed seed: SEED must be an integer, 0 or more; got {options.value!r}.")
    print(seed(clusters.require("%distributed seed").cells, int(options.value), per_rank=options.per_rank))


def _debug_parser() -> LineParser:
    parser = LineParser(
        "%distributed debug", "Open IPython's debugger on a rank's last failed cell; possible until its next cell."
    )
    parser.add_argument("--ranks", metavar="RANK", default=None, help="which rank (default: the first that failed)")
    return parser


@command(_debug_parser)
def _debug(options: argparse.Namespace) -> None:
    """Open IPython's debugger on the last failure of one rank: `%distributed debug [--ranks 2]`."""
    debugger = PostMortem(clusters.require("%distributed debug").cells, options.ranks)
    print(f"Rank {debugger.rank}: {debugger.error}. Use the commands of pdb: u, d, p NAME, l, w; q quits.")
    print(debugger.start(), end="")
    ended = False
    while not ended:
        try:
            text, ended = debugger.command(input(f"ipdb rank {debugger.rank}> "))
        except CellInterrupt as error:  # interrupts the command, not the debugger
            text = f"{error}\n"
        except (EOFError, KeyboardInterrupt):
            break
        except StdinNotImplementedError:
            raise UsageError(
                "%distributed debug needs a front end with input(); this one has none. Use an interactive notebook."
            ) from None
        except AxonError as error:
            text = f"{error}\n"
            ended = not debugger.alive
        print(text, end="")


@command(lambda: LineParser("%distributed pause", "Give back the GPU memory that torch and NCCL keep for later."))
def _pause(options: argparse.Namespace) -> None:
    """Give back the GPU memory that idle ranks keep for later: `%distributed pause`."""
    print(clusters.require("%distributed pause").cells.pause())


def _folder_parser(command: str, description: str) -> LineParser:
    parser = LineParser(f"%distributed {command}", description)
    parser.add_argument("folder", metavar="NAME", help="a folder that all ranks see")
    return parser


@command(lambda: _folder_parser("save", "Write the state of all ranks to a folder."))
def _save(options: argparse.Namespace) -> None:
    """Write the session of all ranks: `%distributed save NAME`."""
    print(save_session(clusters.require("%distributed save").cells, options.folder))


@command(lambda: _folder_parser("load", "Load what `%distributed save` has written, on any number of ranks."))
def _load(options: argparse.Namespace) -> None:
    """Load a saved session: `%distributed load NAME`."""
    print(load_session(clusters.require("%distributed load").cells, options.folder))


def _slow_parser() -> LineParser:
    parser = LineParser("%distributed slow", "Make ranks or links slow, to see what that costs; `slow off` ends it.")
    parser.add_argument("state", nargs="?", choices=("off",), default=None, help="default: show what is slow")
    parser.add_argument("--ranks", metavar="RANKS", default=None, help="ranks that compute slowly: 2 or 0,2-3")
    parser.add_argument("--factor", metavar="X", type=float, default=None, help="how many times as long they compute")
    links = parser.add_mutually_exclusive_group()
    links.add_argument("--link", metavar="A-B", default=None, help="two ranks whose messages are slow, such as 0-1")
    links.add_argument("--all-links", action="store_true", help="messages between all ranks are slow")
    parser.add_argument("--mbit", metavar="M", type=float, default=0.0, help="the link's rate in Mbit/s")
    parser.add_argument("--latency", metavar="T", default="0", help="seconds that each message takes, such as 5ms")
    return parser


@command(_slow_parser)
def _slow(options: argparse.Namespace) -> None:
    """Make ranks or links slow: `%distributed slow --ranks 2 --factor 2`, `--link 0-1 --mbit 100`, `off`."""
    state = clusters.require("%distributed slow").state
    slowness = Slowness() if options.state else state.slowness
    if (options.ranks is None) != (options.factor is None):
        raise UsageError("%distributed slow: --ranks and --factor go together, such as --ranks 2 --factor 2.")
    if options.ranks is not None:
        slowness = slowness.with_ranks(resolve_ranks(options.ranks, state.world_size), options.factor)
    latency_s = seconds().read("--latency", options.latency)
    if options.link is not None or options.all_links:
        ranks = () if options.all_links else _ends(options.link, state.world_size)
        slowness = slowness.with_link(SlowLink(ranks, latency_s, options.mbit))
    elif latency_s or options.mbit:
        raise UsageError("%distributed slow: --mbit and --latency need --link A-B or --all-links.")
    if slowness != state.slowness:
        state.set_slowness(slowness)
    print(f"Slowed: {slowness}. `%distributed slow off` ends it." if slowness else "Nothing is slowed.")


def _ends(text: str, world_size: int) -> tuple[int, ...]:
    """Return the two ranks of a link, the lower first."""
    ends = text.split("-")
    if len(ends) != 2 or not all(end.strip().isdecimal() for end in ends):
        raise UsageError(f"--link: must name two ranks, such as 0-1; got {text!r}.")
    return tuple(sorted(rank for end in ends for rank in resolve_ranks(end, world_size)))


SUBCOMMANDS = {
    "auto": _auto,
    "seed": _seed,
    "debug": _debug,
    "pause": _pause,
    "slow": _slow,
    "save": _save,
    "load": _load,
}
"""Commands by name."""


def export_parser() -> LineParser:
    """Create the parser of `%distributed export`."""
    parser = LineParser("%distributed export", "Write the cells that ran on ranks as a script for torchrun.")
    parser.add_argument("file", metavar="FILE", help="such as train.py")
    parser.add_argument("--live-only", action="store_true", help="omit cells that the final state does not depend on")
    parser.add_argument("--force", action="store_true", help="overwrite existing files")
    return parser


def export_session(shell: Any, options: argparse.Namespace) -> str:
    """Write the cells of this session that ran on ranks as a script; return a report.

    Args:
        shell: The IPython shell whose variables were pushed.
        options: The options of `%distributed export`.

    Raises:
        UsageError: this kernel has started no cluster.
    """
    history = current.session().history
    facts, entries = history.entries()
    if facts is None:
        raise UsageError(
            "Nothing to export: this kernel has started no cluster. Run `axon-nb export NOTEBOOK FILE` to export a "
            "saved notebook."
        )
    from axon_nb.export import export_history

    values = history.sent_values(shell.user_ns)
    report = export_history(
        entries, facts, values, Path(options.file).expanduser(), live_only=options.live_only, force=options.force
    )
    return str(report)


def _doctor_parser() -> LineParser:
    parser = LineParser("%distributed doctor", "Check this machine and installation; shows a fix for each problem.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--hosts", default=None, help="check ray, ray:ADDRESS, k8s or k8s:NAMESPACE instead")
    return parser


@command(_doctor_parser)
def doctor(options: argparse.Namespace) -> None:
    """Check this machine and installation as this kernel sees them, and print a report.

    Args:
        options: The options of `%distributed doctor`.
    """
    from axon_nb.doctor.examine import examine

    if not options.json:
        print("Checking this machine; new versions of torch take half a minute …", flush=True)
    report = examine(options.hosts)
    print(report.json() if options.json else report.text())


def run_parser() -> LineParser:
    """Return the parser of `%distributed run`."""
    parser = LineParser("%distributed run", "Run a script on all ranks, as torchrun would; its variables stay.")
    parser.add_argument("file", metavar="FILE", help="such as train.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    return parser


def script_cell(line: str) -> str | None:
    """Return the cell that runs a script on a rank; print the help and return None if the line asks for it.

    Args:
        line: The words after `%distributed run`: the script and its arguments.

    Raises:
        UsageError: there is no such script.
    """
    try:
        name, *arguments = shlex.split(line) or ["--help"]
    except ValueError as error:
        raise UsageError(f"%distributed run: {error} in {line!r}.") from None
    if name in ("--help", "?", "??"):
        print(run_parser().help())
        return None
    path = Path(name).expanduser().absolute()
    if path.suffix != ".py":
        raise UsageError(f"%distributed run: {name!r} is not a Python script; its name must end in .py.")
    if not path.is_file():
        raise UsageError(f"%distributed run: {path} does not exist.")
    return f"%run {shlex.join([str(path), *arguments])}\n"


def import_parser() -> LineParser:
    """Return the parser of `%distributed import`."""
    parser = LineParser("%distributed import", "Cut a script for torchrun into the cells of a notebook.")
    parser.add_argument("script", metavar="SCRIPT", help="such as train.py")
    parser.add_argument("-o", "--out", metavar="NOTEBOOK", default=None, help="default: beside the script")
    parser.add_argument("--args", metavar="WORDS", default="", help="the script's arguments: --args='--epochs 3'")
    parser.add_argument("--force", action="store_true", help="overwrite the notebook")
    return parser


@command(import_parser)
def import_script(options: argparse.Namespace) -> None:
    """Cut a script into the cells of a notebook, and print a report.

    Args:
        options: The options of `%distributed import`.
    """
    from axon_nb import script

    out = Path(options.out).expanduser() if options.out else None
    print(script.import_script(Path(options.script).expanduser(), out, arguments=options.args, force=options.force))


def _start_parser() -> LineParser:
    parser = LineParser("%distributed start", "Start a cluster.")
    parser.add_argument("-n", type=integer, default=None, help="number of ranks")
    parser.add_argument("--devices", default="auto", help="auto, cpu, or GPU numbers such as 2,5")
    parser.add_argument("--backend", default="auto", help="auto, shm, gloo or nccl")
    parser.add_argument("--engines", default=None, help="axon: forked ranks (the default), or local: plain processes")
    parser.add_argument("--name", default=None, help="name of the cluster")
    parser.add_argument(
        "--interface", default=None, help="network interface through which ranks on other hosts connect"
    )
    parser.add_argument("--hosts", default=None, help="where else ranks run: ssh:a,b, slurm, mpi:a,b, join, ray or k8s")
    parser.add_argument(
        "--gpus-per-rank", type=integer, default=None, help="GPUs per rank, from Ray or Kubernetes: 0 or 1"
    )
    parser.add_argument("--placement", default=None, help="how Ray places ranks on its nodes: pack or spread")
    parser.add_argument("--sync", default=None, metavar="FOLDER", help="folder whose modules other hosts get")
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


def _resize_parser() -> LineParser:
    parser = LineParser("%distributed resize", "Change the number of ranks; models and variables are carried over.")
    parser.add_argument("n", type=integer, metavar="N", help="number of ranks afterwards")
    return parser


def _undo_parser() -> LineParser:
    parser = LineParser("%distributed undo", "Take back the last cells on all their ranks, bit for bit.")
    parser.add_argument("count", nargs="?", type=integer, default=1, metavar="K", help="how many cells (default: 1)")
    return parser


def _sync_parser() -> LineParser:
    parser = LineParser("%distributed sync", "Copy models, optimizers and schedulers of one rank to all.")
    parser.add_argument("--from", dest="source", type=integer, default=0, metavar="R", help="copy R's (default: 0)")
    parser.add_argument("names", nargs="*", help="which variables (default: all that can be copied)")
    return parser


def _shared_parser(name: str) -> LineParser:
    entry = COMMANDS[name]
    parser = LineParser(f"%distributed {name}", f"{entry.summary[0].upper()}{entry.summary[1:]}.")
    for option in entry.options:
        option.add_to(parser)
    return parser


def _shared(name: str) -> Callable[..., None]:
    """Return a command that programs have, too; it prints their text."""

    @command(lambda: _shared_parser(name))
    def run(options: argparse.Namespace) -> None:
        print(perform(clusters.require(f"%distributed {name}"), name, **vars(options))["text"])

    return run


def _shown_as(frame: pd.DataFrame, html: str) -> pd.DataFrame:
    """Return a frame that notebooks show as a table of ours."""
    object.__setattr__(frame, "_repr_html_", lambda: html)
    return frame


class _Progress:
    """A line in the output that says how far a start is, until its result replaces it."""

    def __init__(self) -> None:
        self.result: Any = None
        """What is shown in the end."""
        self._shown: DisplayHandle | None = None

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._shown is None and self.result is not None:
            display(self.result)
        elif self._shown is not None and self.result is not None:
            self._shown.update(self.result)
        elif self._shown is not None:
            self._shown.update({"text/plain": ""}, raw=True)

    def show(self, text: str) -> None:
        """Show a state; a panel in JupyterLab shows it, too."""
        if not in_kernel():
            return
        options: dict[str, Any] = {"raw": True, "metadata": {"axon_nb": {"status": text}}}
        if self._shown is None:
            self._shown = display({"text/plain": text}, display_id=True, **options)
        else:
            self._shown.update({"text/plain": text}, **options)


@magics_class
class DistributedMagics(Magics):
    """The subcommands of `%distributed`."""

    @line_magic
    def distributed(self, line: str) -> Any:
        """`%distributed COMMAND`; `%distributed start?` lists all options of one command, with an example.

        Run
          start -n 4           start 4 ranks; --hosts: elsewhere, --protect: keep each step
          stop                 end all ranks
          restart              end all ranks, and start new ones
          run train.py         run a script as torchrun would; its variables stay
          cancel               interrupt cells that run in the background
          auto on              run plain cells on the ranks, until `auto off`
        Look
          status               what each rank does, its device and its memory
          vars                 the variables of all ranks, and which differ
          diff NAME            where a variable differs between ranks
          stacks               where each rank is, also while it hangs
          explain              which rank the others wait for
          debug                open the debugger where the last cell failed
          doctor               check this machine; a fix for each problem
          help WORDS           explain a message, by words of it
        Repair
          undo 2               take back the last 2 cells, bit for bit
          repair               replace dead ranks; all others keep their state
          attach               reconnect to ranks that a restarted kernel has left
          sync                 copy the models and optimizers of one rank to all
        Move
          save NAME            write the state of all ranks to a folder
          load NAME            load it, on any number of ranks
          resize 8             change the number of ranks; models are carried over
          export train.py      write the cells that ran as a script for torchrun
          import train.py      cut a script into the cells of a notebook
        Set
          config               settings, and what they do; `config threads=2` sets one
          seed 0               seed Python, NumPy and torch on all ranks
          slow                 slow ranks or links on purpose, to see what they cost
          pause                give back the GPU memory that ranks keep for later
          rename NEW           give the cluster another name

        Example: `%distributed start -n 4`.
        """
        commands = self.commands()
        word, *rest = line.split() or [""]
        if not word:
            return self._overview()
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
            **{name: _shared(name) for name, entry in COMMANDS.items() if entry.in_notebook},
            "status": self._status,
            "stop": self._stop,
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
        arguments = vars(options)
        if (protect := arguments.pop("protect")) is not None:
            print("\n".join(current.session().settings.set(f"protect={protect}")))
        with _Progress() as progress:
            progress.result = cluster = clusters.start(**arguments, on_progress=progress.show)
        if options.n is None and (reason := explain_number(cluster.state.layout)):
            print(reason)

    def _overview(self) -> Any:
        """Say what there is, and what to type next."""
        if current.get() is None:
            lost = current.session().loss or "No cluster is running."
            print(f"{lost} `%distributed start -n 4` starts one; `%distributed help` lists all commands.")
            return None
        print("`%%distributed` runs a cell on all ranks; `%distributed help` lists all commands.")
        return self._status([])

    @command(lambda: _shared_parser("status"))
    def _status(self, options: argparse.Namespace) -> Any:
        return ClusterStatus(clusters.require("%distributed status").info())

    @command(lambda: _shared_parser("vars"))
    def _vars(self, options: argparse.Namespace) -> Any:
        from axon_nb.widgets.reports import variables_html

        frame = clusters.require("%distributed vars").variables()
        return _shown_as(frame, variables_html(frame))

    @command(lambda: _shared_parser("diff"))
    def _diff(self, options: argparse.Namespace) -> Any:
        differences = clusters.require("%distributed diff").diff(options.name, options.from_rank)
        if summary := summary_of(options.name, differences):
            print(summary)
        if differences.empty:
            return None
        from axon_nb.widgets.reports import difference_html

        return _shown_as(differences, difference_html(differences, options.from_rank))

    @command(lambda: LineParser("%distributed stop", "Stop the cluster."))
    def _stop(self, options: argparse.Namespace) -> None:
        session = current.session()
        if session.cluster is None and (lines := [*filter(None, [session.loss]), *stop_detached()]):
            session.drop()
            print("\n".join(lines))
            return
        cluster = clusters.require("%distributed stop")
        cluster.stop()
        session.drop(cluster)
        print(f"Stopped the cluster {cluster.name!r} ({count_of(cluster.world_size, 'rank')}).")

    @command(lambda: LineParser("%distributed restart", "Stop all ranks and start new ones."))
    def _restart(self, options: argparse.Namespace) -> None:
        clusters.require("%distributed restart")
        with _Progress() as progress:
            progress.result = clusters.restart(on_progress=progress.show)

    @command(_resize_parser)
    def _resize(self, options: argparse.Namespace) -> None:
        print(clusters.require("%distributed resize").resize(options.n))

    @command(_sync_parser)
    def _sync(self, options: argparse.Namespace) -> None:
        print(clusters.require("%distributed sync").sync(options.source, options.names))

    @command(_undo_parser)
    def _undo(self, options: argparse.Namespace) -> None:
        print(clusters.require("%distributed undo").undo(options.count))

    @command(_attach_parser)
    def _attach(self, options: argparse.Namespace) -> CellHandle | None:
        cluster = clusters.attach(options.name)
        display(cluster)
        handle = cluster.running_cell
        return None if handle is None or handle.done() else handle

    @command(lambda: LineParser("%distributed cancel", "Interrupt the cells that run in the background."))
    def _cancel(self, options: argparse.Namespace) -> None:
        ranks = clusters.require("%distributed cancel").cancel()
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
        print("\n".join(settings.set(" ".join(options.assignments)) or settings.described()))
