"""What was cut how, what was not and why: a table, as text and as HTML."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass

from axon_nb.records.quantity import format_bytes

__all__ = ["ModuleReport", "ParallelReport"]

_HEAD = ("module", "kind", "how", "parameters", "here", "why not")


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """A module that has parameters of its own, or that a plan names."""

    name: str
    kind: str
    """Its class."""
    style: str
    """How it is cut; empty: it is not."""
    bytes_whole: int
    """Bytes of its own parameters in the whole model."""
    bytes_here: int
    """Bytes of them on this rank."""
    shapes: str
    """Shapes of them, whole and here."""
    why: str = ""
    """Why it is not cut."""


@dataclass(frozen=True)
class ParallelReport:
    """What `parallelize` has done; printed, or shown as a table in a notebook."""

    ranks: int
    """Ranks that share the model."""
    modules: tuple[ModuleReport, ...]

    @property
    def bytes_whole(self) -> int:
        """Bytes of the whole model's parameters."""
        return sum(module.bytes_whole for module in self.modules)

    @property
    def bytes_here(self) -> int:
        """Bytes of parameters on this rank."""
        return sum(module.bytes_here for module in self.modules)

    def style(self, name: str) -> str:
        """How a module is cut; empty: it is not, or has no parameters."""
        return next((module.style for module in self.modules if module.name == name), "")

    def _summary(self) -> str:
        cut = sum(module.style != "" for module in self.modules)
        return (
            f"{cut} of {len(self.modules)} modules over {self.ranks} ranks: {format_bytes(self.bytes_here)} of "
            f"{format_bytes(self.bytes_whole)} of parameters here"
        )

    def _rows(self) -> Iterator[tuple[str, ...]]:
        """Modules that differ in a number of their names alone make one row."""
        alike: dict[tuple[str, ...], list[ModuleReport]] = {}
        for module in self.modules:
            pattern = re.sub(r"\d+", "*", module.name)
            # A reason may name the module, or one beside it: block0.up and block1.up have the same.
            why = re.sub(
                r"\d+(?=\.\w)", "*", module.why.replace(f"{module.name}.", "").removeprefix(module.name)
            ).strip()
            alike.setdefault((pattern, module.kind, module.style, module.shapes, why), []).append(module)
        for (pattern, kind, style, shapes, why), group in alike.items():
            name = f"{pattern} ({len(group)})" if len(group) > 1 else group[0].name or "(the model)"
            here = format_bytes(sum(module.bytes_here for module in group))
            yield name, kind, style or "whole", shapes, here, why

    def __str__(self) -> str:
        rows = [_HEAD, *self._rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([self._summary(), *lines])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def row(cells: tuple[str, ...], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag} align='left'>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        body = "".join(row(cells, "td") for cells in self._rows())
        return f"<table><caption>{html.escape(self._summary())}</caption>{row(_HEAD, 'th')}{body}</table>"
