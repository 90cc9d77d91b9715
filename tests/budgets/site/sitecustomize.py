"""Imported by each process of a measured cluster: the host agent counts its modules whenever it forks a rank.

It imports nothing before: an agent that waits for a slow notebook goes on to what ranks may need later.
"""

from __future__ import annotations

import os
import sys

if "axon_nb.host" in sys.orig_argv:
    _PID = os.getpid()
    sys.argv.append("--later")

    def _count() -> None:
        if os.getpid() == _PID:
            with open(os.environ["AGENT_MODULES_FILE"], "w", encoding="ascii") as file:
                file.write(str(len(sys.modules) - 1))  # without this one

    os.register_at_fork(before=_count)
