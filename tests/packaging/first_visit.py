"""Run a notebook's cells and print their text: `python first_visit.py NOTEBOOK.ipynb`.

It runs in the environment that is tested, with no more than what axon_nb brings there. Ends with 1 if a cell fails.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import start_new_kernel

CELL_LIMIT = 300.0
"""Seconds that one cell may take."""


def show(message: dict[str, Any]) -> None:
    """Print what a cell shows: its text, and the traceback of its error."""
    content = message["content"]
    if message["msg_type"] == "stream":
        print(content["text"], end="")
    elif message["msg_type"] == "error":
        print(re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(content["traceback"])))


def succeeds(client: BlockingKernelClient, cell: dict[str, Any]) -> bool:
    """Run one cell of a notebook; whether it ended as it should."""
    code = "".join(cell["source"])
    reply = client.execute_interactive(code, allow_stdin=False, timeout=CELL_LIMIT, output_hook=show)["content"]
    return reply["status"] == "ok" or "raises-exception" in cell["metadata"].get("tags", [])


def main(notebook: Path) -> int:
    """Go through the notebook in a fresh kernel."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    manager, client = start_new_kernel(startup_timeout=120)
    try:
        return int(not all(succeeds(client, cell) for cell in cells if cell["cell_type"] == "code"))
    finally:
        client.stop_channels()
        manager.shutdown_kernel()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
