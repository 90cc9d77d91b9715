"""`%distributed export FILE`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from axon_nb.cluster import journal
from axon_nb.errors import UsageError
from axon_nb.magics.arguments import LineParser, parse

__all__ = ["export_session"]


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
