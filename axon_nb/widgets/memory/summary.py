"""Figures above the bars of memory, and the rank that needs attention."""

from __future__ import annotations

from axon_nb.records.units import format_bytes
from axon_nb.widgets.memory.rows import ODD, SOURCES, MemoryRows, describe_fullness


def figures(rows: MemoryRows) -> list[dict[str, str]]:
    """Return the numbers above the bars: each with its name, value and a remark."""
    uses = rows.measured.values()
    if not uses:
        return []
    fullest = max(uses, key=rows.peak_of)
    others = [rows.peak_of(use) for use in uses if use is not fullest]
    on_device = fullest.source == "allocator" and bool(fullest.capacity)
    of = f"of {format_bytes(fullest.capacity or 0)}, " if on_device else ""
    entries = [("fullest rank", format_bytes(rows.peak_of(fullest)), f"{of}rank {fullest.rank}")]
    if on_device and fullest.capacity:
        left = fullest.capacity - rows.peak_of(fullest)
        entries.append(("left there", format_bytes(left), f"{100 * left / fullest.capacity:.0f} %"))
    if others:
        entries.append(("others", format_bytes(max(others)), "at most"))
    planned = [use.peak or use.total for use in rows.estimates.values()]
    if planned:
        entries.append(("estimate", format_bytes(max(planned)), SOURCES[next(iter(rows.estimates.values())).source]))
    return [{"name": name, "value": value, "remark": remark} for name, value, remark in entries]


def notice(rows: MemoryRows) -> tuple[str, str] | None:
    """Return a claim about the rank that is nearly full, and what fills it; None: all ranks have room."""
    uses = rows.measured
    near = [use for use in uses.values() if describe_fullness(use)]
    if not near:
        return None
    worst = max(near, key=lambda use: (use.occupied or 0) / (use.capacity or 1))
    claim = f"Rank {worst.rank} is {100 * (worst.occupied or 0) / (worst.capacity or 1):.0f} % full."
    excess = {
        role: size - min(other.by_role.get(role, 0) for other in uses.values()) for role, size in worst.by_role.items()
    }
    role = max(excess, key=lambda name: excess[name], default="")
    if len(uses) < 2 or not role or excess[role] <= ODD * rows.scale.end:
        return claim, describe_fullness(worst)
    return claim, f"Its {role} take {format_bytes(excess[role])} more than on the leanest rank."
