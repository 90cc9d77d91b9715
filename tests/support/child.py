"""A plain Python process that runs what it is sent, line by line; `tests.support.script` drives it.

Not imported by tests: it is the `__main__` of its own process, without IPython and without an event loop.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import sys
from typing import Any


def main() -> None:
    """Answer each line on the stream that was standard output; what the code prints is part of the answer."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for line in sys.stdin:
        printed, errors = io.StringIO(), io.StringIO()
        answer: dict[str, Any] = {}
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            try:
                answer["value"] = repr(_run(json.loads(line), namespace))
            except BaseException as error:
                kinds = [kind.__name__ for kind in type(error).__mro__]
                answer |= {"kinds": kinds, "message": str(error)}
        answers.write(json.dumps({**answer, "out": printed.getvalue(), "err": errors.getvalue()}) + "\n")


def _run(code: str, namespace: dict[str, Any]) -> Any:
    """Execute; the value of the last expression."""
    tree = ast.parse(code)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        return exec(compile(tree, "<sent>", "exec"), namespace)
    del tree.body[-1]
    exec(compile(tree, "<sent>", "exec"), namespace)
    return eval(compile(ast.Expression(last.value), "<sent>", "eval"), namespace)


if __name__ == "__main__":
    main()
