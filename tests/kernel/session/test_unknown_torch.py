"""A torch that nobody has tried, and hooks that are missing: what works on, and what is said."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from axon_nb.engine.self_test.catalog import is_timeout
from axon_nb.torch_api import TorchApi, adapter_for
from tests.doctor.command import axon_nb
from tests.support.kernel import Kernel
from tests.support.processes import footprint, until

pytestmark = pytest.mark.timeout(600)

_MAJOR, _MINOR = (int(number) for number in torch.__version__.split(".")[:2])
# The next version, if this is of the newest generation; else one of its own, whose adapter fits, said to be untested.
_IS_NEWEST = adapter_for(torch.__version__) is TorchApi
NEWER = f"{_MAJOR}.{_MINOR + 1}.0" if _IS_NEWEST else f"{_MAJOR}.{_MINOR}.99"
CHANGED = f"{_MAJOR}.{_MINOR}.98"
UNTESTED = "import axon_nb.records.hooks as hooks\nhooks.TESTED['ipython'] = ('7.34', '7.35')\n"
"""So that the versions are not all known to work."""
BOUND = f"{_MAJOR}.{_MINOR + _IS_NEWEST}"
ABOVE_TESTED = f"import axon_nb.records.hooks as hooks\nhooks.TESTED['torch'] = ('2.8', {BOUND!r})\n"
_FILE = Path("distributed", "fsdp", "_fully_shard", "_fully_shard.py")
RENAMED = _FILE, "def reset_iter_state(", "def reset_iteration("
"""The one name that differs in a newer torch, as far as this one has it: its file, and what stands there."""
WITHOUT_ARGUMENT = f"""
{UNTESTED}
import torch
import torch.distributed as dist

torch.__version__ = {CHANGED!r}
original = dist.Backend.register_backend


def register_backend(name, func, **options):  # as if the argument that recoverable groups need were gone
    if name == "axon_nb":
        raise TypeError("register_backend() got an unexpected keyword argument 'extended_api'")
    original(name, func, **options)


dist.Backend.register_backend = staticmethod(register_backend)
"""
TWO_CHECKS = """
import axon_nb.engine.self_test.catalog as catalog
catalog.CHECKS = tuple(check for check in catalog.CHECKS if check.name in ("release", "shared_memory"))
"""
THREE_CHECKS = TWO_CHECKS.replace('("release",', '("release", "fsdp2_reset",')
"""tests/engine/test_self_test.py runs them all."""
PIN = f'pip install "torch>=2.8,<{BOUND}"'
ATTEMPTS = 3
"""How often a check may time out: on a busy machine that says nothing of the versions."""
START = "%load_ext axon_nb\n%distributed config start_timeout=10min\n%distributed start -n 2 --devices cpu"
IMPORTS = "%%distributed\nimport os\nimport torch\nimport torch.distributed as dist\nx = torch.ones(2)"


def _environment(folder: Path, site: str) -> dict[str, str]:
    """Of processes that have the real torch, changed as `site` says, and no verdict of the self-test."""
    (folder / "sitecustomize.py").write_text(site)
    path = os.pathsep.join([str(folder), str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, "XDG_CACHE_HOME": str(folder / "cache")}


def _install_newer(folder: Path) -> None:
    """Put a newer torch there, as pip would: links to the installed one, but its version and one name differ."""
    installed = Path(torch.__file__).parent
    version = importlib.metadata.version("torch")
    file, name, other = RENAMED
    changed = {installed / "version.py": (repr(torch.__version__), repr(NEWER)), installed / file: (name, other)}
    _link(installed, folder / "torch", changed)
    facts = folder / f"torch-{NEWER}.dist-info"
    facts.mkdir()
    text = importlib.metadata.distribution("torch").read_text("METADATA") or ""
    (facts / "METADATA").write_text(text.replace(f"\nVersion: {version}\n", f"\nVersion: {NEWER}\n", 1))


def _link(folder: Path, place: Path, changed: Mapping[Path, tuple[str, str]]) -> None:
    """Make links to what is in a folder; copy what is changed, and the folders above it."""
    place.mkdir()
    for entry in folder.iterdir():
        if entry in changed:
            (place / entry.name).write_text(entry.read_text().replace(*changed[entry]))
        elif any(entry in file.parents for file in changed):
            _link(entry, place / entry.name, changed)
        elif entry.name != "__pycache__":  # Python would write the changed file's bytecode there
            (place / entry.name).symlink_to(entry)


def _saved(folder: Path) -> list[Path]:
    return list((folder / "cache" / "axon_nb" / "self_test").glob("*.json"))


def _test_versions(folder: Path, environment: dict[str, str]) -> Path:
    """Run the self-test before a start does, as often as a busy machine needs; returns the file of its verdict."""
    command = [sys.executable, "-m", "axon_nb.engine.self_test", "--json", "--fresh"]
    for _ in range(ATTEMPTS):
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
        capabilities = json.loads(done.stdout.splitlines()[-1])["capabilities"]
        if not any(is_timeout(capability["reason"]) for capability in capabilities):
            break
    (saved,) = _saved(folder)
    later = time.time() + 3600  # a verdict with a failure is valid for a minute
    os.utime(saved, (later, later))
    return saved


def test_newer_torch_loses_only_what_the_self_test_could_not_confirm(tmp_path: Path) -> None:
    _install_newer(tmp_path)
    environment = _environment(tmp_path, ABOVE_TESTED + THREE_CHECKS)
    verdict = _test_versions(tmp_path, environment)
    assert json.loads(verdict.read_text())["build"].startswith(f"torch-{NEWER}-")
    tested = verdict.stat().st_mtime
    has_name = hasattr(FSDPModule, "reset_iter_state")
    with Kernel(env=environment) as kernel:
        lines = kernel.ok(START).stderr.splitlines()
        if has_name:
            assert lines.pop(0).startswith("FSDP2 models must be recreated after a failed cell: this build cannot ")
            assert lines.pop(0) == f"To get it: {PIN}"
        assert lines[0].startswith(f"torch {NEWER} computes ")
        assert lines[0].endswith(" wrong without an error that these ranks can meet.")
        assert lines[1:] == ["More: `%distributed help wrong-numbers`"]
        assert (tmp_path / "cache" / "axon_nb" / f"shown-torch-{NEWER}-shm").exists()
        kernel.ok(IMPORTS)
        failed = kernel.run("%%distributed\nif rank == 1:\n    raise ValueError('no')\ndist.all_reduce(x)")
        assert failed.evalue == "rank 1: ValueError: no"
        assert failed.stderr == ""
        shown = kernel.ok("%%distributed\ny = torch.ones(2)\ndist.all_reduce(y)\nprint(y.tolist(), torch.__version__)")
        assert shown.lines() == [f"[ranks 0-1] [2.0, 2.0] {NEWER}"]
        assert kernel.run("%%rank 1\nos._exit(3)").status == "error"
        kernel.ok("%distributed repair")
        assert kernel.ok("%%distributed\ny = torch.ones(2)\ndist.all_reduce(y)\nprint(y.tolist())").lines() == [
            "[ranks 0-1] [2.0, 2.0]"
        ]
        assert _saved(tmp_path) == [verdict]
        assert verdict.stat().st_mtime == tested, "one test is enough for every start"
    if has_name:
        _check_doctor(environment)


def _check_doctor(environment: dict[str, str]) -> None:
    """It says that this torch is not tested, what is off with it and what to pin, and nothing more of it."""
    sections = axon_nb("doctor", "--json", **environment).json()["sections"]
    findings = {one["label"]: one for section in sections.values() for one in section["findings"]}
    untested, lost = findings["torch"], findings["continue training an FSDP2 model after an aborted step"]
    assert untested["value"].startswith(f"{NEWER} ")
    assert (untested["severity"], untested["fix"]) == ("note", f"If something is missing, run `{PIN}`.")
    assert untested["message"] == "This axon_nb was not tested with it: what the self-test cannot confirm is off."
    assert (lost["severity"], lost["fix"]) == ("problem", f"Run `{PIN}`.")
    assert "reset_iter_state" in lost["value"]
    assert lost["message"] == "Lost: FSDP2 models must be recreated after a failed cell."
    assert [label for label, one in findings.items() if PIN in one["fix"] and one is not untested] == [lost["label"]]
    missing = "torch.distributed.fsdp.FSDPModule.reset_iter_state"
    assert findings["groups.fsdp2_iteration"]["value"] == f"torch lacks {missing}; the self-test tries it (fsdp2_reset)"


@pytest.fixture(scope="module")
def changed_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A notebook whose torch lacks a hook; its first start tests the versions."""
    folder = tmp_path_factory.mktemp("changed")
    with Kernel(env=_environment(folder, WITHOUT_ARGUMENT + TWO_CHECKS)) as kernel:
        started = kernel.ok(START)
        (verdict,) = _saved(folder)
        assert len(json.loads(verdict.read_text())["verdict"]["capabilities"]) == 2
        assert started.stderr.count(f"Recovery does not work with torch {CHANGED} (TypeError: ") == 1
        assert "the others wait for it for up to 60 s" in started.stderr
        fix, more = started.stderr.splitlines()[1:3]
        assert fix == 'To get recovery: pip install "torch>=2.8,<2.16"'
        assert more == "More: `%distributed help recovery-missing`"
        kernel.ok(IMPORTS)
        yield kernel


def test_torch_groups_are_used_and_waits_end_by_timeout(changed_kernel: Kernel) -> None:
    shown = changed_kernel.ok("%%distributed\ndist.all_reduce(x)\nprint(x.tolist(), type(dist.group.WORLD).__name__)")
    assert shown.lines() == ["[ranks 0-1] [2.0, 2.0] ProcessGroup"]
    limit = "dist.group.WORLD._get_backend(torch.device('cpu')).options._timeout"
    assert changed_kernel.ok(f"%%distributed\nprint({limit})").lines() == ["[ranks 0-1] 0:01:00"]
    failed = changed_kernel.run("%%distributed\nif rank == 1:\n    raise ValueError('no')\ndist.all_reduce(x)")
    assert (failed.status, failed.evalue) == ("error", "rank 1: ValueError: no")
    assert failed.stderr.count(f"With torch {CHANGED} groups are not rebuilt") == 1
    assert "released after 60 s" in failed.stderr
    assert "Run `%distributed restart` to start all ranks again." in failed.traceback
    assert "repair" not in failed.traceback


def test_unsupported_repair_is_reported(changed_kernel: Kernel) -> None:
    assert changed_kernel.run("%%rank 1\nos._exit(3)").status == "error"
    refused = changed_kernel.run("%distributed repair")
    assert refused.evalue.startswith(f"Ranks cannot be replaced with torch {CHANGED}.")
    assert "Run `%distributed restart`" in refused.evalue


def test_notebook_kernel_has_the_hooks(kernel: Kernel) -> None:
    kernel.ok("from axon_nb.records.hooks import missing_hooks")
    for group in ("front_end.help", "front_end.requests", "session.shutdown", "stop_button.presses"):
        assert kernel.value(f"missing_hooks({group!r}, kernel=get_ipython().kernel)") == [], group
    assert kernel.value("missing_hooks('stop_button.shell', shell=get_ipython())") == []


def test_ipykernel_and_torch_have_the_hooks_of_ranks(kernel: Kernel) -> None:
    reply = kernel.ok(
        "%%distributed --ranks 0\n"
        "from axon_nb.records.hooks import missing_hooks\nfrom axon_nb.engine import frames\n"
        "print(missing_hooks('kernel.cells', kernel=get_ipython().kernel), missing_hooks('groups.install'))\n"
        "print(type(dist.group.WORLD).__name__, 'allreduce' in frames.group_operations(), dist.get_backend())"
    )
    assert reply.lines() == ["[rank 0] [] []", "[rank 0] RecoverableGroup True gloo"]


def test_rank_looks_at_no_files_of_modules_for_a_debugger(kernel: Kernel) -> None:
    reply = kernel.ok(
        "%%distributed --ranks 0\nimport sys\nfrom ipykernel import ipkernel\n"
        "print(get_ipython().kernel._kernel_modules, ipkernel.sys is sys)"
    )
    assert reply.lines() == ["[rank 0] [] True"]


def test_shutdown_stops_the_ranks_without_the_hook(new_kernel: Callable[..., Kernel]) -> None:
    kernel = new_kernel()
    kernel.ok("own = get_ipython().kernel\nfull = own.do_shutdown\nown.do_shutdown = lambda again: full(again)")
    kernel.ok("%load_ext axon_nb\n%distributed start -n 2")
    assert kernel.ok("own.do_shutdown.__name__").result == "'<lambda>'"
    left = footprint(kernel)
    kernel.shutdown()
    assert until(left.gone)
