"""Measured and estimated memory of all ranks, ready to be drawn: an axis, stacked bars by role, figures and text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from axon_nb.cluster.inspection.memory import MemorySnapshot
from axon_nb.records.memory import ROLES, MemoryPrediction, MemoryUse
from axon_nb.records.ranks import name_ranks
from axon_nb.records.units import format_bytes

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_NUM_TICKS = 5
_LETTER, _GAPS = 0.02, 0.015
"""Shares of the axis that a segment needs for each letter of its label, and beside it."""
NEAR = 0.9
"""Share of its capacity from which a rank is flagged."""
ODD = 0.02
"""Share of the axis by which a role must exceed that of the rank with the least to stand out."""
_MAX_DECIMALS = 3
_ALWAYS = ("parameters", "gradients", "optimizer")
"""Roles with a column of the table, however small."""
_SMALL = 0.02
"""Other roles below this share of the axis on all ranks are in the column ``rest``."""
_REST = {"copies": "copies for undo and protection", "other": "all other tensors"}
"""Roles that are always in ``rest``, with what they are."""
SOURCES = {
    "storages": "storages of live tensors",
    "allocator": "CUDA's allocator, with the storages of live tensors",
    "estimate": "formula",
    "plan": "simulation",
}
_AS_ESTIMATED = 0.05


class Tick(Struct, frozen=True):
    """A mark of an axis."""

    share: float
    """Of the axis, 0 to 1."""
    label: str


class Scale(Struct, frozen=True):
    """An axis in bytes that begins at zero."""

    end: int
    """Bytes at its end."""
    capacity: int | None
    """Bytes of the device; None: unknown."""

    @classmethod
    def of(cls, sizes: Iterable[int], capacity: int | None) -> Scale:
        """Return an axis that holds all sizes and the capacity."""
        highest = max(sizes, default=0) or 1
        if capacity is not None:
            return cls(max(highest, capacity), capacity)
        step = _round_step(highest)
        return cls(math.ceil(highest / step - 1e-9) * step, None)

    @property
    def unit(self) -> str:
        """Unit of the labels."""
        return _UNITS[_power(self.end)]

    def number(self, size: int, largest: int = 0) -> str:
        """Return a size in the axis's unit, without the unit: ``13.3``, with the decimals that the `largest` has."""
        if not size:
            return "0"
        unit = 1024 ** _power(self.end)
        decimals = min(_MAX_DECIMALS, max(0, 2 - math.floor(math.log10(max(size, largest) / unit) + 1e-9)))
        text = f"{size / unit:.{decimals}f}"
        return text if float(text) else f"<{10**-decimals:.{decimals}f}"

    def share(self, size: int) -> float:
        """Return the place of a size on the axis, 0 to 1."""
        return size / self.end

    @property
    def ticks(self) -> list[Tick]:
        """Round numbers on the axis; the last one has the unit."""
        step = _round_step(self.end)
        sizes = [i * step for i in range(int(self.end / step + 1e-9) + 1)]
        labels = [f"{size / 1024 ** _power(self.end):.4g}" for size in sizes]
        labels[-1] += f" {self.unit}"
        return [Tick(self.share(size), label) for size, label in zip(sizes, labels, strict=True)]


def _power(size: int) -> int:
    return min(len(_UNITS) - 1, int(math.log(max(1, size), 1024) + 1e-9))


def _round_step(size: int) -> int:
    unit = 1024 ** _power(size)
    rough = size / unit / _NUM_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    digit = next(digit for digit in (1, 2, 5, 10) if rough / power <= digit * 1.0001)
    return max(1, round(digit * power * unit))


class Bar(Struct, frozen=True):
    """One bar; lengths are shares of the scale, 0 to 1."""

    segments: tuple[tuple[str, float], ...]
    """(role, length), from left to right; without those of length 0."""
    peak: float | None
    capacity: float | None
    """None: unknown."""
    text: str
    labels: tuple[str, ...] = ()
    """What is written on the segments; empty where there is no room."""


def stacked_bar(by_role: Mapping[str, int], scale: Scale, peak: int | None, capacity: float | None, text: str) -> Bar:
    """Return the bytes of all roles as a bar on an axis; `peak` is in bytes."""
    parts = segments(by_role, scale.end)
    texts = [scale.number(by_role[role]) for role, _ in parts]
    fits = [share >= _LETTER * len(text) + _GAPS for text, (_, share) in zip(texts, parts, strict=True)]
    labels = tuple(text if fit else "" for text, fit in zip(texts, fits, strict=True))
    return Bar(parts, None if peak is None else scale.share(peak), capacity, text, labels)


def segments(by_role: Mapping[str, int], scale: int) -> tuple[tuple[str, float], ...]:
    """Return the bytes of each role as shares of a scale in bytes."""
    return tuple((role, by_role[role] / scale) for role in ROLES if by_role.get(role))


def describe_roles(by_role: Mapping[str, int]) -> str:
    """Return text such as ``3.00 MiB (parameters 1.00 MiB, optimizer 2.00 MiB)``."""
    parts = [f"{role} {format_bytes(by_role[role])}" for role in ROLES if by_role.get(role)]
    details = f" ({', '.join(parts)})" if len(parts) > 1 else ""
    return f"{format_bytes(sum(by_role.values()))}{details}"


class Cell(Struct, frozen=True):
    """One number of the table."""

    text: str
    share: float | None = None
    """Length of its bar, 0 to 1; None: it has none."""
    token: str = ""
    """Colour of the bar, as its name in CSS."""
    flagged: bool = False
    """Whether it stands out."""


class MemoryRow(Struct, frozen=True):
    """One rank."""

    rank: int
    measured: Bar
    estimated: Bar | None
    process: Bar
    """Resident memory; drawn against what the process can use, if that is known."""
    flag: str
    """Why the rank needs attention; empty if it does not."""
    total: str
    """Measured, such as ``54.1 GiB``."""
    remark: str
    """How it compares with the estimate, or how full the device is."""
    cells: tuple[Cell, ...]
    """In the order of `MemoryRows.columns`."""


class _Common(Struct, frozen=True):
    """What all rows of a view need; each of it is a walk over all ranks."""

    scale: Scale
    estimates: Mapping[int, MemoryUse]
    shown: list[str]
    """Roles with a column of their own."""
    largest: Mapping[str, int]
    least: Mapping[str, int]
    """Bytes of each shown role on the ranks with the most and the least."""
    rest: int
    total: int
    planned: int
    resident: int
    """Bytes on the rank with the most."""


def _rest_of(use: MemoryUse, shown: list[str]) -> int:
    return sum(size for role, size in use.by_role.items() if role not in shown)


class MemoryRows:
    """The last replies of the ranks, and the highest use seen so far. Not thread-safe: its owner holds a lock.

    Args:
        title: What is shown, such as ``model``; empty: all variables.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._replies = MemorySnapshot({}, {}, ())
        self._highest: dict[int, int] = {}
        self._simulated: dict[int, MemoryUse] = {}

    def update(self, replies: MemorySnapshot) -> None:
        """Replace the ranks' replies."""
        self._replies = replies
        for rank, use in replies.measured.items():
            self._highest[rank] = max(self._highest.get(rank, 0), use.total)

    def set_simulation(self, prediction: MemoryPrediction | None) -> bool:
        """Show a simulation's estimates instead of formulas, for the ranks that it covers; None: formulas only.

        Returns:
            Whether the estimates have changed.
        """
        before, self._simulated = self._simulated, {} if prediction is None else dict(_simulated_uses(prediction))
        return before != self._simulated

    @property
    def capacity(self) -> int | None:
        """Bytes of the smallest device; None: unknown."""
        return min((use.capacity for use in self._replies.measured.values() if use.capacity), default=None)

    @property
    def estimates(self) -> dict[int, MemoryUse]:
        """What each rank should hold: by simulation if there is one, else by formula."""
        return {**self._replies.estimated, **self._simulated}

    @property
    def heading(self) -> str:
        """Text such as ``model: memory of 4 ranks, 1.20 MiB on each; measured: storages of live tensors``."""
        uses = self._replies.measured
        totals = [use.total for use in uses.values()]
        low, high = format_bytes(min(totals, default=0)), format_bytes(max(totals, default=0))
        each = f"{low} on each" if low == high else f"{low} to {high} per rank"
        count = f"{len(uses)} rank{'' if len(uses) == 1 else 's'}"
        title = f"{self.title}: " if self.title else ""
        return f"{title}memory of {count}, {each}; measured: {self._sources}"

    @property
    def roles(self) -> list[str]:
        """Roles that any rank uses memory for, in order."""
        uses = [*self._replies.measured.values(), *self.estimates.values()]
        return [role for role in ROLES if any(use.by_role.get(role) for use in uses)]

    @property
    def scale(self) -> Scale:
        """The axis of all bars of measured and estimated memory."""
        uses, estimates = self._replies.measured.values(), self.estimates.values()
        sizes = [max(use.total, self.peak_of(use)) for use in uses]
        sizes += [max(use.total, use.peak or 0) for use in estimates]
        return Scale.of(sizes, max((use.capacity or 0 for use in uses if use.source == "allocator"), default=0) or None)

    @property
    def columns(self) -> list[str]:
        """Titles of the table: model and optimizer, the larger roles, the rest, the total, estimate and process."""
        estimates = ["estimate"] if self.estimates else []
        return [*self._shown_roles, *(["rest"] if self.rest else []), "total", *estimates, "process"]

    @property
    def rest(self) -> str:
        """What the column ``rest`` has, at most on any rank; empty: there is no such column."""
        uses = self._replies.measured.values()
        most = {role: max((use.by_role.get(role, 0) for use in uses), default=0) for role in self.roles}
        shown = self._shown_roles
        small = [role for role, size in most.items() if size and role not in shown]
        return ", ".join(f"{_REST.get(role, role)} up to {format_bytes(most[role])}" for role in small)

    @property
    def _shown_roles(self) -> list[str]:
        least = _SMALL * self.scale.end
        uses = self._replies.measured.values()
        large = {role for role in self.roles if any(use.by_role.get(role, 0) >= least for use in uses)}
        return [role for role in ROLES if role in _ALWAYS or role in large - _REST.keys()]

    def rows(self) -> list[MemoryRow]:
        """Return one row per rank."""
        uses, estimates, shown = self._replies.measured.values(), self.estimates, self._shown_roles
        sizes = {role: [use.by_role.get(role, 0) for use in uses] for role in shown}
        common = _Common(
            self.scale,
            estimates,
            shown,
            {role: max(of, default=0) for role, of in sizes.items()},
            {role: min(of, default=0) for role, of in sizes.items()},
            max((_rest_of(use, shown) for use in uses), default=0),
            max((use.total for use in uses), default=0),
            max((use.peak or use.total for use in estimates.values()), default=0),
            max((max(use.resident, use.resident_peak) for use in uses), default=0),
        )
        return [self._row(use, common) for _, use in sorted(self._replies.measured.items())]

    @property
    def measured(self) -> Mapping[int, MemoryUse]:
        """What each rank replied last."""
        return self._replies.measured

    def peak_of(self, use: MemoryUse) -> int:
        """Return the peak of a rank in bytes, or the highest use that was seen."""
        return self._highest.get(use.rank, 0) if use.peak is None else use.peak

    def _row(self, use: MemoryUse, common: _Common) -> MemoryRow:
        scale, estimate = common.scale, common.estimates.get(use.rank)
        on_device = use.source == "allocator"
        kind = "highest seen" if use.peak is None else "peak"
        peak = self.peak_of(use)
        texts = [describe_roles(use.by_role), f"{kind} {format_bytes(peak)}" if peak else ""]
        if on_device and use.capacity:
            texts.append(f"of {format_bytes(use.capacity)}")
        capacity = None if not on_device or use.capacity is None else scale.share(use.capacity)
        return MemoryRow(
            use.rank,
            stacked_bar(use.by_role, scale, peak or None, capacity, ", ".join(filter(None, texts))),
            None if estimate is None else _estimate_bar(estimate, scale),
            _process_bar(use, common.resident, on_device=on_device),
            describe_fullness(use),
            format_bytes(use.total),
            _remark(use, estimate),
            tuple(_cells(use, estimate, common)),
        )

    @property
    def context(self) -> str:
        """Text such as ``model · 4 ranks · storages of live tensors``."""
        count = len(self._replies.measured)
        return " · ".join(filter(None, (self.title, f"{count} rank{'' if count == 1 else 's'}", self._sources)))

    @property
    def _sources(self) -> str:
        uses = self._replies.measured.values()
        return " and ".join(dict.fromkeys(SOURCES.get(use.source, use.source) for use in uses))

    def notes(self, *, flags: bool = True) -> list[str]:
        """Return sentences about ranks that need attention, if `flags`, and about what is unknown."""
        lines = [f"Rank {row.rank}: {row.flag}" for row in self.rows() if row.flag and flags]
        uses = self._replies.measured
        without = [rank for rank, use in uses.items() if "activations" not in use.by_role]
        if without:
            lines.append(
                f"Activations of {name_ranks(without)} are unknown: on CPUs no allocator counts them. Resident memory "
                "includes them, along with the interpreter and libraries."
            )
        return [*lines, *self._replies.notes]


def _process_bar(use: MemoryUse, highest: int, *, on_device: bool) -> Bar:
    available = None if on_device else use.capacity
    end = max(highest, available or 0) or 1
    peak = use.resident_peak / end if use.resident_peak else None
    capacity = None if available is None else available / end
    return Bar((("resident", use.resident / end),), peak, capacity, _process_text(use, on_device=on_device))


def _cells(use: MemoryUse, estimate: MemoryUse | None, common: _Common) -> Iterator[Cell]:
    scale = common.scale
    for role in common.shown:
        size, largest = use.by_role.get(role, 0), common.largest[role]
        odd = size == largest and size - common.least[role] > ODD * scale.end
        yield Cell(scale.number(size, largest), flagged=odd)
    if common.rest:
        yield Cell(scale.number(_rest_of(use, common.shown), common.rest))
    yield Cell(scale.number(use.total, common.total))
    if common.estimates:
        yield Cell("–" if estimate is None else scale.number(estimate.peak or estimate.total, common.planned))
    available = use.capacity if use.source != "allocator" else None
    share = use.resident / available if available else None
    of = f" of {format_bytes(available)}" if available else ""
    yield Cell(f"{format_bytes(use.resident)}{of}", share, "role-resident")


def _process_text(use: MemoryUse, *, on_device: bool) -> str:
    now, highest = format_bytes(use.resident), format_bytes(use.resident_peak)
    text = f"{now} resident" if now == highest else f"{now} resident, highest {highest}"
    return text if on_device or not use.capacity else f"{text}, of {format_bytes(use.capacity)} available"


def _simulated_uses(prediction: MemoryPrediction) -> Iterator[tuple[int, MemoryUse]]:
    for rank, by_role in prediction.persistent.items():
        peak = sum(prediction.peak[rank].values()) if rank in prediction.peak else None
        yield rank, MemoryUse(rank, 0, "plan", by_role, peak)


def _estimate_bar(estimate: MemoryUse, scale: Scale) -> Bar:
    text = f"estimate: {describe_roles(estimate.by_role)}"
    if estimate.peak is not None:
        text += f" after a step, peak {format_bytes(estimate.peak)}, simulated"
    bar = stacked_bar(estimate.by_role, scale, estimate.peak, None, text)
    return replace(bar, labels=())


def _remark(use: MemoryUse, estimate: MemoryUse | None) -> str:
    if describe_fullness(use):
        return f"{100 * (use.occupied or 0) / (use.capacity or 1):.0f} % full"
    if estimate is None or not estimate.total:
        return ""
    has_peaks = use.peak is not None and estimate.peak is not None
    planned = (estimate.peak if has_peaks else estimate.total) or 1
    # Without an allocator, copies and other tensors are measured, too, which no estimate knows.
    known = sum(use.by_role.get(role, 0) for role in estimate.by_role)
    more = ((use.peak if has_peaks else known) or 0) - planned
    if abs(more) <= _AS_ESTIMATED * planned:
        return "as estimated"
    which, what = ("", "the estimated peak") if has_peaks else ("model ", "estimate")
    return f"{which}{100 * abs(more) / planned:.0f} % {'above' if more > 0 else 'below'} {what}"


def describe_fullness(use: MemoryUse) -> str:
    """Say how full a rank's memory is; empty: there is room."""
    if not use.capacity or use.occupied is None or use.occupied < NEAR * use.capacity:
        return ""
    what = "device" if use.source == "allocator" else "available"
    free = format_bytes(use.capacity - use.occupied)
    return f"{100 * use.occupied / use.capacity:.0f} % of the {what} memory is in use; {free} left."


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
    if others and format_bytes(max(others)) != entries[0][1]:
        entries.append(("others", format_bytes(max(others)), "at most"))
    planned = [use.peak or use.total for use in rows.estimates.values()]
    if planned:
        name = "estimated peak" if any(use.peak for use in rows.estimates.values()) else "estimate after a step"
        entries.append((name, format_bytes(max(planned)), SOURCES[next(iter(rows.estimates.values())).source]))
    return [{"name": name, "value": value, "remark": remark} for name, value, remark in entries]


def bars_legend(rows: MemoryRows) -> str:
    """Say what the bars of a rank are; empty: there is one."""
    if not rows.estimates:
        return ""
    peak = ", with a mark at the predicted peak" if any(use.peak for use in rows.estimates.values()) else ""
    return f"thick bar: measured · thin bar: predicted after a step{peak}"


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
