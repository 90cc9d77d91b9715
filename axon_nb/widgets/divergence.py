"""The report of `config watch_numbers`: where replicas first differ, or a number ceased to be finite."""

from __future__ import annotations

from html import escape

from axon_nb.cluster.divergence.verdict import NumbersVerdict
from axon_nb.records.ranks import format_ranks
from axon_nb.widgets.html import figure, figures, note_lines, notice


def divergence_bundle(verdict: NumbersVerdict) -> dict[str, str]:
    """Return the report as a MIME bundle: `text/html` without scripts, `text/plain`."""
    return {"text/html": _html(verdict), "text/plain": str(verdict)}


def _html(verdict: NumbersVerdict) -> str:
    found = verdict.finding
    if found is None:
        top = f"<div>{escape(verdict.sentence)}</div>"
    else:
        entries = [
            ("ranks", format_ranks(found.ranks), ""),
            ("when", found.when, ""),
            ("equal", format_ranks(found.others), "ranks"),
            ("also different", str(len(found.more)), "parameters"),
            ("computed by", found.operation, ""),
        ]
        shown = [entry for entry in entries if entry[1] not in ("", "0")]
        top = notice(found.claim, found.advice) + figures(shown)
    return figure(top + note_lines(verdict.notes[found is not None :]), heading="Numbers of all ranks")
