"""`%distributed doctor`."""

from __future__ import annotations

from collections.abc import Sequence

from axon_nb.magics.arguments import LineParser, parse

__all__ = ["doctor"]


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
