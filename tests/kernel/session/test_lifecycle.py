"""Clusters start, stop and end with their notebook, whose packages may be too old."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from axon_nb.doctor.clusters import stop_clusters
from tests.support.kernel import Kernel
from tests.support.processes import ended, footprint, until

MakeKernel = Callable[..., Kernel]


def start(kernel: Kernel, n: int = 2) -> None:
    kernel.ok("%load_ext axon_nb")
    kernel.ok(f"%distributed start -n {n}")
    kernel.ok("%%distributed\nkept = rank + 10")


def test_stop_leaves_no_processes_and_prints_one_line(new_kernel: MakeKernel) -> None:
    kernel = new_kernel()
    start(kernel)
    print_ = footprint(kernel)
    kernel.ok("import logging\nlogging.basicConfig()")
    reply = kernel.ok("%distributed stop")
    assert reply.lines() == ["Stopped the cluster 'default' (2 ranks)."]
    assert (reply.stderr, reply.displays) == ("", [])
    assert until(print_.gone)


def test_cell_without_a_cluster_starts_the_default_one(new_kernel: MakeKernel) -> None:
    kernel = new_kernel(AXON_NB_WARM_UP="0")
    kernel.ok("%load_ext axon_nb")
    reply = kernel.ok("%%distributed\nworld_size")
    size = kernel.value("__import__('axon_nb').cluster.current.get().world_size")
    assert reply.lines()[0] == f"Started {size} ranks (shm). Use `%distributed start -n N` to choose how many."
    assert reply.lines()[1] == f"[ranks 0-{size - 1}] {size}"


def test_cell_right_after_start_is_never_lost(new_kernel: MakeKernel) -> None:
    kernel = new_kernel(AXON_NB_WARM_UP="0")
    kernel.ok("%load_ext axon_nb")
    for _ in range(3):
        requests = [kernel.submit("%distributed start -n 3"), kernel.submit("%%distributed\nprint('first')")]
        assert kernel.collect(requests[0]).ok
        assert kernel.collect(requests[1]).lines() == ["[ranks 0-2] first"]
        kernel.ok("%distributed stop")


def test_shutdown_while_warming_up_ends_everything(new_kernel: MakeKernel) -> None:
    kernel = new_kernel()
    kernel.ok("%load_ext axon_nb")
    base = kernel.value("str(__import__('axon_nb.host.run_dir', fromlist=['x']).base_dir())")
    mine = kernel.value("__import__('os').getpid()")
    assert mine == kernel.pid
    kernel.shutdown()
    assert until(lambda: not any(name for name in os.listdir(base) if _owned_by(base, name, mine)))


def _owned_by(base: str, name: str, pid: int) -> bool:
    try:
        with open(os.path.join(base, name, "starter")) as file:
            return int(file.read() or pid) == pid  # empty: it is just being written
    except OSError:
        return False


def test_graceful_restart_keeps_ranks_for_attach(new_kernel: MakeKernel) -> None:
    kernel = new_kernel()
    start(kernel)
    before = footprint(kernel)
    kernel.restart(now=False)
    assert "is still running. Run `%distributed attach` to reconnect" in kernel.ok("%load_ext axon_nb").stdout
    kernel.ok("%distributed attach")
    assert sorted(kernel.ok("%%distributed\nkept").lines()) == ["[rank 0] 10", "[rank 1] 11"]
    assert kernel.ok("%%distributed\nt = torch.ones(1); dist.all_reduce(t); t.item()").lines() == ["[ranks 0-1] 2.0"]
    assert footprint(kernel).ranks == before.ranks
    kernel.ok("%distributed stop")
    assert until(before.gone)


def test_start_after_a_restart_replaces_the_kept_cluster_with_a_note(new_kernel: MakeKernel) -> None:
    kernel = new_kernel()
    start(kernel)
    before = footprint(kernel)
    kernel.restart(now=True)
    kernel.ok("%load_ext axon_nb")
    reply = kernel.ok("%distributed start -n 2")
    assert reply.lines() == ["Stopped the cluster 'default' (2 ranks) that this notebook had left running."]
    assert until(before.gone)
    assert "kept" not in kernel.ok("%%distributed\nprint(sorted(n for n in globals() if n == 'kept'))").stdout


def test_killed_kernel_loses_its_ranks_after_keep_alive(new_kernel: MakeKernel) -> None:
    kernel = new_kernel()
    kernel.ok("%load_ext axon_nb\n%distributed config keep_alive=5")
    kernel.ok("%distributed start -n 2")
    left = footprint(kernel)
    own = [process for process in left.processes if process.pid in (left.agent, left.controller, *left.ranks)]
    killed_at = time.monotonic()
    kernel.kill()
    assert until(lambda: any(map(ended, own)))
    assert time.monotonic() - killed_at >= 5.0, "all of them live as long as that"
    assert until(left.gone)


def test_ranks_die_with_a_killed_agent_and_start_works(new_kernel: MakeKernel) -> None:
    kernel = new_kernel()
    start(kernel)
    before = footprint(kernel)
    request = kernel.submit("%%distributed\nprint('go')\nimport time\ntime.sleep(600)")
    kernel.wait_for_output(request, "go")
    os.kill(before.agent, signal.SIGKILL)
    reply = kernel.collect(request)
    assert reply.ename == "ClusterLostError"
    assert "lost its host agent" in reply.traceback
    assert until(before.all_ended)
    kernel.ok("%distributed start -n 2")
    assert kernel.ok("%%distributed\nworld_size").lines() == ["[ranks 0-1] 2"]
    assert until(before.gone)
    _check_loss_between_cells(kernel)


def _check_loss_between_cells(kernel: Kernel) -> None:
    """A cell replaces no cluster that ended by itself, and says what happened, until the user starts or stops one."""
    kernel.ok("%distributed config protect=on")
    left = footprint(kernel)
    for pid in (*left.ranks, left.agent):
        os.kill(pid, signal.SIGKILL)
    assert until(left.all_ended)
    assert until(lambda: kernel.value("__import__('axon_nb').cluster.current.get() is None"))
    for code in ("%%distributed\n1", "%distributed status", "%pull world_size", "%%distributed\n1"):
        reply = kernel.run(code)
        assert reply.ename == "ClusterLostError", code
        assert re.search(
            r"^The cluster 'default' lost its .* at \d\d:\d\d:\d\d, while no cell was running\.", reply.evalue
        )
        assert "Nothing of its 2 ranks is kept, not even by `protect`" in reply.evalue
        assert reply.evalue.endswith("Run `%distributed start -n 2` to start new ones.")
    assert "The cluster 'default' lost its " in kernel.ok("%distributed start -n 2").stdout
    left = footprint(kernel)
    os.kill(left.agent, signal.SIGKILL)
    assert until(left.all_ended)
    assert "The cluster 'default' lost its " in kernel.ok("%distributed stop").stdout
    assert "needs a cluster, but none is running" in kernel.run("%distributed stop").evalue
    assert kernel.ok("%%distributed\n1").lines()[0].startswith("Started ")
    stop_clusters("default", force=True)  # as the panel does
    assert until(lambda: kernel.value("__import__('axon_nb').cluster.current.get() is None"))
    assert kernel.ok("%%distributed\n1").lines()[0].startswith("Started ")


def test_killed_controller_is_reported_and_leaves_no_processes(new_kernel: MakeKernel) -> None:
    kernel = new_kernel()
    start(kernel)
    before = footprint(kernel)
    request = kernel.submit("%%distributed\nprint('go')\nimport time\ntime.sleep(600)")
    kernel.wait_for_output(request, "go")
    os.kill(before.controller, signal.SIGKILL)
    reply = kernel.collect(request)
    assert reply.ename == "ClusterLostError"
    assert "controller" in reply.traceback
    assert until(before.gone)
    kernel.ok("%distributed start -n 2")


def test_two_clusters_live_side_by_side(new_kernel: MakeKernel) -> None:
    one, two = new_kernel(), new_kernel()
    for kernel, name in ((one, "alpha"), (two, "beta")):
        kernel.ok("%load_ext axon_nb")
        kernel.ok(f"%distributed start -n 2 --name {name}")
    refused = two.run("%distributed attach alpha")
    assert refused.evalue == "This notebook already has the cluster 'beta'. Run `%distributed stop` first."
    meets = "%%distributed\nt = torch.ones(1); dist.all_reduce(t); t.item()"
    for kernel in (one, two):
        assert kernel.ok(meets).lines() == ["[ranks 0-1] 2.0"]
    assert two.ok("%distributed stop").lines() == ["Stopped the cluster 'beta' (2 ranks)."]
    refused = two.run("%distributed attach alpha")
    assert refused.evalue.startswith("The cluster 'alpha' is in use by another notebook. Stop it there, or run ")
    assert one.ok(meets).lines() == ["[ranks 0-1] 2.0"]


def test_stop_button_does_not_stop_the_cluster(new_kernel: MakeKernel) -> None:
    kernel = new_kernel()
    start(kernel)
    request = kernel.submit("import time\nprint('go')\ntime.sleep(600)")
    kernel.wait_for_output(request, "go")
    kernel.interrupt()
    assert kernel.collect(request).ename == "KeyboardInterrupt"
    assert sorted(kernel.ok("%%distributed\nkept").lines()) == ["[rank 0] 10", "[rank 1] 11"]


def test_restart_gives_fresh_ranks_of_the_same_shape(new_kernel: MakeKernel) -> None:
    kernel = new_kernel()
    start(kernel)
    before = footprint(kernel)
    kernel.ok("%distributed restart")
    assert kernel.ok("%%distributed\n('kept' in globals(), world_size)").lines() == ["[ranks 0-1] (False, 2)"]
    assert until(before.gone)


def test_folder_environment_and_path_are_taken_at_start(new_kernel: MakeKernel) -> None:
    kernel = new_kernel()
    kernel.ok("%load_ext axon_nb")
    kernel.ok(
        "import os, sys, pathlib\npathlib.Path('sub').mkdir()\npathlib.Path('sub/only_here.py').write_text('x = 5')\n"
        "os.chdir('sub')\nos.environ['LATE'] = 'yes'\nsys.path.insert(0, os.getcwd())"
    )
    kernel.ok("%distributed start -n 2")
    reply = kernel.ok(
        "%%distributed\nimport os, only_here\nprint(only_here.x, os.environ['LATE'], os.path.basename(os.getcwd()))"
    )
    assert reply.lines() == ["[ranks 0-1] 5 yes sub"]


def test_restart_beside_a_cluster_of_the_same_name_takes_another(new_kernel: MakeKernel) -> None:
    kernel, other = new_kernel(), new_kernel()
    start(kernel)
    start(other)
    name = kernel.value("(c := __import__('axon_nb').cluster.current.get()).name")
    # As if both had looked for a free name before either had one.
    other.ok(
        "from msgspec.structs import replace\nfrom axon_nb.records.protocol.agent import SetInfo\n"
        "c = __import__('axon_nb').cluster.current.get()\n"
        f"c.connection.agent.call(SetInfo(replace(c.state._facts, name={name!r})))"
    )
    kernel.ok("%distributed restart")
    assert kernel.ok("%%distributed\n1").lines() == ["[ranks 0-1] 1"]
    assert kernel.value("__import__('axon_nb').cluster.current.get().name") != name
    other.ok("%distributed stop")
    kernel.ok("%distributed stop")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder that comes first in the kernel's path, with the metadata of what is installed there."""
    folder = tmp_path / "site"
    folder.mkdir()
    return folder


def install(site: Path, package: str, release: str) -> Path:
    """Record an installed package as pip does."""
    place = site / f"{package}-{release}.dist-info"
    place.mkdir()
    place.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {release}\n")
    return place


def refusal(kernel: Kernel) -> str:
    """What `%load_ext axon_nb` says instead of loading."""
    reply = kernel.run("%load_ext axon_nb")
    assert reply.ename == "UsageError"
    assert "Traceback" not in reply.traceback
    assert kernel.value("[name for name in __import__('sys').modules if name.startswith('axon_nb.cluster')]") == []
    return reply.traceback.strip()


def test_package_below_its_floor_is_named_with_the_line_to_type(new_kernel: MakeKernel, site: Path) -> None:
    install(site, "ipywidgets", "7.6.5")
    assert refusal(new_kernel(PYTHONPATH=str(site))) == (
        "UsageError: axon_nb needs ipywidgets 7.7 or newer; got 7.6.5. "
        'Run `%pip install "ipywidgets>=7.7"`, then restart the kernel.'
    )


@pytest.mark.parametrize("package", ["ipykernel", "numpy"])
def test_kernel_whose_packages_were_upgraded_is_to_be_restarted(
    new_kernel: MakeKernel, site: Path, package: str
) -> None:
    kernel = new_kernel(PYTHONPATH=str(site))
    kernel.ok(f"import {package}")
    upgraded = install(site, package, "99.1.0")
    assert refusal(kernel) == (
        f"UsageError: This kernel runs {package} {version(package)}, and 99.1.0 is installed: restart the kernel."
    )
    shutil.rmtree(upgraded)
    kernel.ok("%load_ext axon_nb")
