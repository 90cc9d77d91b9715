"""The loop of a program that uses a scheduler's client: requests from standard input, for one start, repair or check.

The client is imported and connected once, with the first request.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

_PATIENCE_S = 600.0
"""For the next request; the notebook closes standard input before."""


class Refused(Exception):
    """The scheduler cannot do what was asked; the message says why, and what to do."""


def serve(
    connect: Callable[[Mapping[str, Any]], AbstractContextManager[Any]],
    commands: Mapping[str, Callable[[Any, Mapping[str, Any]], Iterable[dict[str, Any]]]],
) -> int:
    """Answer each request, a line of JSON, with others: what was found, or why not as `refused`.

    Args:
        connect: Connects the client, for the first request.
        commands: What each command does with the client and the request.

    Returns:
        The exit status.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # for what the client prints
    with contextlib.ExitStack() as stack:
        client = None
        while select.select([0], [], [], _PATIENCE_S)[0] and (line := sys.stdin.readline()):
            request = json.loads(line)
            try:
                client = client or stack.enter_context(connect(request))
                for answer in commands[request["command"]](client, request):
                    print(json.dumps(answer), file=answers, flush=True)
            except Refused as refused:
                print(json.dumps({"refused": str(refused)}), file=answers, flush=True)
    return 0
