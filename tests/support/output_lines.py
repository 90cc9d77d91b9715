"""What each rank has said, of labelled output: lines of several ranks are put together only when they come in time."""

from __future__ import annotations

from tests.support.cell_output import ranks_of


def by_rank(text: str) -> dict[int, list[str]]:
    """The lines of each rank in their order, of text such as ``[ranks 0-1] hello``; lines without a label are left out.

    Whether equal lines of several ranks share one label, and which rank's lines come first, depends on how quick the
    ranks are; what each of them has said does not.
    """
    said: dict[int, list[str]] = {}
    for line in text.splitlines():
        if not line.startswith(("[rank ", "[ranks ")) or "] " not in line:
            continue
        ranks, words = ranks_of(line)
        for rank in ranks:
            said.setdefault(rank, []).append(words)
    return said
