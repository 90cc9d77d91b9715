"""A running job in words: what `%watch` says above its pictures, in its tables, and where there are no pictures."""

from __future__ import annotations

from collections.abc import Callable

from axon_nb.records.quantity import format_bytes
from axon_nb.widgets.job_store import JobStore, RankRow
from axon_nb.widgets.series import Point, Series

__all__ = ["FORMATS", "heading", "rank_cells", "series_words", "shown_number"]


def shown_number(value: float) -> str:
    """Four digits: ``2.306``, ``1.2e-05``, ``12345`` stays whole."""
    if float(value).is_integer() and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.4g}"


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


FORMATS: dict[str, tuple[str, Callable[[float], str]]] = {
    "communication": ("share", _share),
    "memory": ("bytes", lambda value: format_bytes(int(value))),
    "steps/s": ("number", lambda value: f"{value:.3g}"),
}
"""How numbers that are measured are shown: the kind, as JavaScript knows it, and a function; others are plain."""


def heading(store: JobStore) -> str:
    """Such as ``4 ranks, In [5] is running: 12.3 steps/s, 394 items/s, 31 % of the time in communication``."""
    count = len(store.rows())
    ranks = f"{count} rank{'' if count == 1 else 's'}"
    state = f"In [{store.cell}] is running" if store.cell else "no cell is running"
    if store.cell == 0:
        state = "a cell is running"
    facts = []
    if store.steps_per_s is not None:
        facts.append(f"{store.steps_per_s:.3g} steps/s")
    if store.items_per_s is not None:
        facts.append(f"{store.items_per_s:.3g} items/s")
    if store.communication is not None:
        facts.append(f"{_share(store.communication)} of the time in communication")
    return f"{ranks}, {state}{': ' if facts else ''}{', '.join(facts)}"


def series_words(series: Series, *, measured: bool) -> str:
    """What a curve shows now, such as ``2.306 at step 120 (2.29 on rank 1 to 2.35 on rank 3)``."""
    now = series.now
    if now is None:
        return "no finite number yet"
    show = FORMATS[series.name][1] if measured else shown_number
    at = "" if measured else f" at step {shown_number(now.step)}"
    return f"{show(now.mean)}{at}{_spread(series, now, show)}"


def _spread(series: Series, now: Point, show: Callable[[float], str]) -> str:
    if show(now.low) == show(now.high):
        return ""
    by_value = {value: rank for rank, (_, value) in sorted(series.latest.items(), reverse=True)}
    return f" ({show(now.low)} on rank {by_value[now.low]} to {show(now.high)} on rank {by_value[now.high]})"


def rank_cells(row: RankRow) -> tuple[str, str, str, str, str]:
    """State, step, steps a second, share of communication and memory of a rank, as the table has them."""
    return (
        row.words,
        "–" if row.step is None else str(row.step),
        "–" if row.steps_per_s is None else f"{row.steps_per_s:.3g}",
        "–" if row.communication is None else _share(row.communication),
        format_bytes(row.memory) if row.memory else "–",
    )
