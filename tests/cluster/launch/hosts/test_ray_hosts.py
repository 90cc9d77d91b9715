"""`--hosts ray`: a real Ray whose head and two nodes are raylets on this machine places the ranks and returns them."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.launch.second_host import _ip, why_not
from tests.support.processes import until
from tests.support.script import Script, command_lines

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.timeout(600),
]
CELL = "import os; t = torch.ones(1); dist.all_reduce(t); (os.environ['AXON_NB_HOST'], globals().get('kept'), t.item())"
FREE = "ray.available_resources().get('CPU', 0.0)"
START_RAY = """
import socket
import ray
from ray.cluster_utils import Cluster

def started(node):
    for _ in range(4):  # a raylet gives up after 15 s, in which its helpers may not start on a busy machine
        try:
            return node()
        except Exception as error:
            failed = error
    raise failed

light = {"include_dashboard": False, "include_log_monitor": False}
with socket.create_server(("127.0.0.1", 0)) as server:
    client_port = server.getsockname()[1]
head = {"num_cpus": 0, "no_monitor": True, "ray_client_server_port": client_port, **light}
cluster = started(lambda: Cluster(initialize_head=True, head_node_args=head))
nodes = [started(lambda: cluster.add_node(num_cpus=2, **light)) for _ in range(2)]
_ = ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
"""


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    """A process that has started Ray: a head without CPUs, and two nodes with two each."""
    # With gRPC's handlers of a fork, the processes that Ray's client server starts may die at once.
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "GRPC_ENABLE_FORK_SUPPORT": "0"}
    with Script(tmp_path_factory.mktemp("ray"), **settings) as ray:
        try:
            ray.ok(START_RAY, timeout=500)
            yield ray
        finally:
            ray.run("cluster.shutdown()")


@pytest.fixture(scope="module")
def hosts(ray: Script) -> str:
    """The option."""
    return f"hosts='ray:{ray.value('cluster.address')}'"


@pytest.fixture(scope="module")
def client(ray: Script) -> str:
    """The option, for a Ray client."""
    pytest.importorskip("grpc")
    return f"hosts='ray://{ray.value('cluster.address').partition(':')[0]}:{ray.value('client_port')}'"


@pytest.fixture
def unreachable() -> Iterator[str]:
    """An address of this host that no process reaches."""
    if reason := why_not():
        pytest.skip(reason)
    name, ip = f"axr{os.getpid()}"[:15], f"10.82.{os.getpid() % 250}.1"
    _ip("route", "add", "unreachable", ip)
    try:
        _ip("link", "add", name, "type", "bridge")
        _ip("addr", "add", f"{ip}/32", "dev", name)
        _ip("link", "set", name, "up")
        _ip("route", "del", "local", ip, "dev", name, "table", "local")
        yield ip
        _ip("link", "del", name)
    finally:
        _ip("route", "del", "unreachable", ip)


@pytest.fixture
def script(ray: Script, tmp_path: Path) -> Iterator[Script]:
    """A notebook's process."""
    with Script(tmp_path) as script:
        script.ok("import axon_nb")
        yield script


def _is_free(ray: Script, cpus: float) -> bool:
    return until(lambda: ray.value(FREE) == cpus)


def test_ranks_run_where_ray_places_them_and_stop_returns_the_room(ray: Script, hosts: str, script: Script) -> None:
    started = script.ok(f"c = axon_nb.start(4, {hosts})", timeout=230)
    assert "Ray placed ray-1 (2 ranks) on " in started.out
    assert script.value(f"dict(c.run({CELL!r}).values)") == {r: (f"ray-{r // 2}", None, 4.0) for r in range(4)}
    key = script.value("c.connection.client.session.key.decode()")
    assert not [line for line in command_lines(psutil.process_iter()) if key in line]
    assert ray.value(FREE) == 0.0
    refused = script.run("c.resize(5)")
    assert refused.message.startswith("Ray has reserved resources for 4 ranks, and a placement group cannot grow.")
    script.ok("c.stop()")
    assert _is_free(ray, 4.0)
    assert until(lambda: not script.others()), command_lines(script.others())


def test_ray_client_starts_ranks_that_outlive_its_kernel_and_stop_returns_the_room(
    ray: Script, client: str, script: Script, tmp_path: Path
) -> None:
    script.ok(f"c = axon_nb.start(4, {client}, name='client')", timeout=230)
    script.ok("c.run('kept = rank')")
    assert ray.value(FREE) == 0.0
    script.process.kill()
    script.process.wait(60)
    with Script(tmp_path) as second:
        second.ok("import axon_nb\nc = axon_nb.attach('client')")
        assert second.value(f"dict(c.run({CELL!r}).values)") == {r: (f"ray-{r // 2}", r, 4.0) for r in range(4)}
        second.ok("c.stop()")
        assert _is_free(ray, 4.0)
        assert until(lambda: not script.others() and not second.others()), command_lines(script.others())


def test_ray_client_that_nodes_cannot_reach_is_refused_before_anything_starts(
    ray: Script, client: str, script: Script, unreachable: str
) -> None:
    refused = script.run(f"axon_nb.start(2, {client}, interface={unreachable!r})")
    assert refused.kinds[0] == "StartError"
    assert refused.message.startswith(f"Ray's nodes cannot connect to this host at {unreachable}: ")
    assert ray.value(FREE) == 4.0
    assert until(lambda: not script.others()), command_lines(script.others())


def test_doctor_checks_each_node(hosts: str, script: Script) -> None:
    text = script.value(f"from axon_nb.doctor.examine import examine; ' '.join(examine({hosts}).text().split())")
    assert "3 nodes" in text
    assert text.count("2 of 2 CPUs free, 0 of 0 GPUs free; same versions; reaches this host") == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_room_is_returned_if_the_start_is_cut_short(
    ray: Script, hosts: str, script: Script, number: signal.Signals
) -> None:
    # A notebook keeps the last exception, and with it what the start knew.
    script.submit(f"try: axon_nb.start(4, {hosts})\nexcept BaseException as error: kept = error; raise")
    assert until(lambda: any("axon_nb.host" in line and "--run-dir" in line for line in command_lines(script.others())))
    assert ray.value(FREE) == 0.0
    script.process.send_signal(number)
    assert _is_free(ray, 4.0)
    assert until(lambda: not script.others()), command_lines(script.others())
    assert number == signal.SIGKILL or "KeyboardInterrupt" in script.collect().kinds


def test_full_cluster_says_what_is_missing_and_who_has_it(ray: Script, hosts: str, script: Script) -> None:
    ray.ok("group = ray.util.placement_group([{'CPU': 2}, {'CPU': 1}], name='train'); _ = ray.get(group.ready())")
    refused = script.run(f"axon_nb.start(2, {hosts})")
    assert refused.kinds[0] == "StartError"
    assert refused.message.startswith("Ray has no room for 2 ranks with 1 CPU each. Free: ")
    assert "1 of 2 CPUs" in refused.message
    assert "Placement groups: 'train' 3 CPUs, 0 GPUs." in refused.message
    ray.ok("ray.util.remove_placement_group(group)")
    assert until(lambda: not script.others()), command_lines(script.others())


def test_notebook_that_is_killed_is_attached_to_and_ray_gets_its_room_back_after_keep_alive(
    ray: Script, hosts: str, script: Script, tmp_path: Path
) -> None:
    ray.ok("group = ray.util.placement_group([{'CPU': 2}], name='train'); _ = ray.get(group.ready())")
    script.ok(f"c = axon_nb.start(2, {hosts}, name='kept')", timeout=230)
    script.ok("c.run('kept = rank')")
    script.process.kill()
    script.process.wait(60)
    with Script(tmp_path) as second:
        second.ok("import axon_nb\nfrom axon_nb.cluster.session import current\nc = axon_nb.attach('kept')")
        assert second.value(f"dict(c.run({CELL!r}).values)") == {0: ("ray-0", 0, 2.0), 1: ("ray-0", 1, 2.0)}
        second.ok("current.session().settings.set('keep_alive=1s')")
        assert ray.value(FREE) == 0.0
        second.process.kill()
        second.process.wait(60)
        assert _is_free(ray, 2.0)  # the other placement group keeps its own
        assert until(lambda: not script.others() and not second.others()), command_lines(script.others())
    ray.ok("ray.util.remove_placement_group(group)")


def test_rank_of_a_killed_raylet_is_reported_and_repaired_where_ray_has_room(
    ray: Script, hosts: str, script: Script
) -> None:
    script.ok(f"c = axon_nb.start(2, {hosts}, placement='spread')", timeout=230)
    script.ok("c.run('kept = rank')")
    pid = script.value("dict(c.run('import os; os.getpid()').values)[1]")
    (raylet,) = [one for one in psutil.Process(pid).parents() if one.name() == "raylet"]
    script.submit("c.run('import time\\nif rank == 1: time.sleep(100)\\ndist.barrier()')")
    raylet.kill()
    ray.ok(f"import os; os.waitpid({raylet.pid}, 0)")  # Ray's workers outlive a zombie
    lost = script.collect()
    assert "lost with its host 'ray-1'" in lost.message
    script.ok("c.repair()", timeout=230)
    assert script.value(f"dict(c.run({CELL!r}).values)") == {0: ("ray-0", 0, 2.0), 1: ("ray-1", None, 2.0)}
    script.ok("c.stop()")
    assert _is_free(ray, 2.0)
    assert until(lambda: not script.others()), command_lines(script.others())
