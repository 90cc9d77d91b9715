"""The administrator's limit of ranks per user: a courtesy on a shared machine, not a protection against users."""

from __future__ import annotations

from collections.abc import Iterator

from axon_nb.errors import UsageError
from axon_nb.host.run_dir import RunDir, list_run_dirs
from axon_nb.records.environment import MAX_RANKS


def raise_if_over_quota(num_ranks: int, *, besides: RunDir | None = None) -> None:
    """Check how many ranks this user would have at once, in all clusters of this host's notebooks.

    Args:
        num_ranks: The ranks that the cluster is to have.
        besides: The folder of that cluster if it runs already.

    Raises:
        UsageError: there would be too many; the message names the other clusters. Or the limit is not a number.
    """
    text = MAX_RANKS.get()
    if not text:
        return
    if not (text.isascii() and text.isdigit()):
        raise UsageError(
            f"{MAX_RANKS.name} must be a number of ranks; got {text!r}. Ask the administrator to correct it."
        )
    others = dict(_ranks_of(besides))
    left = max(0, int(text) - sum(others.values()))
    if num_ranks <= left:
        return
    fewer = f"use {_count(left)} at most" if left else ""
    stop = " or ".join(f"{name!r} ({_count(number)})" for name, number in others.items())
    fixes = ", or ".join(filter(None, [fewer, f"stop {stop}; `axon-nb list` shows them" if others else ""]))
    raise UsageError(
        f"This host allows {_count(int(text))} per user ({MAX_RANKS.name}); got {num_ranks}"
        f"{f' besides {sum(others.values())} in other clusters' if others else ''}"
        f"{f': {fixes}' if fixes else ''}."
    )


def _ranks_of(besides: RunDir | None) -> Iterator[tuple[str, int]]:
    for run_dir in list_run_dirs():
        info = run_dir.read_info()
        if info.get("world_size") and (besides is None or run_dir.path != besides.path):
            yield str(info.get("name", "")), int(info["world_size"])


def _count(number: int) -> str:
    return f"{number} rank{'s' * (number != 1)}"
