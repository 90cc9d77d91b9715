"""The report of `%%distributed --compare`: the first difference, its cause, and how many tensors differ."""

from __future__ import annotations

from html import escape

from axon_nb.cluster.comparison.verdict import Verdict
from axon_nb.records.ranks import format_ranks
from axon_nb.widgets.html import (
    NUMBER,
    WRAPPED_CELL,
    data_cells,
    figure,
    figures,
    note_lines,
    notice,
    row_title,
    table,
    table_row,
)


def comparison_bundle(verdict: Verdict) -> dict[str, str]:
    """Return the report as a MIME bundle: `text/html` without scripts, `text/plain`."""
    return {"text/html": _html(verdict), "text/plain": str(verdict)}


def _html(verdict: Verdict) -> str:
    found = verdict.finding
    if found is None:
        top = f"<div>{escape(verdict.sentence)}</div>"
    else:
        kind = f" ({found.module})" if found.module else ""
        what = f"{found.what} of {found.name or 'the model'}{kind}"
        top = notice(f"First difference: {what}.", found.explanation) + figures(
            [
                ("phase", found.phase, f"call {found.call + 1}"),
                ("ranks", format_ranks(found.ranks), ""),
                ("relative error", f"{found.relative:.2g}", f"allowed {found.allowed:.2g}"),
                ("cause", found.cause or "unknown", ""),
            ]
        )
    rows = [
        table_row(row_title(escape(what), WRAPPED_CELL), data_cells([str(total), str(wrong)], NUMBER))
        for what, (total, wrong) in ((key.removeprefix("the "), counts) for key, counts in verdict.counts.items())
    ]
    counts = table(["compared", "tensors", "differ"], rows)
    return figure(top + counts + note_lines(verdict.notes), heading="All ranks compared with one rank")
