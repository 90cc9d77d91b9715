"""One sentence in a cell for what a library does unseen, and wrappers that look at calls to find it."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

where: Callable[[], tuple[object, str]] | None = None
"""Returns the number of the cell that runs, None outside, and the line, such as `` at line 3``."""
_shown: set[tuple[object, str]] = set()


def tell(sentence: str) -> None:
    """Print a sentence once in each cell; `{place}` in it becomes the line.

    Args:
        sentence: What happens, then the fix.
    """
    cell, place = where() if where is not None else (None, "")
    if (cell, sentence) not in _shown and cell is not None:
        _shown.add((cell, sentence))
        print(f"axon_nb: {sentence.replace('{place}', place)}", file=sys.stderr, flush=True)


def before(owner: Any, name: str, look: Callable[..., None]) -> None:
    """Call `look` with the arguments of each call of `owner.name`, before the call."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(Exception):  # a hint must never fail a call
            look(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, call)


def after(owner: Any, name: str, look: Callable[..., None]) -> None:
    """Call `look` with the result and the arguments of each call of `owner.name`, after the call."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        with contextlib.suppress(Exception):
            look(result, *args)
        return result

    setattr(owner, name, call)
