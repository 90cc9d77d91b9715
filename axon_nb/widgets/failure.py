"""A failed cell as a card: the root cause, its line, what each rank did, what is kept, and what to run next.

It appears above the plain text, the only part that terminals and programs show. Whatever ranks report is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from axon_nb.cluster.failures.next_steps import failure_line, next_commands
from axon_nb.cluster.failures.report import Failure, RankError, agree
from axon_nb.records.colors import STATES
from axon_nb.records.ranks import name_ranks
from axon_nb.widgets.html import CELL, CODE, MUTED, WRAPPED_CELL, prose, row_title, table, table_row

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_QUOTED = re.compile(r"'(\w[\w.]*)'")
_AROUND = 2
"""Lines of code shown before and after the one that failed."""
_MAX_MESSAGE = 600
_ERROR = STATES["error"][0].both
_MARK = f"background:{_ERROR}2E;color:inherit;border-radius:2px"


def failure_card(failure: Failure, *, code: str, cell: int, ranks: Sequence[int]) -> str:
    """Return the card as HTML that needs neither scripts nor a style sheet.

    Args:
        failure: What happened.
        code: The cell, as ranks ran it: its first line is line 1.
        cell: Its number.
        ranks: The ranks that ran it.
    """
    claim, message = _claim(failure)
    return (
        f'<figure style="margin:4px 0;padding:6px 12px;border-left:4px solid {_ERROR};overflow-x:auto;'
        'font-size:var(--jp-ui-font-size1, 13px);color:var(--jp-ui-font-color1, inherit)">'
        f'<figcaption style="margin:0"><b style="font-weight:600">{escape(claim)}</b></figcaption>'
        f'<div style="margin:2px 0 6px;white-space:pre-wrap">{escape(_shortened(message))}</div>'
        f"{_source(failure, code, cell)}{_fates(failure, ranks)}"
        f'<div style="margin:6px 0 0">{prose(_kept(failure, ranks))}</div>{_next_steps(failure, ranks)}</figure>'
    )


def _claim(failure: Failure) -> tuple[str, str]:
    """Return what happened in a few words, and the message."""
    who = name_ranks(failure.alike).capitalize()
    cause = failure.cause
    if failure.explanation:
        return "The ranks could not finish the cell", failure.explanation
    if cause.kind == "raised":
        is_key = cause.ename == "KeyError"  # whose message is the key alone
        return f"{who} raised {cause.ename}", f"KeyError: {cause.evalue}" if is_key else cause.evalue
    verbs = {"died": "died", "stuck": "did not stop", "aborted": "did not finish"}
    return f"{who} {verbs[cause.kind]}", f"{who} {agree(cause.evalue, len(failure.alike))}."


def _shortened(text: str) -> str:
    text = _ANSI.sub("", text)
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}…"


def _source(failure: Failure, code: str, cell: int) -> str:
    """Return the line that failed with its neighbours; empty if it is not in this cell."""
    place = failure_line(failure.cause, cell)
    lines = code.splitlines()
    if place is None or not 1 <= place[0] <= len(lines):
        return ""
    failed, called = place
    first = 2 if lines[0].startswith("# %%") else 1
    shown = range(max(first, failed - _AROUND), min(len(lines), failed + _AROUND) + 1)
    width = len(str(shown.stop))
    rows = "".join(
        f'<div style="{CODE}"><span style="{MUTED};user-select:none">{number:>{width}}  </span>'
        f"{_marked(lines[number - 1], failure.cause) if number == failed else escape(lines[number - 1])}</div>"
        for number in shown
    )
    caller = f'<div style="margin:0 0 4px;{MUTED}">called at line {called}</div>' if called != failed else ""
    return f'<pre style="margin:0 0 6px;padding:0;background:none;white-space:pre">{rows}</pre>{caller}'


def _marked(line: str, cause: RankError) -> str:
    """Mark the names that the error is about, or else the whole statement."""
    names = {name for name in _QUOTED.findall(cause.evalue) if re.search(rf"\b{re.escape(name)}\b", line)}
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
    groups: dict[str, list[int]] = {}
    for rank in sorted({*ranks, *failure.errors}):
        text = f"raised {failure.cause.ename}" if rank in shown else _fate(failure.errors.get(rank))
        groups.setdefault(text, []).append(rank)
    if len(groups) == 1 and not failure.explanation:
        return ""
    rows = (
        table_row(
            row_title(escape(name_ranks(sharing))),
            f'<td style="{WRAPPED_CELL}">{escape(agree(text, len(sharing)))}</td>',
        )
        for text, sharing in sorted(groups.items(), key=lambda group: failure.cause.rank not in group[1])
    )
    return table((), rows)


def _fate(error: RankError | None) -> str:
    if error is None:
        return "finished the cell"
    text = f"raised {error}" if error.kind == "raised" else error.evalue
    return _shortened(text.splitlines()[0] if text else error.kind)


def _kept(failure: Failure, ranks: Sequence[int]) -> str:
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
        table_row(
            f'<td style="{CELL}"><code style="{CODE};user-select:all">{escape(command)}</code></td>',
            f'<td style="{WRAPPED_CELL};{MUTED}">{escape(text)}</td>',
        )
        for command, text in next_commands(failure, ranks)
    )
    hint = f'<div style="margin:4px 0 0">{prose(failure.hint)}</div>' if failure.hint else ""
    return hint + (table((), [rows]) if rows else "")
