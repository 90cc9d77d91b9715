"""A JupyterLab server of its own: private settings, a free port, a token, notebooks in a folder of the test run."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import nbformat

from tests.support.agent_server import agent_environment

LIMIT = 240.0
"""Seconds that anything may take: no test is about speed, and a wait that succeeds early costs nothing."""

ANSWER_LIMIT = 120.0
"""Seconds that one of its answers may take, such as when a kernel has ended with all that it has started."""

SETTINGS = {
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/docmanager-extension:plugin": {"autosave": False},
    # Lab drops completions that come after a second.
    "@jupyterlab/completer-extension:manager": {"providerTimeout": 120_000},
}

PANEL = Path(__file__).resolve().parents[3] / "axon_nb" / "lab" / "labextension"
"""The panel as it is here: an editable installation has a copy from when it was made."""

PYTHON_3 = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}}


class LabServer:
    """Starts with `with`, and ends its kernels and itself, by process id, when the block is left."""

    module = "jupyterlab"
    """What is started."""
    tree = "lab/tree"
    """Path of the page that opens a notebook."""

    def __init__(self, folder: Path) -> None:
        self.notebooks = folder / "notebooks"
        self._folder = folder
        self._token = secrets.token_hex(16)
        self._process: subprocess.Popen[bytes] | None = None
        self._url = ""

    def __enter__(self) -> LabServer:
        settings = self._folder / "settings"
        for path in (settings, self.notebooks):
            path.mkdir(parents=True)
        (settings / "overrides.json").write_text(json.dumps(SETTINGS), encoding="utf-8")
        private = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
        folders = {name: str(self._folder / name.lower()) for name in private}
        environment = {**os.environ, **agent_environment(), **folders}
        environment["JUPYTER_TOKEN"] = self._token
        panel = self._folder / "labextensions" / "@axon-nb" / "panel"
        panel.parent.mkdir(parents=True)
        panel.symlink_to(PANEL)
        command = [
            *(sys.executable, "-m", self.module, "--no-browser", "--allow-root"),
            *("--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", f"--ServerApp.root_dir={self.notebooks}"),
            "--ServerApp.jpserver_extensions={'axon_nb.lab.server': True}",
            f"--LabServerApp.extra_labextensions_path={panel.parents[1]}",
            *self.app_options(settings),
        ]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, cwd=self._folder, start_new_session=True
            )
        try:
            self._wait_until_up(self._process)
            self.api("GET", "nbconvert")  # imports it; at the first page, no kernel's message would pass meanwhile
        except BaseException:
            self._end(self._process)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        try:
            self.end_kernels()
        finally:
            self._end(self._process)

    def app_options(self, settings: Path) -> list[str]:
        """Options of the application itself; `settings` is this server's folder."""
        return [
            *("--LabApp.extension_manager=readonly", "--LabApp.expose_app_in_browser=True"),
            *(f"--LabApp.app_settings_dir={settings}", f"--LabApp.workspaces_dir={self._folder / 'workspaces'}"),
            f"--LabApp.user_settings_dir={self._folder / 'user-settings'}",
        ]

    @property
    def _log(self) -> Path:
        return self._folder / "lab.log"

    def _wait_until_up(self, process: subprocess.Popen[bytes]) -> None:
        limit = time.monotonic() + LIMIT
        while time.monotonic() < limit:
            if self._answers():
                return
            try:
                process.wait(0.2)
                break
            except subprocess.TimeoutExpired:
                continue
        said = self._log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise RuntimeError(f"{self.module} did not start in {LIMIT:.0f} s:\n{said}")

    def _answers(self) -> bool:
        found = list((self._folder / "jupyter_runtime_dir").glob("jpserver-*.json"))
        if not found:
            return False
        try:
            self._url = json.loads(found[0].read_text(encoding="utf-8"))["url"]
            self.api("GET", "status")
        except (OSError, ValueError, http.client.HTTPException):  # the file is half written, the socket not open
            return False
        return True

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def api(self, method: str, path: str) -> Any:
        """One request to the server's REST interface; its answer, decoded."""
        return self.request(method, f"api/{path}")

    def request(self, method: str, path: str, *, token: str | None = None) -> Any:
        """One request to the server; its answer, decoded.

        Args:
            method: Such as GET.
            path: Below the server's address.
            token: Instead of the server's own.
        """
        request = urllib.request.Request(
            f"{self._url}{path}",
            method=method,
            headers={"Authorization": f"token {self._token if token is None else token}"},
        )
        with urllib.request.urlopen(request, timeout=ANSWER_LIMIT) as answer:
            body = answer.read()
        return json.loads(body) if body else None

    def address_of(self, notebook: str) -> str:
        """The page that opens a notebook in an otherwise empty Lab."""
        return f"{self._url}{self.tree}/{notebook}?reset&token={self._token}"

    def end_kernels(self) -> None:
        """Shut down every kernel of the server, politely."""
        for kernel in self.api("GET", "kernels"):
            try:
                self.api("DELETE", f"kernels/{kernel['id']}")
            except urllib.error.HTTPError as error:
                if error.code != 404:  # it ended by itself meanwhile
                    raise

    def write_notebook(self, name: str, cells: Sequence[str], *, metadata: dict[str, Any] | None = None) -> Path:
        """Make a notebook of code cells; without `metadata`, of the default Python kernel."""
        notebook = nbformat.v4.new_notebook(metadata=PYTHON_3 if metadata is None else metadata)
        notebook.cells = [nbformat.v4.new_code_cell(source, id=f"cell-{i}") for i, source in enumerate(cells)]
        path = self.notebooks / name
        nbformat.write(notebook, path)
        return path

    def trust(self, name: str) -> None:
        """Sign a notebook as one of this server's user."""
        environment = {**os.environ, "JUPYTER_DATA_DIR": str(self._folder / "jupyter_data_dir")}
        command = [sys.executable, "-m", "jupyter", "trust", str(self.notebooks / name)]
        subprocess.run(command, env=environment, check=True, capture_output=True)

    def read_notebook(self, name: str) -> Any:
        """A notebook as it is on disk."""
        return nbformat.read(self.notebooks / name, as_version=4)
