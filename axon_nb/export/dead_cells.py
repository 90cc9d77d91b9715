"""Drops what a script does not need: cells that the final state does not depend on, and values that no cell uses."""

from __future__ import annotations

import ast

from axon_nb.export.effects import effects
from axon_nb.export.liveness import live_cells
from axon_nb.export.steps import CellStep, Step, ValueStep
from axon_nb.export.translate import parse

_RANK_NAMES = ("rank", "local_rank", "world_size", "device", "world", "mesh", "dist", "torch", "subgroup", "axon_nb")


def strip_dead(cells: list[CellStep], wanted: dict[int, list[str]]) -> list[CellStep]:
    """Strip dead cells down to their imports, which live cells may use; return the dead cells."""
    imported = {
        name
        for step in cells
        for statement in step.tree.body
        if isinstance(statement, (ast.Import, ast.ImportFrom))
        for name in effects([statement]).binds
    }
    live = live_cells([step.tree for step in cells], wanted, predefined={*_RANK_NAMES, *imported})
    dead = [step for step, alive in zip(cells, live, strict=True) if not alive]
    for step in dead:
        kept = [s for s in step.tree.body if isinstance(s, (ast.Import, ast.ImportFrom))]
        step.code = "".join(f"{ast.unparse(statement)}\n" for statement in kept)
        step.tree, step.omitted = parse(step.code), ""
    return dead


def without_unused(steps: list[Step]) -> list[Step]:
    """Drop values and remains of failed cells that no later cell uses."""
    needed: set[str] = set()
    replaced: set[str] = set()
    """Names that every rank receives again before a cell uses them."""
    kept: list[Step] = []
    for step in reversed(steps):
        if isinstance(step, CellStep):
            step_effects = effects(step.tree.body)
            if step.omitted and not step_effects.binds & needed:
                step.omitted = _omit_all(step)
                step.code, step.tree, step_effects = "", parse(""), effects([])
            needed |= step_effects.uses | step_effects.changes
            replaced -= step_effects.uses | step_effects.changes
        elif isinstance(step, ValueStep):
            if step.name not in needed or (step.name in replaced and step.source in ("file", "path")):
                continue
            replaced |= {step.name} if step.ranks is None else set()
            needed |= effects(parse(step.text).body).uses if step.source == "code" else set()
        kept.append(step)
    return kept[::-1]


def _omit_all(step: CellStep) -> str:
    return "".join(f"# {line}".rstrip() + "\n" for line in step.code.splitlines()) + step.omitted
