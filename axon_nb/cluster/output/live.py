"""The live area of a cell: one display, updated in place, for progress bars and unfinished lines."""

from __future__ import annotations

import html
import uuid
from collections.abc import Mapping, Sequence

from axon_nb.cluster.output.sinks import Sink
from axon_nb.records.ranks import format_ranks

__all__ = ["LiveArea", "label"]

_MAX_FIXED = 60


def label(ranks: Sequence[int]) -> str:
    """``[rank 2]`` or ``[ranks 0-3]``."""
    return f"[rank {ranks[0]}]" if len(ranks) == 1 else f"[ranks {format_ranks(ranks)}]"


class LiveArea:
    """Shows the rows that still change, one line a rank, equal ones merged; its last state stays."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._fixed: list[tuple[int, list[int], str]] = []
        self._turns: dict[int, int] = {}
        self._shown = ""
        self._display_id = ""

    @property
    def visible(self) -> bool:
        """Whether it has been shown."""
        return bool(self._display_id)

    def fix(self, rank: int, row: str) -> None:
        """A row that will not change any more; rows of the same turn are shown in the order of ranks."""
        turn = self._turns[rank] = self._turns.get(rank, 0) + 1
        for _, ranks, text in self._fixed:
            if text == row and rank not in ranks:
                ranks.append(rank)
                break
        else:
            self._fixed.append((turn, [rank], row))
        self._fixed.sort(key=lambda fixed: (fixed[0], min(fixed[1])))
        del self._fixed[:-_MAX_FIXED]

    def show(self, rows: Mapping[int, Sequence[str]]) -> None:
        """Show the fixed rows and, below them, what is live now, by rank."""
        live: list[tuple[list[int], str]] = []
        for rank, texts in rows.items():
            for text in texts:
                for ranks, other in live:
                    if other == text and rank not in ranks:
                        ranks.append(rank)
                        break
                else:
                    live.append(([rank], text))
        text = "\n".join(f"{label(ranks)} {row}" for ranks, row in [*((r, t) for _, r, t in self._fixed), *live])
        if text == self._shown:
            return
        update = bool(self._display_id)
        if not update:
            self._display_id = f"axon_nb-live-{uuid.uuid4().hex}"
        self._shown = text
        style = "margin: 0; line-height: inherit; font-size: inherit; white-space: pre"
        markup = f'<pre style="{style}">{html.escape(text)}</pre>'
        bundle = {"text/plain": text, "text/html": markup}
        self._sink.display(bundle, {}, display_id=self._display_id, update=update)

    def reset(self) -> None:
        """The cell's output was cleared."""
        self._fixed.clear()
        self._turns.clear()
        self._shown = self._display_id = ""
