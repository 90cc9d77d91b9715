"""A collective as a picture: what four ranks have before it, and after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from axon_nb.records.colors import KINDS, RANKS

_RANKS = 4


@dataclass(frozen=True, slots=True)
class Move:
    """What each rank had and has: lists of numbers, or None."""

    name: str
    before: Sequence[list[float] | None]
    after: Sequence[list[float] | None]

    def __repr__(self) -> str:
        had = [_plain(numbers) for numbers in self.before]
        width = max(map(len, had))
        rows = zip(had, self.after, strict=True)
        lines = [f"  rank {rank}  {left:<{width}}  ->  {_plain(has)}" for rank, (left, has) in enumerate(rows)]
        return "\n".join([self.name, *lines])

    def _repr_html_(self) -> str:
        from axon_nb.widgets.html import CELL, figure, row_title, table, table_row

        rows = [
            table_row(
                row_title(f"rank {rank}"),
                f'<td style="{CELL}">{self._boxes(had)}</td>',
                f'<td style="{CELL}">{self._boxes(has)}</td>',
            )
            for rank, (had, has) in enumerate(zip(self.before, self.after, strict=True))
        ]
        return figure(table(("", "before", "after"), rows), heading=self.name)

    def _boxes(self, numbers: list[float] | None) -> str:
        if numbers is None:
            return '<span style="opacity:.6">nothing</span>'
        style = "display:inline-block;min-width:2.6em;padding:2px 4px;margin:1px;border-radius:4px;text-align:center"
        return "".join(
            f'<span style="{style};color:#fff;background:{self._color(number)}">{number:g}</span>' for number in numbers
        )

    def _color(self, number: float) -> str:
        """Return the colour of the rank that had this number before, or that of a number made from several."""
        owner = next((rank for rank, had in enumerate(self.before) if had and number in had), None)
        return KINDS["other"].both if owner is None else RANKS[owner].both


def draw(move: Callable[[Any], Any], count: int = 4) -> Move:
    """Run a move on four mock ranks and draw both sides.

    Args:
        move: Gets the rank's tensor, and returns the tensor that the rank has afterwards, or None. A rank's name is in
            its numbers: rank 0 has 0, 1, 2, …; rank 1 has 10, 11, 12, ….
        count: How many numbers each rank has.
    """
    import torch
    import torch.distributed as dist

    from axon_nb.comm import World

    def on_rank(_: World) -> tuple[list[float] | None, list[float] | None]:
        tensor = torch.arange(float(count)) + 10 * dist.get_rank()
        before = tensor.tolist()
        after = move(tensor)
        return before, None if after is None else after.flatten().tolist()

    found = World.mock(_RANKS).run(on_rank)
    return Move(escape(move.__name__), [before for before, _ in found], [after for _, after in found])


def _plain(numbers: list[float] | None) -> str:
    return "nothing" if numbers is None else " ".join(f"{number:g}" for number in numbers)
