"""Execute a notebook from top to bottom and save it with its outputs as `.ipynb` and `.html`.

    python scripts/run_notebook.py examples/01_quickstart.py --out out

Takes a py:percent file or an `.ipynb`. Exits with status 1 if a cell fails that is not tagged `raises-exception`; what
ran until then is saved anyway.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import traceback
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert import HTMLExporter


def execute(source: Path, out: Path, *, cell_timeout: int = 300) -> tuple[list[Path], str | None]:
    """Run `source` in a fresh kernel, in its own folder.

    Args:
        source: a py:percent file or a notebook.
        out: the folder that the results go to; made when missing.
        cell_timeout: seconds that one cell may take.

    Returns:
        The files written, and the failing cell's error or None.
    """
    notebook = jupytext.read(source)
    # ipykernel warns about unencrypted loopback TCP, but only this process talks to the kernel here.
    client = NotebookClient(
        notebook,
        timeout=cell_timeout,
        startup_timeout=300,
        # By default outputs that arrive 4 s after a cell finished, as on a busy machine, are silently dropped.
        iopub_timeout=120,
        raise_on_iopub_timeout=True,
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(source.parent)}},
    )
    error = None
    try:
        client.execute()
    except CellExecutionError as failed:
        error = re.sub(r"\x1b\[[0-9;]*m", "", str(failed))
    except Exception:  # dead kernel or timeout: save what ran until then
        error = traceback.format_exc()
    out.mkdir(parents=True, exist_ok=True)
    executed, page = out / f"{source.stem}.ipynb", out / f"{source.stem}.html"
    nbformat.write(notebook, executed)
    body, _ = HTMLExporter().from_notebook_node(notebook, resources={"metadata": {"name": source.stem}})
    page.write_text(body, encoding="utf-8")
    return [executed, page], error


def main(argv: list[str] | None = None) -> int:
    """Execute the notebooks named on the command line; return 1 if a cell failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the results (default: out)")
    options = parser.parse_args(argv)
    failures = 0
    for source in options.notebooks:
        started = time.perf_counter()
        files, error = execute(source.resolve(), options.out.resolve())
        print(f"{source.name}: {'failed' if error else 'ran'} in {time.perf_counter() - started:.0f} s")
        for path in files:
            print(f"  {path}")
        if error:
            failures += 1
            print(error, file=sys.stderr)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
