"""`axon-nb quickstart`: copies the first notebook and its data into a folder, and opens it in Jupyter."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

from axon_nb.errors import UsageError
from axon_nb.records.environment import JUPYTER_SERVER

FILES = {"01_quickstart.ipynb": "quickstart.ipynb", "data/digits.csv.gz": "data/digits.csv.gz"}
"""The files in `examples/` of the repository, with their names in the copy; the notebook is the first."""
_APPLICATIONS = {"jupyterlab": "LabApp.default_url=/lab/tree", "notebook": "JupyterNotebookApp.default_url=/notebooks"}
"""Jupyter's applications, with the option that has the address they print and open."""


def _source(name: str) -> Path:
    """Return a file that came with the package, or in a checkout the example."""
    package = Path(__file__).parent
    shipped = package / "examples" / name
    return shipped if shipped.exists() else package.parent / "examples" / name


def copy_notebook(folder: Path) -> tuple[Path, bool]:
    """Copy the notebook and its data into a folder, which is created; files that are there are kept.

    Returns:
        The notebook, and whether it is the original: a notebook that was changed stays as it is.

    Raises:
        UsageError: the folder cannot be written.
    """
    copies = {_source(name): folder / copied for name, copied in FILES.items()}
    try:
        for source, copied in copies.items():
            copied.parent.mkdir(parents=True, exist_ok=True)
            if not copied.exists():
                shutil.copyfile(source, copied)
    except OSError as error:
        raise UsageError(
            f"axon-nb quickstart: cannot write to {folder} ({error.strerror}); name another folder."
        ) from None
    source, notebook = next(iter(copies.items()))
    return notebook, notebook.read_bytes() == source.read_bytes()


def open_notebook(notebook: Path, environment: Mapping[str, str] = os.environ) -> int:
    """Open a notebook in the Jupyter that is there, and return the exit status once it ends; or print how to open it.

    Args:
        notebook: The file.
        environment: Environment variables. A terminal in Jupyter has the address and the folder of its server.
    """
    path = notebook.resolve()
    url, root = map(environment.get, JUPYTER_SERVER.names)
    if url and root and path.is_relative_to(root):
        print(f"Open it in this Jupyter: {url.rstrip('/')}/lab/tree/{path.relative_to(root)}")
        return 0
    application = next((name for name in _APPLICATIONS if find_spec(name) is not None), None)
    if application is None:
        print(
            "This environment has no Jupyter. Open the file in yours with this environment as its kernel "
            f"({sys.executable}), or run `pip install jupyterlab` and this command again."
        )
        return 0
    # Given the file, Jupyter opens it in a browser, but prints the address of its start page.
    options = [f"--ServerApp.root_dir={path.parent}", f"--{_APPLICATIONS[application]}/{quote(path.name)}"]
    command = [sys.executable, "-m", application, *options]
    status = subprocess.call(command)
    if status and os.geteuid() == 0:  # as in a container
        print(f"Jupyter runs as root only if you allow it: {shlex.join([*command, '--allow-root'])}")
    return status
