"""Virtual environments that know nothing of the one that runs the tests, and notebooks that run in them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import nbformat
import psutil
from nbformat import NotebookNode

ADDRESS = "https://github.com/owner/name"
"""An address for copies of the repository."""
ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
QUICKSTART = ROOT / "examples" / "01_quickstart.py"
STOP = "\n# %%\n# %distributed stop\n"
WHERE = "import axon_nb; print('imported from', axon_nb.__file__)"
COMMAND_LIMIT = 540.0
"""Seconds that one command may take, an installation of torch among them."""
LEFTOVER_LIMIT = 60.0
"""Seconds that processes have to end after the notebook that started them."""


def run(command: list[str], *, cwd: Path, env: dict[str, str]) -> str:
    """Run a command and return what it wrote; fail with that when its exit status is not 0."""
    found = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=COMMAND_LIMIT,
        check=False,
    )
    assert found.returncode == 0, f"{' '.join(command)} ended with {found.returncode}:\n{found.stdout}"
    return found.stdout


def publish(folder: Path, address: str = ADDRESS) -> None:
    """Give a copy of the repository this address, or none, as its maintainers would."""
    file = folder / "pyproject.toml"
    text, count = re.subn(r'(?m)^repository = ".*"', f'repository = "{address}"', file.read_text(encoding="utf-8"))
    assert count == 1
    file.write_text(text, encoding="utf-8")
    run([sys.executable, "-m", "scripts.repository"], cwd=folder, env=dict(os.environ))


@dataclass
class Environment:
    """A virtual environment with a home folder of its own; `folder` holds both and stays short for Unix sockets."""

    folder: Path

    def __post_init__(self) -> None:
        (self.home / "run").mkdir(parents=True, mode=0o700)
        run([sys.executable, "-m", "venv", str(self.prefix)], cwd=self.folder, env=self.env)

    @property
    def home(self) -> Path:
        """The home folder of what runs in it."""
        return self.folder / "home"

    @property
    def prefix(self) -> Path:
        """The folder of the virtual environment."""
        return self.folder / "venv"

    @property
    def python(self) -> str:
        """Its interpreter."""
        return str(self.prefix / "bin" / "python")

    @property
    def env(self) -> dict[str, str]:
        """The variables of what runs in it: nothing of this environment, nothing of the user's own folders."""
        ours = (
            "AXON_NB_RUNTIME_DIR",
            "IPYTHONDIR",
            "PYTHONPATH",
            "PYTHONHOME",
            "VIRTUAL_ENV",
            "COVERAGE_PROCESS_START",
        )
        kept = {name: value for name, value in os.environ.items() if name not in ours}
        kept = {name: value for name, value in kept.items() if not name.startswith(("JUPYTER_", "XDG_", "PYTEST_"))}
        return {
            **kept,
            "HOME": str(self.home),
            "PATH": f"{self.prefix / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PIP_CONSTRAINT": str(CONSTRAINTS),
            "XDG_CACHE_HOME": str(self.home / ".cache"),
            "XDG_CONFIG_HOME": str(self.home / ".config"),
            "XDG_DATA_HOME": str(self.home / ".local" / "share"),
            "XDG_RUNTIME_DIR": str(self.home / "run"),
        }

    def install(self, *requirements: str) -> None:
        """Install with pip, as it is configured here, in the versions of constraints.txt."""
        # pip would download again what it has in the user's cache.
        env = {name: value for name, value in self.env.items() if name not in ("HOME", "XDG_CACHE_HOME")}
        env |= {name: os.environ[name] for name in ("HOME", "XDG_CACHE_HOME") if name in os.environ}
        pip = [self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run([*pip, *requirements], cwd=self.folder, env=env)

    def processes(self) -> list[psutil.Process]:
        """The processes that have this home folder and still run."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("HOME") == str(self.home):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def left_running(self) -> list[str]:
        """The command lines of the processes that have not ended after a while."""
        limit = time.monotonic() + LEFTOVER_LIMIT
        while (left := self.processes()) and time.monotonic() < limit:
            psutil.wait_procs(left, timeout=0.2)
        return [" ".join(process.cmdline()) for process in left]

    def run_quickstart(self, prefix: list[str] | None = None) -> NotebookNode:
        """Execute a copy of the quickstart far from the repository; it prints at its end what it has imported.

        Args:
            prefix: a command that runs the rest of its arguments.
        """
        folder = self.folder / "notebook"
        folder.mkdir()
        cells, stop, rest = QUICKSTART.read_text(encoding="utf-8").partition(STOP)
        assert stop, "the quickstart is to end its ranks"
        tell = f"\n# %%\n{WHERE}\n\n# %%\n# %%distributed\n{WHERE}\n"
        (folder / QUICKSTART.name).write_text(f"{cells}{tell}{stop}{rest}", encoding="utf-8")
        shutil.copytree(QUICKSTART.parent / "data", folder / "data")
        script = shutil.copy(ROOT / "scripts" / "run_notebook.py", self.folder)
        command = [*(prefix or []), self.python, script, QUICKSTART.name, "--out", "out"]
        run(command, cwd=folder, env=self.env)
        return nbformat.read(folder / "out" / f"{QUICKSTART.stem}.ipynb", as_version=4)


def streams(notebook: NotebookNode) -> str:
    """All that the cells printed."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output["text"] for output in outputs if output["output_type"] == "stream")
