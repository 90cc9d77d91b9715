"""What the course shows besides checks: hints, solutions, guesses, progress. As text, and as HTML without scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from axon_nb.records.colors import KINDS, STATES

_WIDTH = 220
"""Length of the longest bar in px."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text, which is shown as it is."""

    text: str
    code: bool = False
    """Whether it is Python."""

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        from axon_nb.widgets.html import prose

        style = "white-space:pre-wrap;margin:4px 0" + ("" if self.code else ";font-family:inherit;background:none")
        return f'<pre style="{style}">{escape(self.text) if self.code else prose(self.text)}</pre>'


@dataclass(frozen=True, slots=True)
class Guesses:
    """A learner's guesses, beside what was measured."""

    question: str
    guessed: Mapping[str, Any]
    measured: Mapping[str, Any]
    missing: tuple[str, ...]
    """Names that still stand for nothing."""

    @property
    def _remark(self) -> str:
        if self.missing:
            names = ", ".join(self.missing)
            return f"Type your guess in place of `...`: {names}. Then run this cell again; a wrong guess costs nothing."
        return "" if self.measured else "Kept. Now look."

    def _rows(self) -> list[tuple[str, Any, Any]]:
        names = dict.fromkeys([*self.guessed, *self.measured])
        return [(name, self.guessed.get(name, "no guess"), self.measured.get(name)) for name in names]

    def __repr__(self) -> str:
        lines = [
            f"  {name.replace('_', ' ')}: {_format(guess)}" + ("" if real is None else f", measured {_format(real)}")
            for name, guess, real in self._rows()
        ]
        return "\n".join([f"your guess {self.question}", *lines, *filter(None, [self._remark])])

    def _repr_html_(self) -> str:
        from axon_nb.widgets.html import CELL, figure, note_lines, row_title, table, table_row

        rows = []
        for name, guess, real in self._rows():
            pair = [(label, value) for label, value in (("guess", guess), ("measured", real)) if value is not None]
            top = max((abs(value) for _, value in pair if _is_number(value)), default=0) or 1
            bars = "".join(
                f"<div>{_bar(value, top, label)} {escape(_format(value))} <small>{label}</small></div>"
                for label, value in pair
            )
            rows.append(table_row(row_title(escape(name.replace("_", " "))), f'<td style="{CELL}">{bars}</td>'))
        body = table((), rows) + note_lines(filter(None, [self._remark]))
        return figure(body, heading=f"Your guess {self.question}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _format(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if _is_number(value) else str(value)


def _bar(value: Any, top: float, label: str) -> str:
    if not _is_number(value):
        return ""
    color = KINDS["collective" if label == "measured" else "wait"].both
    width = max(1, round(_WIDTH * abs(value) / top))
    return (
        f'<span style="display:inline-block;height:10px;width:{width}px;background:{color};'
        'border-radius:2px;vertical-align:middle"></span>'
    )


@dataclass(frozen=True, slots=True)
class Progress:
    """A row of dots: exercises that are done, tried, untouched."""

    exercises: tuple[tuple[str, str, Mapping[str, Any]], ...]
    """(id, title, entry of the journal) of each."""

    def _states(self) -> list[tuple[str, str, str]]:
        return [
            (number, title, "done" if entry.get("passed") else "tried" if entry.get("attempts") else "open")
            for number, title, entry in self.exercises
        ]

    @property
    def _summary(self) -> str:
        done = sum(state == "done" for *_, state in self._states())
        return f"{done} of {len(self.exercises)} exercises done"

    def __repr__(self) -> str:
        marks = {"done": "●", "tried": "◐", "open": "○"}
        by_notebook: dict[str, str] = {}
        for number, _, state in self._states():
            notebook = number.partition(".")[0]
            by_notebook[notebook] = by_notebook.get(notebook, "") + marks[state]
        return "\n".join([self._summary, "  ".join(f"{name} {dots}" for name, dots in by_notebook.items())])

    def _repr_html_(self) -> str:
        from axon_nb.widgets.html import MUTED, figure, svg_uri

        notebooks: dict[str, list[tuple[str, str]]] = {}
        for number, title, state in self._states():
            notebooks.setdefault(number.partition(".")[0], []).append((f"{number} {title}: {state}", state))
        pictures = "".join(
            f'<span style="white-space:nowrap"><span style="{MUTED}">{notebook}</span> <img alt="'
            f'{escape("; ".join(text for text, _ in marks))}" src="{svg_uri(_dots(marks))}" height="16" '
            'style="display:inline-block;vertical-align:middle;margin:0"></span>'
            for notebook, marks in notebooks.items()
        )
        return figure(f'<div style="display:flex;flex-wrap:wrap;gap:4px 18px">{pictures}</div>', heading=self._summary)


def _dots(marks: Sequence[tuple[str, str]]) -> str:
    """Draw (text, state) of each exercise as a dot."""
    paints = {"done": STATES["ok"][0].both, "tried": KINDS["wait"].both, "open": "none"}
    dots = "".join(
        f'<circle cx="{10 + 20 * i}" cy="8" r="7" fill="{paints[state]}" stroke="#767676">'
        f"<title>{escape(text)}</title></circle>"
        for i, (text, state) in enumerate(marks)
    )
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{20 * len(marks)}" height="16">{dots}</svg>'
