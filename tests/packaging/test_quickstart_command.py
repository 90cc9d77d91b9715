"""`axon-nb quickstart` copies the first notebook with its data, keeps what is there, and opens it in Jupyter."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from axon_nb.quickstart import FILES
from tests.support.processes import until

COMMAND = [sys.executable, "-m", "axon_nb.cli", "quickstart"]
ORIGINAL = Path(__file__).resolve().parents[2] / "examples" / "01_quickstart.ipynb"


def quickstart(*arguments: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_copies_the_notebook_with_its_data(tmp_path: Path) -> None:
    done = quickstart("--no-open", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "The notebook is axon_nb_quickstart/quickstart.ipynb.\n"
    copied = {path.relative_to(tmp_path / "axon_nb_quickstart") for path in tmp_path.rglob("*") if path.is_file()}
    assert copied == set(map(Path, FILES.values()))
    files = re.findall(r'read_csv\("(.*?)"', ORIGINAL.read_text().replace("\\", ""))
    assert files
    assert set(map(Path, files)) <= copied


def test_keeps_a_notebook_that_was_changed(tmp_path: Path) -> None:
    notebook = tmp_path / "mine" / "quickstart.ipynb"
    notebook.parent.mkdir()
    notebook.write_text("{}")
    done = quickstart("mine", "--no-open", folder=tmp_path)
    assert done.stdout == "mine/quickstart.ipynb has been changed and stays as it is.\n"
    assert notebook.read_text() == "{}"


def test_unwritable_folder_is_reported_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = quickstart("file", folder=tmp_path)
    sentence = "axon-nb quickstart: cannot write to file (File exists); name another folder.\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", sentence)


def test_jupyter_terminal_prints_the_address(tmp_path: Path) -> None:
    server = {"JUPYTER_SERVER_URL": "http://localhost:8888/", "JUPYTER_SERVER_ROOT": str(tmp_path)}
    done = quickstart("learn", folder=tmp_path, **server)
    address = "http://localhost:8888/lab/tree/learn/quickstart.ipynb"
    assert done.stdout.splitlines()[-1] == f"Open it in this Jupyter: {address}"


@pytest.mark.timeout(180)
def test_opens_the_notebook_in_jupyterlab(tmp_path: Path) -> None:
    settings = {"ServerApp": {"allow_root": True, "open_browser": False, "port": 0}}
    (tmp_path / "jupyter_server_config.json").write_text(json.dumps(settings))
    env = {name: value for name, value in os.environ.items() if not name.startswith("JUPYTER_")}
    env |= {"JUPYTER_CONFIG_DIR": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(tmp_path / "run")}
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen([*COMMAND, "learn"], cwd=tmp_path, env=env, stderr=file, start_new_session=True)
    try:
        assert until(lambda: "/lab/tree/quickstart.ipynb?token=" in log.read_text()), log.read_text()
        assert until(lambda: any("quickstart.ipynb" in page.read_text() for page in (tmp_path / "run").glob("*.html")))
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


@pytest.mark.skipif(os.geteuid() != 0, reason="Jupyter refuses to run as root only")
def test_root_gets_the_command_that_allows_it(tmp_path: Path) -> None:
    done = quickstart("learn", folder=tmp_path, JUPYTER_CONFIG_DIR=str(tmp_path), JUPYTER_RUNTIME_DIR=str(tmp_path))
    assert done.returncode != 0
    assert done.stdout.splitlines()[-1].startswith("Jupyter runs as root only if you allow it: ")
    assert done.stdout.endswith("/quickstart.ipynb --allow-root\n")
