"""The what-if part of `%memory`: what can be asked, and an answer as bars, words and a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from html import escape
from typing import Any

from axon_nb.records.memory import ROLES, WITH_MOMENTUM, MemoryPrediction, MemorySetup, WhatIfState
from axon_nb.records.units import format_bytes
from axon_nb.widgets.memory.rows import NEAR, Bar, roles_in_words, segments

__all__ = ["AnswerBar", "answer_bars", "setup_in_words", "state_in_words", "what_if_content", "what_if_html"]

_DTYPES = ("float32", "bfloat16", "float16")
_CHOICES: dict[str, tuple[str, ...]] = {
    "strategy": ("full_shard", "shard_grad_op", "hybrid_shard", "optimizer_state", "no_shard", "ddp"),
    "dtype": ("", *_DTYPES),
    "mixed_precision": ("", *_DTYPES[1:]),
    "optimizer": ("adam", "adamw", "sgd", WITH_MOMENTUM, "adagrad", "rmsprop"),
    "offload": ("none", "params", "optimizer_states", "full"),
}
_LABELS = {
    "world": "ranks",
    "strategy": "strategy",
    "shard": "ranks to a copy",
    "dtype": "dtype",
    "mixed_precision": "mixed precision",
    "optimizer": "optimizer",
    "offload": "offload",
    "batch": "batch of a rank",
    "checkpointing": "checkpointing",
    "pp": "ranks of a pipeline",
    "tp": "ranks to a layer",
    "microbatches": "microbatches",
}
_OF_PIPELINES = ("pp", "tp", "microbatches")
_EMPTY = {"dtype": "as it is", "mixed_precision": "none"}
_FAR = 5.0
"""A capacity that is so many times what is there is told, and not drawn."""


@dataclass(frozen=True, slots=True)
class AnswerBar:
    """One bar of an answer."""

    label: str
    bar: Bar


def what_if_content(state: WhatIfState, capacity: int | None) -> dict[str, Any]:
    """What the page draws: controls, what is done now, and the answer.

    Args:
        state: Of the question.
        capacity: Bytes of the device, or of what a CPU rank could have; None: not known.
    """
    asked = state.setup or state.as_is
    bars = answer_bars(state, capacity)
    return {
        "fields": [] if state.as_is is None or asked is None else _fields(state.as_is, asked),
        "proposed": state.as_is is not None and not state.is_trained_so,
        "doing": state.doing,
        "share": state.share,
        "error": state.error,
        "heading": _heading(state),
        "bars": [{"label": own.label, **asdict(own.bar)} for own in bars],
        "roles": [role for role in ROLES if any(role == name for own in bars for name, _ in own.bar.segments)],
        "notes": _notes(state, capacity),
    }


def _fields(as_is: MemorySetup, asked: MemorySetup) -> list[dict[str, Any]]:
    made = []
    for item in fields(MemorySetup):
        name = item.name
        if name in _OF_PIPELINES and as_is.pp == 1:
            continue
        now, value = getattr(as_is, name), getattr(asked, name)
        field = {"name": name, "label": _LABELS[name], "now": now, "value": value}
        if name in _CHOICES:
            values = dict.fromkeys((*_CHOICES[name], now, value))
            field["choices"] = [[own, own or _EMPTY[name]] for own in values]
        made.append(field)
    return made


def answer_bars(state: WhatIfState, capacity: int | None) -> list[AnswerBar]:
    """What the rank with the highest peak holds: as it is, where something else was asked, and as asked."""
    shown = []
    if state.reference is not None and state.setup != state.as_is:
        shown.append(("as it is", state.reference))
    if state.estimate is not None:
        shown.append(("as asked" if state.setup != state.as_is else "as it is", state.estimate))
    moments = [(f"{label}, {name}", held) for label, own in shown for name, held in _moments(own)]
    most = max((sum(held.values()) for _, held in moments), default=0) or 1
    near = capacity is not None and capacity <= _FAR * most
    scale = max(most, capacity) if near and capacity is not None else most
    limit = capacity / scale if near and capacity is not None else None
    return [AnswerBar(label, Bar(segments(held, scale), None, limit, roles_in_words(held))) for label, held in moments]


def _moments(estimate: MemoryPrediction) -> list[tuple[str, Mapping[str, int]]]:
    held = [("after a step", estimate.persistent[estimate.worst])]
    return [*held, ("at the peak", estimate.peak[estimate.worst])] if estimate.is_whole else held


def setup_in_words(setup: MemorySetup) -> str:
    """Such as ``full_shard on 8 ranks, adam, batch 4, bfloat16 computes, checkpointing``."""
    ranks = f"{setup.world} rank{'' if setup.world == 1 else 's'}"
    parts = [f"{setup.strategy} on {ranks}", setup.optimizer, f"batch {setup.batch}"]
    if setup.strategy == "hybrid_shard":
        parts[0] += f", {setup.shard} to a copy"
    parts[0] += f", {setup.pp} of a pipeline" if setup.pp > 1 else ""
    parts[0] += f", {setup.tp} to a layer" if setup.tp > 1 else ""
    parts += [f"{setup.microbatches} microbatches"] if setup.pp > 1 else []
    parts += [setup.dtype] if setup.dtype else []
    parts += [f"{setup.mixed_precision} computes"] if setup.mixed_precision else []
    parts += [f"{setup.offload} offloaded"] if setup.offload != "none" else []
    return ", ".join([*parts, "checkpointing"] if setup.checkpointing else parts)


def _heading(state: WhatIfState) -> str:
    estimate = state.estimate
    if estimate is None:
        return ""
    words = setup_in_words(estimate.setup)
    if not estimate.is_whole:
        return f"{words}: {format_bytes(_total(estimate.persistent, estimate))}, {estimate.method}"
    ranks = "the highest of all ranks" if estimate.setup.world > 1 else "rank 0"
    return f"{words}: peak {format_bytes(_total(estimate.peak, estimate))} {estimate.when}, {ranks}; {estimate.method}"


def _total(by_rank: Mapping[int, Mapping[str, int]], estimate: MemoryPrediction) -> int:
    return sum(by_rank[estimate.worst].values())


def _notes(state: WhatIfState, capacity: int | None) -> list[str]:
    found = list(state.notes)
    estimate = state.estimate
    if estimate is None:
        return found
    highest = _total(estimate.peak if estimate.is_whole else estimate.persistent, estimate)
    if capacity is not None and highest > capacity:
        found.insert(0, f"⚠ It does not fit: {format_bytes(highest)} of {format_bytes(capacity)}.")
    elif capacity is not None and highest >= NEAR * capacity:
        found.insert(0, f"⚠ It is near the limit: {100 * highest / capacity:.0f} % of {format_bytes(capacity)}.")
    if estimate.host:
        found.append(f"Besides, {format_bytes(estimate.host)} are kept in the host's memory.")
    return [*found, *estimate.notes]


def state_in_words(state: WhatIfState) -> list[str]:
    """The last answer as lines of text; empty where nothing was asked."""
    if state.error:
        return [f"plan: {state.error}"]
    if state.estimate is None:
        return []
    bars = [f"  {own.label}: {own.bar.words}" for own in answer_bars(state, None)]
    return [f"plan: {_heading(state)}", *bars]


def what_if_html(state: WhatIfState, picture: Callable[[Bar], str]) -> str:
    """The last answer for a page without scripts.

    Args:
        state: Of the question.
        picture: Makes an image of a bar.
    """
    if not state_in_words(state):
        return ""
    cell = "text-align:left;padding:2px 14px 2px 0"
    rows = "".join(
        f"<tr style='background:none'><th scope='row' style='font-weight:normal;{cell}'>"
        f"{escape(own.label)}</th><td style='{cell}'>{picture(own.bar)}</td>"
        f"<td style='text-align:left'>{escape(own.bar.words)}</td></tr>"
        for own in answer_bars(state, None)
    )
    head = escape(state.error or _heading(state))
    return (
        f"<div style='margin-top:6px'><b>plan</b> {head}</div><table style='border:none'><tbody>{rows}</tbody></table>"
    )
