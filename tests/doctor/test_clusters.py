"""`axon-nb list` and `axon-nb stop` on real clusters; and what bad input of each command says."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from axon_nb import __version__
from axon_nb.cli import main
from tests.doctor.command import Done, axon_nb
from tests.support.processes import ended, until
from tests.support.script import Script, command_lines, family

with_forks = pytest.mark.skipif(not Path("/proc/self").exists(), reason="forked ranks are of Linux")

COMMANDS = [
    "class",
    "course",
    "doctor",
    "export",
    "help",
    "host",
    "import",
    "list",
    "quickstart",
    "stop",
    "status",
    "stacks",
    "explain",
    "vars",
    "diff",
    "rename",
    "interrupt",
    "repair",
    "logs",
    "run",
    "push",
    "pull",
    "plan",
    "mcp",
    "skill",
]
USAGE = {
    "": f"axon-nb needs a command: one of {', '.join(COMMANDS)}.",
    "lsit": "axon-nb has no command 'lsit': did you mean `axon-nb list`?",
    "frobnicate": "axon-nb has no command 'frobnicate': `axon-nb --help` lists all.",
    "--versoin": "axon-nb has no '--versoin'; did you mean --version?",
    "doctor --jsn": "axon-nb doctor has no '--jsn'; did you mean --json?",
    "doctor now": "axon-nb doctor does not accept 'now'; see `axon-nb doctor --help`.",
    "list --each": "axon-nb list has no '--each'; options are -h, --help, --json, --all.",
    "list mine": "axon-nb list does not accept 'mine'; see `axon-nb list --help`.",
    "stop --frce": "axon-nb stop has no '--frce'; did you mean --force?",
    "stop one two": "axon-nb stop does not accept 'two'; see `axon-nb stop --help`.",
    "export": "axon-nb export: the following arguments are required: NOTEBOOK, SCRIPT; see `axon-nb export --help`.",
    "export a.ipynb b.py --forc": "axon-nb export has no '--forc'; did you mean --force?",
}


class Desk:
    """A folder for clusters that no other test sees, and the programs that have started them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {"AXON_NB_RUNTIME_DIR": str(folder)}
        self.scripts: dict[str, Script] = {}

    def start(self, name: str, **options: Any) -> Script:
        """A program with a cluster of 2 ranks."""
        script = self.scripts[name] = Script(self.folder, **self.env)
        script.ok(f"import axon_nb\nc = axon_nb.start(2, devices='cpu', name={name!r}, **{options!r})")
        return script

    def leave(self, name: str, **options: Any) -> None:
        """A cluster whose program is killed."""
        self.start(name, **options).process.kill()
        assert until(lambda: self.entry(name)["state"] == "detached")

    def run(self, *arguments: str) -> Done:
        """`axon-nb` with these arguments."""
        return axon_nb(*arguments, **self.env)

    def entries(self) -> list[dict[str, Any]]:
        """Output of `axon-nb list`."""
        return list(self.run("list", "--json").json())

    def entry(self, name: str) -> dict[str, Any]:
        """The one of this name."""
        (one,) = [entry for entry in self.entries() if entry["name"] == name]
        return one

    def left(self) -> list[str]:
        """Command lines of all that clusters whose program is gone still run."""
        gone = [script for script in self.scripts.values() if script.process.poll() is not None]
        return [line for script in gone for line in command_lines(family(script.mark))]

    def end(self) -> None:
        """End what a test has left."""
        for script in self.scripts.values():
            with contextlib.suppress(OSError):  # its process was killed
                script.end()
        self.run("stop", "--all", "--force")


@pytest.fixture
def desk() -> Iterator[Desk]:
    """Without clusters; its path is short, for Unix sockets live below it."""
    folder = Path(tempfile.mkdtemp(prefix="axd-"))
    desk = Desk(folder)
    yield desk
    desk.end()
    shutil.rmtree(folder)


@with_forks
def test_list_and_stop_without_clusters(desk: Desk) -> None:
    nothing = "You have no clusters on this host.\n"
    assert desk.run("list") == Done(0, nothing, "")
    assert desk.entries() == []
    assert desk.run("stop") == Done(0, nothing, "")
    assert desk.run("stop", "--all") == Done(0, nothing, "")


@with_forks
def test_detached_cluster_is_listed_and_stopped(desk: Desk) -> None:
    desk.leave("train")
    one = desk.entry("train")
    assert (one["num_ranks"], one["backend"], one["engines"]) == (2, "shm", "axon")
    assert 0 < one["keep_alive_left_s"] <= 300
    # When a process began is known by when the machine booted, which is in whole seconds, and moves with the clock.
    assert psutil.Process(one["agent_pid"]).create_time() <= one["since"] + 1.5
    processes = [psutil.Process(pid) for pid in (one["agent_pid"], *one["rank_pids"].values())]
    shown = desk.run("list").out
    assert shown.splitlines()[0].split() == ["NAME", "RANKS", "BACKEND", "SINCE", "LAST", "ACTIVITY", "AGENT", "STATE"]
    assert "detached, stops in " in shown
    assert one["since"] - 1.5 <= one["last_activity"] <= time.time()
    (seen,) = [each for each in desk.run("list", "--all", "--json").json() if each["agent_pid"] == one["agent_pid"]]
    assert (seen["user"], seen["name"], seen["num_ranks"]) == (getpass.getuser(), "train", 2)
    assert seen["memory_bytes"] > 1 << 20
    everybody = desk.run("list", "--all").out.splitlines()
    assert everybody[0].split() == ["USER", "NAME", "RANKS", "MEMORY", "LAST", "ACTIVITY", "AGENT"]
    assert [line for line in everybody if line.startswith(f"{seen['user']} ") and " train " in line]
    assert "`axon-nb stop NAME`" in shown
    assert desk.run("stop") == Done(0, "Stopped cluster 'train' (2 ranks).\n", "")
    assert all(map(ended, processes))
    assert desk.left() == []
    assert not Path(one["folder"]).exists()
    assert desk.entries() == []


@with_forks
def test_doctor_reports_a_detached_cluster_and_how_to_stop_it(desk: Desk) -> None:
    desk.leave("night run")
    content = desk.run("doctor", "--json").json()["sections"]["clusters"]
    (finding,) = content["findings"]
    assert finding["severity"] == "note"
    assert finding["fix"].startswith("Run `axon-nb stop 'night run'` to stop it, or `%distributed attach")
    assert content["data"]["clusters"][0]["name"] == "night run"
    assert desk.run("stop", "night run").code == 0
    assert desk.left() == []


@with_forks
def test_attached_cluster_is_stopped_only_with_force(desk: Desk) -> None:
    script = desk.start("mine")
    assert desk.entry("mine")["state"] == "attached"
    assert "in use by a notebook" in desk.run("list").out
    for arguments in (("stop",), ("stop", "mine")):
        done = desk.run(*arguments)
        assert done.code == 1
        assert "in use by a notebook: run `%distributed stop` there" in done.err
        assert "--force" in done.err
        assert done.err.count("\n") == 1
    kept = desk.run("stop", "--all")
    assert kept.code == 0
    assert "'mine' is in use by a notebook; use --force to stop it too." in kept.out
    assert script.value("c.run('rank', quiet=True).values") is not None, "it was not touched"
    assert desk.run("stop", "mine", "--force") == Done(0, "Stopped cluster 'mine' (2 ranks).\n", "")
    assert until(lambda: not script.others())
    assert desk.entries() == []


@with_forks
def test_several_clusters_require_a_name_or_all(desk: Desk) -> None:
    desk.leave("one")
    desk.leave("two")
    done = desk.run("stop")
    assert done.code == 1
    assert done.err.startswith("axon-nb stop: 'one', 'two' are running: ") or done.err.startswith(
        "axon-nb stop: 'two', 'one' are running: "
    )
    assert "`axon-nb stop --all`" in done.err
    assert "did you mean 'two'?" in desk.run("stop", "twoo").err
    assert desk.run("stop", "two").out == "Stopped cluster 'two' (2 ranks).\n"
    assert [entry["name"] for entry in desk.entries()] == ["one"]
    assert desk.run("stop", "--all").out == "Stopped cluster 'one' (2 ranks).\n"
    assert desk.left() == []


@with_forks
def test_files_of_a_dead_agent_are_listed_and_removed(desk: Desk) -> None:
    desk.leave("dead")
    one = desk.entry("dead")
    os.kill(one["agent_pid"], signal.SIGKILL)
    assert until(lambda: desk.entry("dead")["state"] == "dead")
    assert until(lambda: not desk.left())
    assert "dead: files only" in desk.run("list").out
    finding = desk.run("doctor", "--json").json()["sections"]["clusters"]["findings"][0]
    assert finding["fix"] == "Run `axon-nb stop dead` to remove its files."
    done = desk.run("stop", "dead")
    assert (done.code, done.out) == (0, f"Removed the files of dead cluster 'dead' in {one['folder']}.\n")
    assert not Path(one["folder"]).exists()


@with_forks
def test_unresponsive_agent_is_reported_in_time(desk: Desk) -> None:
    desk.leave("stuck")
    pid = desk.entry("stuck")["agent_pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        one = desk.entry("stuck")
        assert (one["state"], one["agent_pid"]) == ("unresponsive", pid)
        done = desk.run("stop", "stuck")
        assert done.code == 1
        assert done.err.startswith("axon-nb: The host agent of 'stuck' did not reply within 5 s. ")
        assert f"with all its ranks with `kill -9 {pid}`" in done.err
    finally:
        os.kill(pid, signal.SIGCONT)
    assert desk.run("stop", "stuck").code == 0
    assert desk.left() == []


@with_forks
@pytest.mark.parametrize("engines", ["local"])
def test_engines_of_other_launchers_are_stopped(desk: Desk, engines: str) -> None:
    desk.leave("others", engines=engines)
    one = desk.entry("others")
    assert one["engines"] == engines
    processes = [psutil.Process(pid) for pid in one["rank_pids"].values()]
    assert len(processes) == 2
    assert desk.run("stop", "others") == Done(0, "Stopped cluster 'others' (2 ranks).\n", "")
    assert all(map(ended, processes))


@with_forks
def test_listing_has_no_side_effects(desk: Desk) -> None:
    desk.leave("train")
    before = desk.entry("train")
    stranger = desk.folder / f"axon_nb-{os.getuid()}" / "0123456789"
    stranger.mkdir(mode=0o700)
    os.utime(stranger, (1, 1))
    after = desk.entry("train")
    assert after["keep_alive_left_s"] < before["keep_alive_left_s"]
    assert after | {"keep_alive_left_s": 0} == before | {"keep_alive_left_s": 0}
    assert desk.entry("0123456789")["state"] == "dead"
    assert stranger.exists()
    done = desk.run("stop")
    assert "Removed the files of dead cluster '0123456789'" in done.out
    assert not stranger.exists()
    assert desk.left() == []


@with_forks
def test_cluster_without_a_cell_stops_itself_and_says_so_when_its_user_is_back(desk: Desk) -> None:
    script = desk.start("idle")
    script.ok("from axon_nb.cluster import current\ncurrent.session().settings.set('idle_stop=1s')")
    script.ok("c.run('import time; time.sleep(2)')")
    assert until(lambda: desk.entries() == [])
    message = script.run("c.run('rank')").message
    assert message.startswith("The cluster 'idle' stopped itself after 1.")
    assert "s without a cell (setting idle_stop). Run `%distributed start` to start a new one." in message
    assert until(lambda: not script.others())


@pytest.mark.parametrize(("typed", "sentence"), USAGE.items(), ids=lambda text: text or "nothing")
def test_bad_usage_is_one_sentence(typed: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(typed.split()) == 2
    assert capsys.readouterr() == ("", f"{sentence}\n")


FAILS = {
    "stop nobody": "axon-nb stop: no cluster named 'nobody' on this host.",
    "stop nobody --all": "axon-nb stop: give NAME or --all, not both.",
}


@pytest.mark.parametrize(("typed", "sentence"), FAILS.items())
def test_impossible_request_is_rejected_in_one_sentence(
    typed: str, sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AXON_NB_RUNTIME_DIR", str(tmp_path))
    assert main(typed.split()) == 1
    assert capsys.readouterr() == ("", f"{sentence}\n")


def test_missing_notebook_is_reported_in_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["export", str(tmp_path / "no.ipynb"), str(tmp_path / "no.py")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("axon-nb: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("asked", ["-h", "--help", "help"])
def test_help_names_every_command(asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([asked]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith(f"usage: axon-nb {command} ")
    assert f"Example: axon-nb {command} " in out


@pytest.mark.parametrize("asked", ["-V", "--version"])
def test_version(asked: str) -> None:
    done = axon_nb(asked)
    assert (done.code, done.out, done.err) == (0, f"axon_nb {__version__}\n", "")
