"""`--sync` brings the notebook's modules to two agents that joined: processes here that look for modules elsewhere."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from axon_nb.cluster.failures import RankError
from axon_nb.cluster.launch.folder_sync import missing_on_host
from axon_nb.cluster.launch.hosts import own_address
from axon_nb.errors import StartError, UsageError
from axon_nb.host.run_dir import FolderCopy
from tests.support.processes import until
from tests.support.script import Script, command_lines

START = """
import contextlib, io, os, subprocess, sys, time, axon_nb
from axon_nb.records.protocol.agent import GetInfo

sys.path.insert(1, "../elsewhere")

def join(name):
    env = {**os.environ, "PATH": os.path.dirname(sys.executable) + ":" + os.environ["PATH"]}
    command = ["sh", "-c", f"exec env {joins} --name {name}"]
    with open("../joined.log", "a") as log:
        return subprocess.Popen(command, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)

class Pasted(io.StringIO):
    def write(self, text):
        global joins, agents
        for line in text.splitlines():
            if "AXON_NB_JOIN_KEY=" in line:
                joins = line.strip()
                agents = {name: join(name) for name in ("far-1", "far-2")}
        return super().write(text)

with contextlib.redirect_stdout(Pasted()) as out:
    c = axon_nb.start(3, hosts="join:2", interface="lo", devices="cpu", sync=".")
"""
LOOK = (
    "import os, helpers, inner, pkg.deep\n"
    "(helpers.__file__, helpers.VALUE, inner.NAME, open('data/table.txt').read(), "
    "sorted({*os.listdir('.')} - {'__pycache__'}))"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder outside of any repository of git, with modules, data and what must not travel."""
    folder = tmp_path_factory.mktemp("sync") / "project"
    for name, content in {
        "helpers.py": "VALUE = 1",
        "src/inner.py": "NAME = 'inner'",
        "pkg/__init__.py": "",
        "pkg/deep.py": "",
        "data/table.txt": "1 2 3",
        "secret.txt": "password",
        "build/out.py": "",
        "note.ipynb": "{}",
        ".gitignore": "secret.txt\nbuild/\n*.err\n",
        "../elsewhere/far_off.py": "",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    os.truncate(os.open(folder / "big.bin", os.O_CREAT | os.O_WRONLY), 11 << 20)
    (folder / "link.txt").symlink_to("/etc/passwd")
    return folder


@pytest.fixture(scope="module")
def script(folder: Path) -> Iterator[Script]:
    """A notebook's process in that folder, with rank 0 here and one on each of the two agents."""
    with Script(folder, PYTHONPATH=os.pathsep.join([str(Path(__file__).parents[3]), str(folder / "src")])) as script:
        script.ok(START, timeout=230)
        yield script


def _values(script: Script, code: str) -> dict[int, Any]:
    values: dict[int, Any] = script.value(f"dict(c.run({code!r}).values)")
    return values


def test_modules_and_data_reach_each_host(script: Script, folder: Path) -> None:
    values = _values(script, LOOK)
    assert [value[1:4] for value in values.values()] == [(1, "inner", "1 2 3")] * 3
    here, *far = (Path(value[0]).parent for value in values.values())
    assert here == folder
    assert len({here, *far}) == 3
    for value in list(values.values())[1:]:
        assert value[4] == [".gitignore", "data", "helpers.py", "pkg", "src"]
    out = script.value("out.getvalue()")
    assert "--sync leaves out big.bin (11.0 MiB: a file may have 10.0 MiB).\n" in out
    assert "--sync leaves out link.txt (a link).\n" in out


def test_only_what_changed_travels_before_the_next_cell_and_is_reloaded(script: Script, folder: Path) -> None:
    files = "{name: os.stat(name).st_ino for name in ('helpers.py', 'data/table.txt')}"
    before = _values(script, f"%load_ext autoreload\n%autoreload 2\nimport os\n{files}")
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    subprocess.run(["git", "add", "helpers.py"], cwd=folder, check=True)
    changed = folder / "helpers.new"
    changed.write_text("VALUE = 22")
    changed.replace(folder / "helpers.py")
    (folder / "data" / "later.py").write_text("LATER = True")
    (folder / "pkg" / "deep.py").unlink()
    values = _values(script, "(helpers.VALUE, os.path.exists('pkg/deep.py'), __import__('data.later').later.LATER)")
    assert list(values.values()) == [(22, False, True)] * 3
    after = _values(script, files)
    for rank in range(3):
        assert after[rank]["data/table.txt"] == before[rank]["data/table.txt"]
        assert after[rank]["helpers.py"] != before[rank]["helpers.py"]


def test_too_large_folder_is_refused_before_the_cell_and_later_accepted(script: Script, folder: Path) -> None:
    parts = [folder / "data" / f"{number}.bin" for number in range(11)]
    for part in parts:
        os.truncate(os.open(part, os.O_CREAT | os.O_WRONLY), 10 << 20)
    refused = script.run("c.run('ran = True')")
    assert refused.kinds[0] == "UsageError"
    assert "it brings at most 10,000 with 100 MiB. Name a smaller folder" in refused.message
    for part in parts:
        part.unlink()
    assert list(_values(script, "'ran' in globals()").values()) == [False] * 3


def test_module_that_only_this_host_has_is_named(script: Script, folder: Path) -> None:
    assert script.run("c.run('import far_off')").kinds[0] == "CellError"
    hint = script.value("c.cells.last_record['hint']")
    assert hint.startswith(f"`far_off` is in {folder.parent}/elsewhere/far_off.py here, and not on the host 'far-")
    assert hint.endswith(f": `--sync {folder}` does not bring it (it is outside, ignored by git, or too large).")
    error = RankError(1, "raised", "ModuleNotFoundError", "No module named 'tests.support.nothing'")
    assert missing_on_host([error], {1: "b"}, None) == ""
    error = RankError(1, "raised", "ModuleNotFoundError", "No module named 'tests.support.script'")
    root = Path(__file__).parents[3]
    assert missing_on_host([error], {1: "b"}, None) == (
        f"`tests.support.script` is in {root}/tests/support/script.py here, and not on the host 'b': "
        f"`%distributed start --hosts … --sync {root}` brings the modules of that folder."
    )
    assert missing_on_host([error], {2: "b"}, None) == ""
    error = RankError(1, "raised", "ModuleNotFoundError", "No module named 'json.tool'")
    assert missing_on_host([error], {1: "b"}, None) == ""


def test_host_that_has_joined_again_gets_all_files_with_its_new_rank(script: Script, folder: Path) -> None:
    script.ok("lost = dict(c.run('import os; os.environ.get(\"AXON_NB_HOST\")').values)[2]")
    cell = "import os, time\nif rank == 2:\n    os.kill(os.getppid(), 9); time.sleep(60)\ndist.barrier()"
    assert script.run(f"c.run({cell!r})").kinds[0] == "CellError"
    script.ok("agents[lost].wait(60); agents[lost] = join(lost)")
    assert until(lambda: script.value("len(c.connection.agent.call(GetInfo()).hosts)") == 2, timeout=120)
    script.ok("c.repair()", timeout=230)
    assert _values(script, "import helpers, inner; (helpers.VALUE, inner.NAME)")[2] == (22, "inner")


def test_notebook_that_attaches_goes_on_bringing_changes(script: Script, folder: Path) -> None:
    script.ok("c.detach(); c = axon_nb.attach()")
    (folder / "added.py").write_text("ADDED = 1")
    assert _values(script, "import added; added.ADDED") == dict.fromkeys(range(3), 1)
    script.ok("c.stop(); [agent.wait(60) for agent in agents.values()]")
    assert until(lambda: not script.others()), command_lines(script.others())


@pytest.mark.parametrize("name", ["../out", "/out", "a/../../out", "a//out", "", ".", "link/out"])
def test_nothing_is_written_outside_of_the_copy(name: str, tmp_path: Path) -> None:
    copy = FolderCopy(tmp_path / "copy")
    assert copy.compare("/original", (), {"a/b.py": (10**18, 2)}) == ("a/b.py",)
    copy.write("a/b.py", b"ok", offset=0, time_ns=10**18, is_last=True)
    (tmp_path / "copy" / "link").symlink_to(tmp_path)
    with pytest.raises(StartError):
        copy.write(name, b"no", offset=0, time_ns=1, is_last=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"]
    assert copy.compare("/original", (), {"a/b.py": (10**18, 2)}) == ()
    assert copy.compare("/original", (), {}) == ()
    assert not (tmp_path / "copy" / "a").exists()


def test_link_in_the_copy_is_replaced_and_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("kept")
    copy = FolderCopy(tmp_path / "copy")
    copy.compare("/original", (), {})
    (tmp_path / "copy" / "a.py").symlink_to(outside)
    assert copy.compare("/original", (), {"a.py": (1, 4)}) == ("a.py",)
    copy.write("a.py", b"ne", offset=0, time_ns=1, is_last=False)
    assert (tmp_path / "copy" / "a.py").is_symlink()  # until it is complete
    copy.write("a.py", b"w!", offset=2, time_ns=1, is_last=True)
    assert (tmp_path / "copy" / "a.py").read_text() == "new!"
    assert outside.read_text() == "kept"


def test_option_needs_other_hosts() -> None:
    with pytest.raises(UsageError, match="--sync needs --hosts, and a folder that exists"):
        own_address(None, None, "axon", sync=".")
