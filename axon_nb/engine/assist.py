"""What a front end asks while somebody types: completions, help on a name, and what names there are.

Answered from the control channel, so that the main thread is left to its cell. The work is done in a thread of its own
and waited for only briefly: what a completion runs into (a slow `__dir__`, a device that hangs) must not keep an
interrupt from coming through.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from IPython.core.completer import IPCompleter

from axon_nb.engine.kernel_hooks import ControlHandler
from axon_nb.engine.name_snapshot import names_snapshot

__all__ = ["Assistant"]

_LIMIT_S = 0.08
_MAX_MATCHES = 1000
_MAX_TEXT = 200_000
_POLICY = {
    # Objects whose own `__getattr__` or `__getitem__` IPython may call for `model.layers[0].`: they only look up. Not
    # those of tensors: indexing a DTensor communicates.
    "allowed_getattr_external": {("pandas", "DataFrame"), ("pandas", "Series"), ("torch", "nn", "Module")},
    "allowed_getitem_external": {
        ("numpy", "ndarray"),
        ("numpy", "void"),
        ("pandas", "DataFrame"),
        ("pandas", "Series"),
        ("pandas", "core", "indexing", "_LocIndexer"),
        ("pandas", "core", "indexing", "_iLocIndexer"),
        ("torch", "nn", "ModuleDict"),
        ("torch", "nn", "ModuleList"),
        ("torch", "nn", "Sequential"),
    },
}


class Assistant:
    """Answers for one rank; one question at a time.

    Args:
        shell: The rank's IPython shell.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._completer: Any = None
        self._thread: threading.Thread | None = None

    def handlers(self) -> dict[str, ControlHandler]:
        """The requests of the control channel, by message type."""
        return {"axon_complete": self._complete, "axon_inspect": self._inspect, "axon_names": self._names}

    def _complete(self, content: dict[str, Any]) -> dict[str, Any]:
        def work() -> dict[str, Any]:
            line, cursor = content["line"], content["cursor"]
            fragment, matches = self._own_completer().complete(line_buffer=line, cursor_pos=cursor)
            return {"fragment": fragment, "matches": list(matches)[:_MAX_MATCHES]}

        return self._briefly(work)

    def _inspect(self, content: dict[str, Any]) -> dict[str, Any]:
        def work() -> dict[str, Any]:
            try:
                bundle = self._shell.object_inspect_mime(
                    content["name"], detail_level=content["detail"], omit_sections=tuple(content.get("omit", ()))
                )
            except KeyError:
                return {"found": False}
            if not self._shell.enable_html_pager:
                bundle.pop("text/html", None)
            return {"found": True, "data": {mime: text[:_MAX_TEXT] for mime, text in bundle.items()}}

        return self._briefly(work)

    def _names(self, content: dict[str, Any]) -> dict[str, Any]:
        return self._briefly(lambda: names_snapshot(self._shell, known=set(content.get("known", ()))))

    def _own_completer(self) -> Any:
        if self._completer is None:
            shell = self._shell
            # Without jedi, which takes seconds at first and knows no more of living objects than they do.
            self._completer = IPCompleter(
                shell=shell,
                namespace=shell.user_ns,
                global_namespace=shell.user_global_ns,
                parent=shell,
                use_jedi=False,
                policy_overrides=_POLICY,
            )
            self._completer.custom_completers = shell.Completer.custom_completers
        return self._completer

    def _briefly(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The answer, or ``late`` when it takes more than a moment or the one before has not come back."""
        if self._thread is not None and self._thread.is_alive():
            return {"late": True}
        answers: list[dict[str, Any]] = []

        def run() -> None:
            try:
                answers.append(work())
            except BaseException as error:
                answers.append({"refused": type(error).__name__})

        self._thread = threading.Thread(target=run, name="axon_nb-assist", daemon=True)
        self._thread.start()
        self._thread.join(_LIMIT_S)
        return answers[0] if answers else {"late": True}
