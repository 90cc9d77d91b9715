"""The configuration of ipyparallel's launchers: what axon_nb adds to the user's own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from axon_nb.cluster.launch.hosts import ssh_launcher


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of IPython's default profile."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    folder = tmp_path / "profile_default"
    folder.mkdir()
    return folder


def test_ssh_runs_this_python_unless_configured(profile: Path) -> None:
    assert ssh_launcher().config.SSHLauncher.remote_python == sys.executable
    (profile / "ipcluster_config.py").write_text("c.SSHLauncher.remote_python = '/far/python'\n")
    assert ssh_launcher().config.SSHLauncher.remote_python == "/far/python"


def test_process_group_interrupt_does_not_reach_ssh(profile: Path) -> None:
    (profile / "ipcluster_config.py").write_text(
        f"c.SSHLauncher.ssh_cmd = [{sys.executable!r}, '-c', 'import time; print(1, flush=True); time.sleep(600)']\n"
    )
    command = list(ssh_launcher().config.SSHLauncher.ssh_cmd)
    with subprocess.Popen([*command, "far-host"], stdout=subprocess.PIPE, text=True) as ssh:
        try:
            assert ssh.stdout is not None
            assert ssh.stdout.readline() == "1\n"
            ssh.send_signal(signal.SIGINT)
            time.sleep(0.5)
            assert ssh.poll() is None
        finally:
            ssh.kill()
