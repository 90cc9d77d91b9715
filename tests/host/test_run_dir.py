"""A cluster's folder: private, with a short path, owned by the user, and removed afterwards."""

from __future__ import annotations

import json
import os
import resource
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from axon_nb.host.client import AgentClient
from axon_nb.host.run_dir import RunDir, base_dir, list_run_dirs
from axon_nb.records.protocol.agent import GetInfo, SetInfo
from tests.host.conftest import MakeAgent
from tests.support.agents import ROOT, dead, facts
from tests.support.processes import modes, until

OWN = f"axon_nb-{os.getuid()}"
OTHER_UID = 20_000 + os.getpid() % 40_000
"""A user that hardly any machine has, and another one in each run: a folder below /tmp is named after it."""

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can take on another user's identity")


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short folder that `AXON_NB_RUNTIME_DIR` names; nothing else is set."""
    with tempfile.TemporaryDirectory(prefix="axr-", dir="/tmp") as folder:
        monkeypatch.setenv("AXON_NB_RUNTIME_DIR", folder)
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        yield Path(folder)


def test_run_dir_is_private_and_created_once(root: Path) -> None:
    assert base_dir() == base_dir() == root / OWN
    assert stat.S_IMODE((root / OWN).stat().st_mode) == 0o700


def test_run_dir_with_open_permissions_is_made_private(root: Path) -> None:
    (root / OWN).mkdir(mode=0o755)
    (root / OWN).chmod(0o777)
    assert base_dir() == root / OWN
    assert stat.S_IMODE((root / OWN).stat().st_mode) == 0o700


def test_xdg_runtime_dir_is_the_second_choice(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "xdg").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(root / "xdg"))
    assert base_dir() == root / OWN
    monkeypatch.setenv("AXON_NB_RUNTIME_DIR", "")
    assert base_dir() == root / "xdg" / OWN


UNFIT: list[tuple[str, Callable[[Path], str]]] = []


def unfit(make: Callable[[Path], str]) -> Callable[[Path], str]:
    """Register a way to make a folder unusable; each returns the value for the environment variable."""
    UNFIT.append((make.__name__.strip("_").replace("_", " "), make))
    return make


@unfit
def _not_there(folder: Path) -> str:
    return str(folder / "nowhere")


@unfit
def _a_file(folder: Path) -> str:
    (folder / "file").touch()
    return str(folder / "file")


@unfit
def _a_file_in_its_place(folder: Path) -> str:
    (folder / OWN).touch()
    return str(folder)


@unfit
def _too_long(folder: Path) -> str:
    long = folder / ("long" * 20)
    long.mkdir()
    return str(long)


@unfit
def _a_link_in_its_place(folder: Path) -> str:
    (folder / "elsewhere").mkdir()
    (folder / OWN).symlink_to(folder / "elsewhere")
    return str(folder)


@unfit
def _a_dangling_link_in_its_place(folder: Path) -> str:
    (folder / OWN).symlink_to(folder / "elsewhere")
    return str(folder)


@pytest.mark.parametrize("make", [make for _, make in UNFIT], ids=[name for name, _ in UNFIT])
def test_unusable_base_folder_is_skipped(
    root: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], str]
) -> None:
    (root / "bad").mkdir()
    (root / "next").mkdir()
    monkeypatch.setenv("AXON_NB_RUNTIME_DIR", make(root / "bad"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(root / "next"))
    assert base_dir() == root / "next" / OWN
    assert not list((root / "bad").glob("elsewhere/*"))


@as_root
def test_unusable_folders_are_reported_with_cause_and_fix(root: Path) -> None:
    """No folder is usable: one is not writable, one too long, one owned by someone else."""
    closed, long = root / "closed", root / ("long" * 20)
    closed.mkdir(mode=0o755)
    long.mkdir()
    long.chmod(0o777)
    root.chmod(0o755)
    planted = [Path(folder) / f"axon_nb-{OTHER_UID}" for folder in dict.fromkeys((tempfile.gettempdir(), "/tmp"))]
    for folder in planted:
        folder.mkdir()
    script = (
        "import os, sys\nfrom axon_nb.errors import StartError\nfrom axon_nb.host.run_dir import base_dir\n"
        f"import tempfile; tempfile.gettempdir(); os.setuid({OTHER_UID})\n"
        "try:\n    print('used', base_dir())\nexcept StartError as error:\n    print(error)"
    )
    env = {**os.environ, "AXON_NB_RUNTIME_DIR": str(closed), "XDG_RUNTIME_DIR": str(long), "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    finally:
        for folder in planted:
            folder.rmdir()
    message = done.stdout.strip()
    assert f"{closed}/axon_nb-{OTHER_UID}: Permission denied" in message
    assert f"{long}/axon_nb-{OTHER_UID}: too long for a Unix socket path" in message
    assert f"/tmp/axon_nb-{OTHER_UID}: not owned by you" in message
    assert message.endswith("Set AXON_NB_RUNTIME_DIR to a short path on a local disk.")


@as_root
def test_folder_of_another_user_is_not_used(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / OWN).mkdir()
    os.chown(root / OWN, OTHER_UID, OTHER_UID)
    (root / "next").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(root / "next"))
    assert base_dir() == root / "next" / OWN
    assert not list((root / OWN).iterdir())


def test_new_run_dir_is_owner_only(root: Path) -> None:
    path = RunDir.create().path
    assert path.parent == root / OWN
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for name, mode in modes(path).items():
        assert mode == (0o700 if (path / name).is_dir() else 0o600), name


def test_only_folders_of_dead_agents_are_removed(root: Path, make_agent: MakeAgent) -> None:
    served, doomed = make_agent(), make_agent()
    doomed.process.kill()
    assert until(lambda: dead(doomed.process))
    assert doomed.run_dir.agent_socket.exists()
    assert [entry.path for entry in list_run_dirs()] == [served.run_dir.path]
    assert not doomed.run_dir.path.exists()
    assert served.client.call(GetInfo()).pid == served.process.pid


def test_folder_of_a_starting_agent_is_kept(root: Path) -> None:
    run_dir = RunDir.create()
    assert [entry.path for entry in list_run_dirs()] == [run_dir.path]


def test_folder_without_a_pid_yet_is_kept(root: Path) -> None:
    run_dir = RunDir.create()
    (run_dir.path / "starter").write_text("")
    assert list_run_dirs() == []
    assert run_dir.path.exists()


def test_folder_of_a_dead_starter_is_removed(root: Path) -> None:
    script = "from axon_nb.host.run_dir import RunDir; print(RunDir.create().path)"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    path = Path(done.stdout.strip())
    assert path.is_dir()
    assert list_run_dirs() == []
    assert not path.exists()


def test_foreign_files_are_skipped(root: Path, make_agent: MakeAgent) -> None:
    served = make_agent()
    (base_dir() / "a file").touch()
    (base_dir() / "empty").mkdir()
    (root / "outside").mkdir()
    (root / "outside" / "precious").touch()
    (base_dir() / "link").symlink_to(root / "outside")
    assert [entry.path for entry in list_run_dirs()] == [served.run_dir.path]
    assert (root / "outside" / "precious").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "null", json.dumps({"name": "x"})[:-1]], ids=repr)
def test_broken_description_reads_as_none(run_dir: RunDir, text: str) -> None:
    (run_dir.path / "agent.json").write_text(text)
    assert run_dir.read_info() == {}
    assert run_dir.name == ""


def test_description_is_replaced_atomically(run_dir: RunDir) -> None:
    run_dir.write_info({"name": "one"})
    with open(run_dir.path / "agent.json") as before:
        run_dir.write_info({"name": "two"})
        assert json.load(before) == {"name": "one"}
    assert run_dir.name == "two"
    assert stat.S_IMODE((run_dir.path / "agent.json").stat().st_mode) == 0o600


def test_socket_path_fits_in_any_accepted_base_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the longest accepted base folder an agent can still listen."""
    room = 107 - 40 - len(os.fsencode(root)) - len("/") * 2 - len(OWN)
    longest = root / ("x" * room)
    longest.mkdir()
    monkeypatch.setenv("AXON_NB_RUNTIME_DIR", str(longest))
    run_dir = RunDir.create()
    assert run_dir.path.is_relative_to(longest)
    assert len(os.fsencode(run_dir.agent_socket)) <= 107
    assert len(os.fsencode(run_dir.store_socket)) <= 107
    run_dir.remove()


def test_full_disk_does_not_block_attach(make_agent: MakeAgent) -> None:
    agent = make_agent()
    before = json.loads((agent.run_dir.path / "agent.json").read_text())
    # The agent cannot write a byte to a file any more, as on a full disk.
    resource.prlimit(agent.process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    client = AgentClient(agent.run_dir, owner="a later notebook", agent_pid=agent.process.pid)
    client.call(SetInfo(facts(name="x")))
    assert client.call(GetInfo()).info == facts(name="x", owner="a later notebook")
    assert json.loads((agent.run_dir.path / "agent.json").read_text()) == before
    client.close()


def test_full_disk_is_reported_and_start_cleans_up(root: Path) -> None:
    code = (
        "import resource\nfrom axon_nb.errors import StartError\nfrom axon_nb.host.run_dir import RunDir\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"  # no byte can be written, as on a full disk
        "try:\n    RunDir.create()\nexcept StartError as error:\n    print(error)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (base,) = root.iterdir()
    assert ran.stdout.startswith(f"Cannot create the cluster's files in {base}: ")
    assert "or set AXON_NB_RUNTIME_DIR to a short path on another local disk." in ran.stdout
    assert list(base.iterdir()) == []
