"""`%distributed auto`, `seed` and `debug`.

`%distributed export FILE`.

`%distributed doctor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from IPython.core.error import StdinNotImplementedError

from axon_nb.cluster import history as journal
from axon_nb.cluster.inspection.debugger import PostMortem
from axon_nb.cluster.session import current
from axon_nb.cluster.transfer.broadcast import seed
from axon_nb.errors import AxonError, CellInterrupt, UsageError
from axon_nb.magics.arguments import LineParser, parse
from axon_nb.magics.cell_head import auto_mode
from axon_nb.records.ranks import resolve_ranks

__all__ = ["COMFORTS", "doctor", "export_session"]


def _auto(words: list[str]) -> None:
    """`%distributed auto on [--ranks R]`: plain cells run on ranks; `auto off` ends that."""
    parser = LineParser(
        "%distributed auto", "Run plain cells on ranks, started if there are none; a %%local cell runs in the notebook."
    )
    parser.add_argument("state", nargs="?", choices=("on", "off"), default=None, help="without: tell what is set")
    parser.add_argument("--ranks", metavar="RANKS", default=None, help="which ranks: 0 or 0,2-3 (default: all)")
    options = parse(parser, words)
    if options.state == "on":
        cluster = current.get()
        if options.ranks and cluster is not None:
            resolve_ranks(options.ranks, cluster.world_size)
        auto_mode.on, auto_mode.ranks = True, options.ranks
    elif options.state == "off":
        auto_mode.on, auto_mode.ranks = False, None
    where = f"ranks {auto_mode.ranks}" if auto_mode.ranks else "all ranks"
    if auto_mode.on:
        print(f"Plain cells run on {where}; a cell that begins with %%local, or another %%, runs in the notebook.")
    else:
        print("Plain cells run in the notebook; cells that begin with %%distributed run on ranks.")


def _seed(words: list[str]) -> None:
    """`%distributed seed 0 [--per-rank]`: seed `random`, NumPy and torch on all ranks."""
    parser = LineParser("%distributed seed", "Seed random, numpy and torch (all devices) on all ranks.")
    parser.add_argument("value", metavar="SEED", help="a whole number")
    parser.add_argument("--per-rank", action="store_true", help="SEED + rank on each rank, rather than SEED on all")
    options = parse(parser, words)
    if not options.value.isdecimal():
        raise UsageError(f"%distributed seed: {options.value!r} is no whole number of 0 or more.")
    print(seed(current.require("%distributed seed").cells, int(options.value), per_rank=options.per_rank))


def _debug(words: list[str]) -> None:
    """`%distributed debug [--ranks 2]`: IPython's debugger on the last failure of one rank; `q` ends it."""
    parser = LineParser(
        "%distributed debug", "Look at a rank's last failed cell in IPython's debugger, until its next cell."
    )
    parser.add_argument("--ranks", metavar="RANK", default=None, help="which rank (default: the first that has failed)")
    options = parse(parser, words)
    debugger = PostMortem(current.require("%distributed debug").cells, options.ranks)
    print(f"Rank {debugger.rank}: {debugger.error}. Commands are those of pdb: u, d, p NAME, l, w; q ends.")
    print(debugger.start(), end="")
    over = False
    while not over:
        try:
            text, over = debugger.command(input(f"ipdb rank {debugger.rank}> "))
        except CellInterrupt as error:  # of the command, not of the debugger
            text = f"{error}\n"
        except (EOFError, KeyboardInterrupt):
            break
        except StdinNotImplementedError:
            raise UsageError(
                "%distributed debug reads commands, and this front end gives none: run it in an interactive notebook."
            ) from None
        except AxonError as error:
            text = f"{error}\n"
            over = not debugger.alive
        print(text, end="")


COMFORTS = {"auto": _auto, "seed": _seed, "debug": _debug}
"""The commands, by name."""


def export_session(shell: Any, words: Sequence[str]) -> str:
    """Write the cells of this session that ran on ranks as a script; returns what was written, in words.

    Args:
        shell: IPython's, whose variables were pushed.
        words: What stands behind `%distributed export`.
    """
    parser = LineParser("%distributed export", "Write the cells that ran on ranks as a script for torchrun.")
    parser.add_argument("file", metavar="FILE", help="such as train.py")
    parser.add_argument("--live-only", action="store_true", help="leave out cells that the end does not depend on")
    parser.add_argument("--force", action="store_true", help="replace files that are there")
    options = parse(parser, words)
    facts, history = journal.history()
    if facts is None:
        raise UsageError(
            "No cluster was started by this kernel, so it has nothing to export; `axon-nb export NOTEBOOK FILE` "
            "exports a saved notebook."
        )
    from axon_nb.export import export_history

    values = journal.sent_values(shell.user_ns)
    report = export_history(
        history, facts, values, Path(options.file).expanduser(), live_only=options.live_only, force=options.force
    )
    return str(report)


def doctor(words: Sequence[str]) -> None:
    """Examine this machine as this kernel sees it, and print what was found.

    Args:
        words: What stands behind `%distributed doctor`.
    """
    parser = LineParser("%distributed doctor", "Examine this machine and installation; each problem with its fix.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parse(parser, words)
    from axon_nb.doctor.examine import examine

    report = examine()
    print(report.json() if options.json else report.text())
