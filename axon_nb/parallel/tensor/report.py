"""Report of `parallelize`: how each module is sharded, or why not, as text and HTML tables."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass

from axon_nb.records.units import format_bytes

_HEADER = ("module", "type", "style", "parameters", "local", "reason")


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """A module that has its own parameters or is named by a plan."""

    name: str
    kind: str
    """Name of its class."""
    style: str
    """Parallel style; empty if it is not sharded."""
    total_bytes: int
    """Bytes of its own parameters in the whole model."""
    local_bytes: int
    """Bytes of its own parameters on this rank."""
    shapes: str
    """Shapes of its parameters, before and after sharding."""
    reason: str = ""
    """Why it is not sharded."""


@dataclass(frozen=True)
class ParallelReport:
    """Result of `parallelize`; print it, or show it as a table in a notebook."""

    num_ranks: int
    """Number of ranks that share the model."""
    modules: tuple[ModuleReport, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole model's parameters."""
        return sum(module.total_bytes for module in self.modules)

    @property
    def local_bytes(self) -> int:
        """Bytes of parameters on this rank."""
        return sum(module.local_bytes for module in self.modules)

    def style(self, name: str) -> str:
        """Return the parallel style of a module; empty if it is not sharded or has no parameters."""
        return next((module.style for module in self.modules if module.name == name), "")

    def _summary(self) -> str:
        num_sharded = sum(module.style != "" for module in self.modules)
        return (
            f"{num_sharded} of {len(self.modules)} modules sharded over {self.num_ranks} ranks: "
            f"{format_bytes(self.local_bytes)} of {format_bytes(self.total_bytes)} of parameters on this rank"
        )

    def _rows(self) -> Iterator[tuple[str, ...]]:
        """Yield table rows; modules whose names differ only in numbers share a row."""
        rows_by_key: dict[tuple[str, ...], list[ModuleReport]] = {}
        for module in self.modules:
            pattern = re.sub(r"\d+", "*", module.name)
            # A reason may name the module or a sibling: block0.up and block1.up should get the same text.
            reason = re.sub(
                r"\d+(?=\.\w)", "*", module.reason.replace(f"{module.name}.", "").removeprefix(module.name)
            ).strip()
            rows_by_key.setdefault((pattern, module.kind, module.style, module.shapes, reason), []).append(module)
        for (pattern, kind, style, shapes, reason), group in rows_by_key.items():
            name = f"{pattern} ({len(group)})" if len(group) > 1 else group[0].name or "(the model)"
            local_text = format_bytes(sum(module.local_bytes for module in group))
            yield name, kind, style or "replicated", shapes, local_text, reason

    def __str__(self) -> str:
        rows = [_HEADER, *self._rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([self._summary(), *lines])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def row(cells: tuple[str, ...], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag} align='left'>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        body = "".join(row(cells, "td") for cells in self._rows())
        return f"<table><caption>{html.escape(self._summary())}</caption>{row(_HEADER, 'th')}{body}</table>"
