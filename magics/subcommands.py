"""`%distributed auto`, `seed`, `debug`, `slow`, `save`, `load`, `export` and `doctor`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from IPython.core.error import StdinNotImplementedError

from axon_nb.cluster.debugger.post_mortem import PostMortem
from axon_nb.cluster.session import current, kept
from axon_nb.cluster.setting_kinds import seconds
from axon_nb.cluster.transfer.broadcast import seed
from axon_nb.cluster.transfer.saved_session import load_session, save_session
from axon_nb.errors import AxonError, CellInterrupt, UsageError
from axon_nb.magics.arguments import LineParser, command
from axon_nb.records.performance.slowness import SlowLink, Slowness
from axon_nb.records.ranks import resolve_ranks


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
    print(seed(kept.require("%distributed seed").cells, int(options.value), per_rank=options.per_rank))


def _debug_parser() -> LineParser:
    parser = LineParser(
        "%distributed debug", "Open IPython's debugger on a rank's last failed cell; possible until its next cell."
    )
    parser.add_argument("--ranks", metavar="RANK", default=None, help="which rank (default: the first that failed)")
    return parser


@command(_debug_parser)
def _debug(options: argparse.Namespace) -> None:
    """Open IPython's debugger on the last failure of one rank: `%distributed debug [--ranks 2]`."""
    debugger = PostMortem(kept.require("%distributed debug").cells, options.ranks)
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


def _folder_parser(command: str, description: str) -> LineParser:
    parser = LineParser(f"%distributed {command}", description)
    parser.add_argument("folder", metavar="NAME", help="a folder that all ranks see")
    return parser


@command(lambda: _folder_parser("save", "Write the state of all ranks to a folder."))
def _save(options: argparse.Namespace) -> None:
    """Write the session of all ranks: `%distributed save NAME`."""
    print(save_session(kept.require("%distributed save").cells, options.folder))


@command(lambda: _folder_parser("load", "Load what `%distributed save` has written, on any number of ranks."))
def _load(options: argparse.Namespace) -> None:
    """Load a saved session: `%distributed load NAME`."""
    print(load_session(kept.require("%distributed load").cells, options.folder))


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
    state = kept.require("%distributed slow").state
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


SUBCOMMANDS = {"auto": _auto, "seed": _seed, "debug": _debug, "slow": _slow, "save": _save, "load": _load}
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
    return parser


@command(_doctor_parser)
def doctor(options: argparse.Namespace) -> None:
    """Check this machine and installation as this kernel sees them, and print a report.

    Args:
        options: The options of `%distributed doctor`.
    """
    from axon_nb.doctor.examine import examine

    report = examine()
    print(report.json() if options.json else report.text())
