"""The what-if part of `%memory`: controls for a scenario, and its prediction as bars, text and a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from html import escape
from typing import Any

from axon_nb.records.memory import ROLES, WITH_MOMENTUM, MemoryPrediction, MemorySetup, WhatIfState
from axon_nb.records.units import format_bytes
from axon_nb.widgets.html import CELL, WRAPPED_CELL, row_title, table, table_row
from axon_nb.widgets.memory.bars import Bar, describe_roles, stacked_bar
from axon_nb.widgets.memory.rows import NEAR
from axon_nb.widgets.memory.scale import Scale

_DTYPES = ("float32", "bfloat16", "float16")
_CHOICES: dict[str, tuple[str, ...]] = {
    "strategy": ("full_shard", "shard_grad_op", "hybrid_shard", "optimizer_state", "no_shard", "ddp"),
    "dtype": ("", *_DTYPES),
    "mixed_precision": ("", *_DTYPES[1:]),
    "optimizer": ("adam", "adamw", "sgd", WITH_MOMENTUM, "adagrad", "rmsprop"),
    "cpu_offload": ("none", "params", "optimizer_states", "full"),
}
_LABELS = {
    "world_size": "ranks",
    "strategy": "strategy",
    "shard": "ranks per replica",
    "dtype": "dtype",
    "mixed_precision": "mixed precision",
    "optimizer": "optimizer",
    "cpu_offload": "offload",
    "batch": "batch per rank",
    "activation_checkpointing": "checkpointing",
    "pp": "pipeline ranks",
    "tp": "tensor-parallel ranks",
    "num_microbatches": "microbatches",
}
_PIPELINE_FIELDS = ("pp", "tp", "num_microbatches")
_FAR = 20
"""A capacity above this multiple of the predicted memory is shown as text only: bars would be too short."""
_EMPTY = {"dtype": "unchanged", "mixed_precision": "none"}


@dataclass(frozen=True, slots=True)
class LabelledBar:
    """One bar of a prediction."""

    label: str
    bar: Bar


def what_if_content(state: WhatIfState, capacity: int | None) -> dict[str, Any]:
    """Return what the page draws: controls, progress and the prediction.

    Args:
        state: State of the scenario.
        capacity: Bytes of the device, or those available to a CPU rank; None: unknown.
    """
    setup = state.setup or state.as_is
    bars = prediction_bars(state, capacity)
    scale = _scale(state, capacity)
    return {
        "fields": [] if state.as_is is None or setup is None else _fields(state.as_is, setup),
        "proposed": state.as_is is not None and not state.is_trained_so,
        "doing": state.doing,
        "share": state.share,
        "error": state.error,
        "heading": _heading(state),
        "verdict": _verdict(state, capacity),
        "bars": [{"label": labelled.label, **asdict(labelled.bar)} for labelled in bars],
        "ticks": [asdict(tick) for tick in scale.ticks] if bars else [],
        "unit": scale.unit,
        "changes": _changes(state, scale),
        "roles": [role for role in ROLES if any(role == name for each in bars for name, _ in each.bar.segments)],
        "notes": _notes(state),
    }


def _fields(current: MemorySetup, proposed: MemorySetup) -> list[dict[str, Any]]:
    controls = []
    for field in fields(MemorySetup):
        name = field.name
        if name in _PIPELINE_FIELDS and current.pp == 1:
            continue
        now, value = getattr(current, name), getattr(proposed, name)
        control = {"name": name, "label": _LABELS[name], "current": now, "value": value}
        if name in _CHOICES:
            choices = dict.fromkeys((*_CHOICES[name], now, value))
            control["choices"] = [[choice, choice or _EMPTY[name]] for choice in choices]
        controls.append(control)
    return controls


def prediction_bars(state: WhatIfState, capacity: int | None) -> list[LabelledBar]:
    """Return bars of the rank with the highest peak: for the current setup, and for the proposed one if it differs."""
    shown = []
    if state.reference is not None and state.setup != state.as_is:
        shown.append(("current", state.reference))
    if state.estimate is not None:
        shown.append(("proposed" if state.setup != state.as_is else "current", state.estimate))
    uses = [(f"{label}, {moment}", use) for label, prediction in shown for moment, use in _moments(prediction)]
    scale = _scale(state, capacity)
    mark = None if scale.capacity is None else scale.share(scale.capacity)
    return [LabelledBar(label, stacked_bar(use, scale, None, mark, describe_roles(use))) for label, use in uses]


def _scale(state: WhatIfState, capacity: int | None) -> Scale:
    """Return the axis of the bars; if all are far below the capacity, it ends before it."""
    predictions = [prediction for prediction in (state.reference, state.estimate) if prediction is not None]
    sizes = [sum(use.values()) for prediction in predictions for _, use in _moments(prediction)]
    is_far = capacity is not None and capacity > _FAR * max(sizes, default=0)
    return Scale.of(sizes, None if is_far else capacity)


def _changes(state: WhatIfState, scale: Scale) -> list[dict[str, Any]]:
    """Return the memory of each role now and as proposed, at the peak if that is known; empty: nothing to compare."""
    if state.reference is None or state.estimate is None or state.setup == state.as_is:
        return []
    now, then = (_moments(prediction)[-1][1] for prediction in (state.reference, state.estimate))
    changes = {role: then.get(role, 0) - now.get(role, 0) for role in ROLES if now.get(role) or then.get(role)}
    most = max(map(abs, changes.values()), default=0) or 1
    return [
        {
            "role": role,
            "now": scale.number(now.get(role, 0)),
            "then": scale.number(then.get(role, 0)),
            "change": f"{'+' if change > 0 else '−'}{scale.number(abs(change))}" if change else "–",
            "share": abs(change) / most,
            "isLess": change < 0,
        }
        for role, change in changes.items()
    ]


def _verdict(state: WhatIfState, capacity: int | None) -> dict[str, str] | None:
    """Return whether the scenario fits; None: it is not known."""
    estimate = state.estimate
    if estimate is None or capacity is None:
        return None
    highest = _total(estimate.peak if estimate.is_whole else estimate.persistent, estimate)
    left = capacity - highest
    text = f"{format_bytes(highest)} of {format_bytes(capacity)}"
    if left < 0:
        return {"claim": "It does not fit.", "text": f"{text}: {format_bytes(-left)} too much.", "state": "error"}
    near = highest >= NEAR * capacity
    claim = "It fits, but barely." if near else "It fits."
    return {"claim": claim, "text": f"{text}, {format_bytes(left)} left.", "state": "warn" if near else "ok"}


def _moments(prediction: MemoryPrediction) -> list[tuple[str, Mapping[str, int]]]:
    moments = [("after a step", prediction.persistent[prediction.worst])]
    return [*moments, ("at the peak", prediction.peak[prediction.worst])] if prediction.is_whole else moments


def describe_setup(setup: MemorySetup) -> str:
    """Return text such as ``full_shard on 8 ranks, adam, batch 4, computing in bfloat16, checkpointing``."""
    ranks = f"{setup.world_size} rank{'' if setup.world_size == 1 else 's'}"
    parts = [f"{setup.strategy} on {ranks}", setup.optimizer, f"batch {setup.batch}"]
    if setup.strategy == "hybrid_shard":
        parts[0] += f", {setup.shard} per replica"
    parts[0] += f", {setup.pp} per pipeline" if setup.pp > 1 else ""
    parts[0] += f", {setup.tp} per layer" if setup.tp > 1 else ""
    parts += [f"{setup.num_microbatches} microbatches"] if setup.pp > 1 else []
    parts += [setup.dtype] if setup.dtype else []
    parts += [f"computing in {setup.mixed_precision}"] if setup.mixed_precision else []
    parts += [f"{setup.cpu_offload} offloaded"] if setup.cpu_offload != "none" else []
    return ", ".join([*parts, "checkpointing"] if setup.activation_checkpointing else parts)


def _heading(state: WhatIfState) -> str:
    estimate = state.estimate
    if estimate is None:
        return ""
    setup = describe_setup(estimate.setup)
    if not estimate.is_whole:
        return f"{setup}: {format_bytes(_total(estimate.persistent, estimate))}, {estimate.method}"
    ranks = "the highest of all ranks" if estimate.setup.world_size > 1 else "rank 0"
    return f"{setup}: peak {format_bytes(_total(estimate.peak, estimate))} {estimate.when}, {ranks}; {estimate.method}"


def _total(by_rank: Mapping[int, Mapping[str, int]], estimate: MemoryPrediction) -> int:
    return sum(by_rank[estimate.worst].values())


def _notes(state: WhatIfState) -> list[str]:
    lines = list(state.notes)
    estimate = state.estimate
    if estimate is None:
        return lines
    if estimate.host:
        lines.append(f"Another {format_bytes(estimate.host)} of host memory is used.")
    return [*lines, *estimate.notes]


def what_if_lines(state: WhatIfState) -> list[str]:
    """Return the last prediction as lines of text; empty if there is none."""
    if state.error:
        return [f"plan: {state.error}"]
    if state.estimate is None:
        return []
    bars = [f"  {labelled.label}: {labelled.bar.text}" for labelled in prediction_bars(state, None)]
    return [f"plan: {_heading(state)}", *bars]


def what_if_html(state: WhatIfState, picture: Callable[[Bar], str]) -> str:
    """Return the last prediction for a page without scripts.

    Args:
        state: State of the scenario.
        picture: Makes an image of a bar.
    """
    if not what_if_lines(state):
        return ""
    rows = (
        table_row(
            row_title(escape(labelled.label)),
            f'<td style="{CELL}">{picture(labelled.bar)}</td>',
            f'<td style="{WRAPPED_CELL}">{escape(labelled.bar.text)}</td>',
        )
        for labelled in prediction_bars(state, None)
    )
    heading = escape(state.error or _heading(state))
    return f'<div style="margin-top:6px"><b>plan</b> {heading}</div>{table((), rows)}'
