"""Values drawn for `%push`, `%pull`, `%scatter` and `%gather` in a kernel, and whether they came back unchanged."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

from IPython.core.getipython import get_ipython

from tests.support.cases.value_kinds import KINDS, NOT_SENT, Plain, differs, halves, nested

REFUSED = re.compile(
    r"UsageError: ('\w+' cannot be sent to ranks|Rank \d cannot send '\w+'): \w+: cannot pickle '[\w.]+' object, which "
    r"stays with its process|"
    r"UsageError: \w+ has type [^:]+: only dense tensors, arrays, tables and sequences can be split\. Use `%push` to "
    r"send all of it to each rank\.|"
    r"UsageError: --dim 0: \w+ has 0 dimensions\.|"
    r"UsageError: Cannot join parts of shapes [(),\d ]+ along dimension 0: all other dimensions must be equal\. Use "
    r"`%pull` to fetch them as they are\."
)
"""All sentences that may refuse a value."""


def drawn(seed: int, changed: int = -1) -> Any:
    """A random value; that with `changed` differs from the one without in this leaf alone, if it has so many."""
    draw = random.Random(-seed - 1)
    if draw.random() < 0.3:
        return KINDS[draw.choice(list(KINDS))](int(changed == 0))
    items = nested(seed, changed)[0]
    if draw.random() < 0.15:
        items.append(NOT_SENT[draw.choice(list(NOT_SENT))](1))
    wraps: list[Callable[[Any], Any]] = [list, list, list, tuple, tuple, lambda v: {"a": v}, Plain, lambda v: v[0]]
    return draw.choice(wraps)(items)


def _pulled(seed: int, got: Any) -> str:
    return differs(drawn(seed), got)


def _returned(seed: int, got: Any) -> str:
    whole = drawn(seed)
    if type(got) is list and type(whole) is not list:
        return differs(list(whole), [*got[0], *got[1]])
    return differs(whole, got)


def _gathered(seed: int, got: Any) -> str:
    parts = [drawn(seed), drawn(seed, 0)]
    if type(got) is list and type(parts[0]) is not list:
        return differs(parts, got)
    if type(got) in (list, tuple):
        return differs(type(got)([*parts[0], *parts[1]]), got)
    if not getattr(parts[0], "shape", True):
        return "" if got.tolist() == [part.tolist() for part in parts] else str(got)
    if hasattr(got, "dtypes"):  # numbers are converted to the dtype that holds all
        parts = [part.astype(got.dtypes) for part in parts]
    return differs(parts, halves(got))


def wrong(seeds: range) -> dict[str, str]:
    """Move a value of each seed in all four ways; what is not unchanged, and not refused in a sentence of ours.

    The ranks have ``v_own`` and ``v_same``, dicts of the values, where rank 1 has others in ``v_own``.
    """
    shell: Any = get_ipython()
    names = shell.user_ns
    found = {}

    def moved(what: str, seed: int, line: str, check: Any = None) -> bool:
        names.pop("v_got", None)
        try:
            shell.run_line_magic(*line.split(" ", 1))
            text = check(seed, names["v_got"]) if check else ""
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if REFUSED.fullmatch(text):
                return False
        if text:
            found[f"{what} {seed}"] = text
        return not text

    for seed in seeds:
        names[f"v_seed_{seed}"] = drawn(seed)
        moved("push", seed, f"push v_seed_{seed} --ranks 1")
        moved("pull", seed, f"pull v_own_{seed} --ranks 0 --as v_got", _pulled)
        moved("gather", seed, f"gather v_own_{seed} --ranks 0,1 --as v_got", _gathered)
        names[f"v_split_{seed}"] = drawn(seed)
        if moved("scatter", seed, f"scatter v_split_{seed} --ranks 0,1"):
            moved("return", seed, f"gather v_split_{seed} --ranks 0,1 --as v_got", _returned)
    return found


def prepare(rank: int, seeds: range) -> dict[str, Any]:
    """The variables of a rank: ``v_own_5`` of seed 5, which is another on rank 1."""
    return {f"v_own_{seed}": drawn(seed, rank - 1) for seed in seeds}


def wrongly_pushed(variables: dict[str, Any], seeds: range) -> tuple[dict[int, str], int]:
    """Of the values that were pushed to a rank: those that differ, and how many arrived."""
    there = {seed: variables[f"v_seed_{seed}"] for seed in seeds if f"v_seed_{seed}" in variables}
    found = {seed: differs(drawn(seed), value) for seed, value in there.items()}
    return {seed: text for seed, text in found.items() if text}, len(there)
