"""Adds a matcher to the completer of an IPython shell, also of one that takes no matchers of that kind.

The public interface came with IPython 8.6. Before it, a matcher sees a word, not the cell; so `completions` is wrapped,
which ipykernel and the terminal call with the whole cell. Where both are missing, Tab stays the notebook's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from IPython.core import completer


def simple_completion(text: str, kind: str) -> Any:
    """A candidate, with the type that a front end shows beside it."""
    return getattr(completer, "SimpleCompletion", SimpleNamespace)(text=text, type=kind)


def add_matcher(shell: Any, matcher: Callable[[Any], Any]) -> None:
    """Have `shell` ask this matcher, of the second version of IPython's interface, before its own."""
    if hasattr(completer, "CompletionContext"):
        shell.Completer.custom_matchers.append(matcher)
    elif hasattr(shell.Completer, "completions"):
        shell.Completer.completions = _before(shell.Completer.completions, matcher)


def remove_matcher(shell: Any, matcher: Callable[[Any], Any]) -> None:
    """Undo `add_matcher`."""
    if hasattr(completer, "CompletionContext"):
        shell.Completer.custom_matchers.remove(matcher)
    else:
        vars(shell.Completer).pop("completions", None)


def _before(
    completions: Callable[[str, int], Iterator[Any]], matcher: Callable[[Any], Any]
) -> Callable[[str, int], Iterator[Any]]:
    def with_matcher(text: str, offset: int) -> Iterator[Any]:
        before = text[:offset].split("\n")
        context = SimpleNamespace(full_text=text, cursor_line=len(before) - 1, cursor_position=len(before[-1]))
        result = matcher(context)
        if not result["suppress"]:
            yield from completions(text, offset)
        start = offset - len(result.get("matched_fragment", ""))
        for found in result["completions"]:
            yield completer.Completion(start, offset, found.text, type=found.type, _origin="axon_nb")

    return with_matcher
