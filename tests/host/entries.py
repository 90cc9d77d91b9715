"""Entry points for ranks that the agent's tests fork."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any


def run(argv: list[str]) -> None:
    """Run the function that the first argument names."""
    word, *rest = argv
    globals()[f"_{word}"](*rest)


def _publish(path: str, content: Any) -> None:
    draft = Path(path + ".new")
    draft.write_text(json.dumps(content))
    draft.replace(path)


def _report(path: str) -> None:
    """Publish facts about this process, then wait for a signal."""
    numpy: Any = sys.modules.get("numpy")
    os.umask(mask := os.umask(0))
    content = {
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "session": os.getsid(0),
        "cwd": os.getcwd(),
        "env": dict(os.environ),
        "path": sys.path,
        "argv": sys.argv,
        "umask": mask,
        "oom": Path("/proc/self/oom_score_adj").read_text().strip(),
        "draws": [random.random(), numpy.random.random() if numpy else 0.0],
        "files": sorted(_open_files()),
        "preloaded": "torch" in sys.modules,
        "default_signals": [
            signal.getsignal(number) is signal.SIG_DFL for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
        ],
    }
    _publish(path, content)
    signal.pause()


def _open_files() -> list[str]:
    names = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:  # the listing's own
            continue
    return names


def _wait(path: str = "") -> None:
    if path:
        _publish(path, os.getpid())
    signal.pause()


def _exit(code: str) -> None:
    sys.exit(int(code))


def _fail() -> None:
    raise LookupError("this entry fails")


def _child(path: str) -> None:
    """Start a process in this rank's group, as a data loader's worker would be, and wait."""
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as child:
        _publish(path, child.pid)
        signal.pause()


def _stubborn(path: str) -> None:
    """Ignore SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _publish(path, os.getpid())
    while True:
        signal.pause()
