"""Reports of finished cells: the card of a failure, the table of `--branch`, first differences, non-finite numbers.

The card of a failed cell appears above the plain text, the only part that terminals and programs show. Whatever ranks
report is escaped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from axon_nb.cluster.branches import Branch, Branches
from axon_nb.cluster.comparison import Verdict
from axon_nb.cluster.divergence import NumbersVerdict
from axon_nb.cluster.failures import Failure, RankError, agree, failure_line, next_commands
from axon_nb.records.colors import KINDS, STATES
from axon_nb.records.ranks import name_ranks
from axon_nb.records.units import format_bytes, format_seconds
from axon_nb.widgets import html

if TYPE_CHECKING:
    import pandas as pd

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_QUOTED = re.compile(r"'(\w[\w.]*)'")
_NAMED = re.compile(r"\branks? \d[\d,-]*")
_CALL_AT = re.compile(r"(\w+)(?: \([^)]*\))? at line (\d+)")
_MAX_PLACES = 2
_COMMAND = f"{html.CODE};white-space:nowrap;user-select:all"
_AROUND = 2
"""Lines of code shown before and after the one that failed."""
_MAX_MESSAGE = 600
_ERROR = STATES["error"][0].both
_MARK = f"background:{_ERROR}2E;color:inherit;border-radius:2px"
_CURVE_WIDTH, _CURVE_HEIGHT = 90, 24
_MAX_METRICS = 4
_PHASES = {"before": "the weights before", "forward": "forward", "backward": "backward", "step": "the optimizer step"}
_TITLES = {"shape": "shape or value"}
_NARROW = ("bytes", "dtype", "device")
"""Columns that are not wrapped."""
_STATES = {"ok": "finished", "timed_out": "timed out"}


def failure_card(failure: Failure, *, code: str, cell: int, ranks: Sequence[int]) -> str:
    """Return the card as HTML that needs neither scripts nor a style sheet.

    Args:
        failure: What happened.
        code: The cell, as ranks ran it: its first line is line 1.
        cell: Its number.
        ranks: The ranks that ran it.
    """
    claim, message = _claim(failure)
    words = f'<div style="margin:2px 0 6px;white-space:pre-wrap">{escape(_shortened(message))}</div>' if message else ""
    return (
        f'<figure style="margin:4px 0;padding:6px 12px;border-left:4px solid {_ERROR};overflow-x:auto;'
        'font-size:var(--jp-ui-font-size1, 13px);color:var(--jp-ui-font-color1, inherit)">'
        f'<figcaption style="margin:0"><b style="font-weight:600">{escape(claim)}</b></figcaption>'
        f"{words}{_failed_lines(failure, code, cell)}{_fates(failure, ranks)}"
        f'<div style="margin:6px 0 0">{html.prose(_kept_variables(failure, ranks))}</div>'
        f"{_next_steps(failure, ranks)}</figure>"
    )


def _claim(failure: Failure) -> tuple[str, str]:
    """Return what happened in a few words, and the message."""
    who = name_ranks(failure.alike).capitalize()
    cause = failure.cause
    if failure.explanation:
        return "The ranks could not finish the cell", failure.explanation[0].upper() + failure.explanation[1:]
    if cause.kind == "died" and cause.evalue.startswith("was "):
        return f"{who} {agree(cause.evalue, len(failure.alike))}", ""
    if cause.kind == "raised":
        is_key = cause.ename == "KeyError"  # whose message is the key alone
        others = [rank for rank, error in failure.errors.items() if error.kind == "raised"]
        others = [rank for rank in others if rank not in failure.alike]
        also = f"; {name_ranks(others)} failed, too" if others else ""
        return f"{who} raised {cause.ename}{also}", f"KeyError: {cause.evalue}" if is_key else cause.evalue
    verbs = {"died": "died", "stuck": "did not stop", "aborted": "did not finish"}
    return f"{who} {verbs[cause.kind]}", f"{who} {agree(cause.evalue, len(failure.alike))}."


def _shortened(text: str) -> str:
    text = _ANSI.sub("", text)
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}…"


def _failed_lines(failure: Failure, code: str, cell: int) -> str:
    """Return the line that failed, or those in which ranks waited, with their neighbours; empty if none is known."""
    place = failure_line(failure.cause, cell)
    lines = code.splitlines()
    first = 2 if lines and lines[0].startswith("# %%") else 1
    calls = _calls(failure) if place is None else {place[0]: ""}
    marked = [number for number in sorted(calls) if first <= number <= len(lines)][:_MAX_PLACES]
    if not marked:
        return ""
    around = {number + step for number in marked for step in range(-_AROUND, _AROUND + 1)}
    shown = sorted(number for number in around if first <= number <= len(lines))
    width = len(str(shown[-1] + 1))
    rows = "".join(
        f'<div style="{html.CODE}"><span style="{html.MUTED};user-select:none">{number:>{width}}  </span>'
        f"{_marked(lines[number - 1], failure.cause, calls[number]) if number in marked else escape(lines[number - 1])}"
        "</div>"
        for number in shown
    )
    caller = ""
    if place is not None and place[1] != place[0]:
        caller = f'<div style="margin:0 0 4px;{html.MUTED}">called at line {place[1]}</div>'
    return f'<pre style="margin:0 0 6px;padding:0;background:none;white-space:pre">{rows}</pre>{caller}'


def _calls(failure: Failure) -> dict[int, str]:
    """Return the calls in which ranks waited, or that did not match, by their lines."""
    texts = [*(error.evalue for error in failure.errors.values()), failure.explanation]
    return {int(line): call for text in texts for call, line in _CALL_AT.findall(text)}


def _marked(line: str, cause: RankError, call: str = "") -> str:
    """Mark the call, or the names that the error is about, or else the whole statement."""
    dotted = re.search(rf"(?:\w+\.)*\b{re.escape(call)}\b", line) if call else None
    names = (
        {dotted[0]}
        if dotted
        else {name for name in _QUOTED.findall(cause.evalue) if re.search(rf"\b{re.escape(name)}\b", line)}
    )
    if not names:
        indent = line[: len(line) - len(line.lstrip())]
        return f'{indent}<mark style="{_MARK}">{escape(line.strip())}</mark>'
    pattern = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in sorted(names, key=len, reverse=True)))
    parts, at = [], 0
    for match in pattern.finditer(line):
        parts += [escape(line[at : match.start()]), f'<mark style="{_MARK}">{escape(match[0])}</mark>']
        at = match.end()
    return "".join([*parts, escape(line[at:])])


def _fates(failure: Failure, ranks: Sequence[int]) -> str:
    """Return a table of what each rank did; ranks that did the same share a row."""
    shown = failure.alike if failure.cause.kind == "raised" and not failure.explanation else ()
    missed: list[str] = []
    if " finished the cell" in failure.explanation:  # they are known to be waited for
        missed = [f"{call} at line {line}" for line, call in _calls(failure).items()]
    groups: dict[str, list[int]] = {}
    for rank in sorted({*ranks, *failure.errors}):
        text = f"raised {failure.cause.ename}" if rank in shown else _fate(failure.errors.get(rank), missed)
        groups.setdefault(text, []).append(rank)
    if len(groups) == 1 and not failure.explanation:
        return ""
    rows = (
        html.table_row(
            html.row_title(escape(name_ranks(sharing))),
            f'<td style="{html.WRAPPED_CELL}">{escape(agree(text, len(sharing)))}</td>',
        )
        for text, sharing in sorted(groups.items(), key=lambda group: failure.cause.rank not in group[1])
    )
    return html.table((), rows)


def _fate(error: RankError | None, missed: Sequence[str] = ()) -> str:
    if error is None:
        return "finished the cell" + (f", and did not join {missed[0]}" if len(missed) == 1 else "")
    text = f"raised {error}" if error.kind == "raised" else error.evalue
    return _shortened(text.splitlines()[0] if text else error.kind)


def _kept_variables(failure: Failure, ranks: Sequence[int]) -> str:
    dead = sorted(rank for rank, error in failure.errors.items() if error.kind == "died")
    if not dead:
        return "All ranks keep their variables."
    if failure.kept.step is not None:
        return failure.kept.text
    are_all_dead = len(dead) >= len(set(ranks))
    if failure.kept.text:
        return failure.kept.text + ("" if are_all_dead else " All other ranks keep their variables.")
    return f"The variables of {name_ranks(dead)} are lost{'' if are_all_dead else '; all other ranks keep theirs'}."


def _next_steps(failure: Failure, ranks: Sequence[int]) -> str:
    """Return commands to run next, each with what it does; a click selects a command."""
    rows = "".join(
        html.table_row(
            f'<td style="{html.WRAPPED_CELL}"><code style="{_COMMAND}">{escape(command)}</code>'
            f' <span style="display:inline-block;{html.MUTED}">{escape(text)}</span></td>'
        )
        for command, text in next_commands(failure, ranks)
    )
    words = failure.hint.replace(failure.kept.remedy, "").strip() if rows else failure.hint
    hint = f'<div style="margin:4px 0 0">{html.prose(words)}</div>' if words else ""
    return hint + (html.table((), [rows]) if rows else "")


def variables_html(frame: pd.DataFrame) -> str:
    """Return what `Cluster.variables` has found as a table, without columns that say nothing."""
    columns = {name: [_cell(name, value) for value in frame[name]] for name in frame.columns}
    columns["ranks"] = list(map(_unbroken, columns["ranks"]))
    return _frame_html({_TITLES.get(name, name): texts for name, texts in columns.items()})


def difference_html(frame: pd.DataFrame, reference: int) -> str:
    """Return what `Cluster.diff` has found as a table; `reference` is the rank that the others are compared with."""
    columns = {name: [_cell(name, value) for value in frame[name]] for name in frame.columns}
    pairs = zip(columns.pop("rank"), columns.pop("values"), strict=True)
    return _frame_html({"differs": [_by_rank(reference, rank, both) for rank, both in pairs], **columns})


def _by_rank(reference: int, rank: str, values: str) -> str:
    ours, slash, theirs = values.partition(" / ")
    if not slash:
        return f"rank {rank}: {values}"
    short = _shortest(ours), _shortest(theirs)
    if short[0] != short[1]:
        ours, theirs = short
    return _unbroken(f"rank {reference}:\u00a0{ours}, rank {rank}:\u00a0{theirs}")


def _unbroken(text: str) -> str:
    """Return text whose ranks, such as ``ranks 2-3``, are not broken between lines."""
    return _NAMED.sub(lambda named: named[0].replace(" ", "\u00a0").replace("-", "\u2011"), text)


def _shortest(text: str) -> str:
    try:
        return f"{float(text):.4g}" if "." in text or "e" in text else text
    except ValueError:
        return text


def _frame_html(columns: dict[str, list[str]]) -> str:
    shown = {name: texts for name, texts in columns.items() if any(texts)}
    styles = [html.CELL if name in _NARROW else html.WRAPPED_CELL for name in list(shown)[1:]]
    rows = (
        html.table_row(html.row_title(escape(first), html.WRAPPED_CELL), *map(html.data_cells, zip(rest), styles))
        for first, *rest in zip(*shown.values(), strict=True)
    )
    return f'<div style="overflow-x:auto">{html.table(list(shown), rows)}</div>'


def _cell(column: str, value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if column == "bytes":
        return format_bytes(int(value)) if value else ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def branches_bundle(branches: Branches) -> dict[str, str]:
    """Return the table as a MIME bundle: `text/html` without scripts, `text/plain`."""
    metrics = branches.metrics[:_MAX_METRICS]
    ranges = {metric: _branch_range([row.curves.get(metric, ()) for row in branches.rows]) for metric in metrics}
    rows = [_branch_row(row, metrics, ranges, is_kept=row.value == branches.kept) for row in branches.rows]
    titles = [branches.name, "", *(title for metric in metrics for title in (metric, "")), "time", "peak memory"]
    frame = branches.to_frame()
    return {"text/html": html.table(titles, rows), "text/plain": frame.to_string(index=False)}


def _branch_row(row: Branch, metrics: Sequence[str], ranges: dict[str, tuple[float, float]], *, is_kept: bool) -> str:
    state = "diverged" if row.state == "ok" and _has_diverged(row) else _STATES.get(row.state, row.state)
    shown = f'<b style="font-weight:600">{escape(state)}, kept</b>' if is_kept else escape(state)
    error = f"<br>{escape(row.error)}" if row.error else ""
    title = html.row_title(f"{'✓ ' if is_kept else ''}{escape(row.value)}")
    cells = [title, f'<td style="{html.WRAPPED_CELL}">{shown}{error}</td>']
    for metric in metrics:
        last = row.last(metric)
        cells.append(html.data_cells(["" if last is None else f"{last:.4g}"], html.NUMBER))
        cells.append(f'<td style="{html.CELL}">{_sparkline(metric, row.curves.get(metric, ()), ranges[metric])}</td>')
    has_run = row.state != "not run"
    used = [format_seconds(row.seconds), format_bytes(row.peak_bytes)] if has_run else ["", ""]
    return html.table_row(*cells, html.data_cells(used, html.NUMBER))


def _has_diverged(row: Branch) -> bool:
    return any(not math.isfinite(curve[-1][1]) for curve in row.curves.values() if curve)


def _branch_range(curves: Sequence[Sequence[tuple[int, float]]]) -> tuple[float, float]:
    """Return the lowest and the highest value of the curves that stay finite, if there are any, else of all."""
    finite = [curve for curve in curves if curve and all(math.isfinite(value) for _, value in curve)]
    values = [value for curve in finite or curves for _, value in curve if math.isfinite(value)]
    return (min(values), max(values)) if values else (0.0, 0.0)


def _sparkline(metric: str, curve: Sequence[tuple[int, float]], limits: tuple[float, float]) -> str:
    """Draw a curve; all rows of a metric share their range, which one that diverges leaves with an arrow."""
    finite = [(step, value) for step, value in curve if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    low, high = limits
    first, width = finite[0][0], max(1, finite[-1][0] - finite[0][0])
    out = next((step for step, value in curve if not low <= value <= high), None)
    points = " ".join(
        f"{1 + (step - first) / width * (_CURVE_WIDTH - 2):.1f},"
        f"{_CURVE_HEIGHT - 2 - (min(max(value, low), high) - low) / ((high - low) or 1.0) * (_CURVE_HEIGHT - 4):.1f}"
        for step, value in finite
        if out is None or step <= out
    )
    x = 0.0 if out is None else min(_CURVE_WIDTH - 5.0, max(4.0, 1 + (out - first) / width * (_CURVE_WIDTH - 2)))
    arrow = "" if out is None else f'<path d="M{x - 3:.1f} 5l3-5l3 5z" fill="{_ERROR}"/>'
    size, color = f'width="{_CURVE_WIDTH}" height="{_CURVE_HEIGHT}"', KINDS["forward"].both
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_CURVE_WIDTH} {_CURVE_HEIGHT}" {size}>'
        f'<polyline points="{points}" '
        f'fill="none" stroke="{color}" stroke-width="2" stroke-linejoin="round"/>{arrow}</svg>'
    )
    what = f"{metric} from {finite[0][1]:.3g} to {curve[-1][1]:.3g}"
    return f'<img alt="{escape(what)}" src="{html.svg_uri(svg)}" {size} style="margin:0;max-width:none">'


def comparison_bundle(verdict: Verdict) -> dict[str, str]:
    """Return the report as a MIME bundle: `text/html` without scripts, `text/plain`."""
    return {"text/html": _comparison_html(verdict), "text/plain": str(verdict)}


def _comparison_html(verdict: Verdict) -> str:
    found = verdict.finding
    if found is None:
        top = f"<div>{escape(verdict.sentence)}</div>"
    else:
        kind = f" ({found.module})" if found.module else ""
        what = f"{found.what} of {found.name or 'the model'}{kind}"
        top = html.notice(f"First difference: {what}.", found.explanation) + html.figures(
            [
                ("found in", _PHASES[found.phase], f"at call {found.call + 1} of the module" if found.call else ""),
                ("on", name_ranks(found.ranks), ""),
                ("relative error", f"{found.relative:.2g}", f"rounding explains {found.allowed:.1g} at most"),
                *([("cause", found.cause, "")] if found.cause else []),
            ]
        )
    rows = [
        html.table_row(
            html.row_title(escape(what), html.WRAPPED_CELL), html.data_cells([str(total), str(wrong)], html.NUMBER)
        )
        for what, (total, wrong) in ((key.removeprefix("the "), counts) for key, counts in verdict.counts.items())
    ]
    counts = html.table(["compared", "tensors", "differ"], rows)
    return html.figure(top + counts + html.note_lines(verdict.notes), heading="All ranks compared with one rank")


def divergence_bundle(verdict: NumbersVerdict) -> dict[str, str]:
    """Return the report as a MIME bundle: `text/html` without scripts, `text/plain`."""
    return {"text/html": _divergence_html(verdict), "text/plain": str(verdict)}


def _divergence_html(verdict: NumbersVerdict) -> str:
    found = verdict.finding
    if found is None:
        top = f"<div>{escape(verdict.sentence)}</div>"
    else:
        entries = [
            ("also different", str(len(found.more) or ""), "parameters"),
            ("computed by", found.operation, ""),
        ]
        shown = [entry for entry in entries if entry[1]]
        top = html.notice(found.claim, found.advice) + html.figures(shown)
    return html.figure(top + html.note_lines(verdict.notes[found is not None :]), heading="Numbers of all ranks")
