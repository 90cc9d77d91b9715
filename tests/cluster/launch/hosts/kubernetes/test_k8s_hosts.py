"""`--hosts k8s`: a real API server, scheduler and controllers place the ranks, on nodes that are imitations."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from axon_nb.host.schedulers.k8s import TEMPLATE
from tests.cluster.launch.hosts.kubernetes.control_plane import NAMESPACE, ControlPlane, control_plane, why_no_cluster
from tests.cluster.launch.hosts.kubernetes.node_agent import Node, PodNetwork
from tests.cluster.launch.second_host import why_not
from tests.support.processes import until
from tests.support.script import Script, command_lines

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("kubernetes") is None, reason="Kubernetes' client is not installed"),
    pytest.mark.skipif(bool(why_no_cluster()), reason=why_no_cluster()),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.timeout(600),
]
PAGE = Path(__file__).resolve().parents[5] / "docs" / "howto" / "kubernetes.md"
CELL = "import os; t = torch.ones(1); dist.all_reduce(t); (os.environ['AXON_NB_HOST'], globals().get('kept'), t.item())"
IMPATIENT = """
import axon_nb
from axon_nb.cluster.session import current
current.session().settings.set('start_timeout=10s')
"""
LABELLED = {"label_selector": "axon-nb"}
START = f"c = axon_nb.start({{}}, hosts='k8s:{NAMESPACE}={{}}', devices='cpu')"


def _documents() -> list[dict[str, Any]]:
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [document for block in blocks for document in yaml.safe_load_all(block)]


class Cluster:
    """The control plane, two nodes with two CPUs, and a user who has the Role of the documentation."""

    def __init__(self, plane: ControlPlane, network: PodNetwork, nodes: list[Node], folder: Path) -> None:
        from kubernetes import client

        self.plane, self.network, self.nodes, self._folder = plane, network, nodes, folder
        api = plane.api()
        self.core, self.batch = client.CoreV1Api(api), client.BatchV1Api(api)
        self.rbac = client.RbacAuthorizationV1Api(api)

    def settings(self, **changes: Any) -> dict[str, str]:
        """The environment of a notebook; `changes` of the template's pod."""
        template = yaml.safe_load(TEMPLATE)
        template["spec"]["ttlSecondsAfterFinished"] = 1
        pod = template["spec"]["template"]["spec"]
        container = {name: changes.pop(name) for name in ("image", "command") if name in changes}
        pod["containers"][0] |= {"image": "here"} | container
        pod |= changes
        path = self._folder / "job.yaml"
        path.write_text(yaml.safe_dump(template))
        return {"KUBECONFIG": self.plane.kubeconfig("notebook"), "AXON_NB_K8S_TEMPLATE": str(path)}

    def left(self) -> list[str]:
        """What was made and is still there."""
        jobs = self.batch.list_namespaced_job(NAMESPACE, **LABELLED).items
        found = [*jobs, *self.core.list_namespaced_pod(NAMESPACE, **LABELLED).items]
        secrets = self.core.list_namespaced_secret(NAMESPACE).items
        names = [f"{type(one).__name__} {one.metadata.name}" for one in [*found, *secrets]]
        return [name for name in names if "axon-nb-" in name]

    def pod(self, host: str) -> Any:
        """The pod of a host."""
        pods = self.core.list_namespaced_pod(NAMESPACE, label_selector=f"axon-nb/host={host}").items
        return next(pod for pod in pods if pod.metadata.deletion_timestamp is None)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("kubernetes")
    with contextlib.ExitStack() as stack:
        plane = stack.enter_context(control_plane(folder))
        network = PodNetwork()
        network.open()
        stack.callback(network.close)
        nodes = []
        for number in range(2):
            nodes.append(Node(plane, network, f"node-{number}", {"cpu": "2"}, {}))
            stack.callback(nodes[-1].close)
        cluster = Cluster(plane, network, nodes, folder)
        (role,) = [one for one in _documents() if one["kind"] == "Role"]
        cluster.rbac.create_namespaced_role(NAMESPACE, role)
        (binding,) = [one for one in _documents() if one["kind"] == "RoleBinding"]
        binding["subjects"] = [{"kind": "User", "name": "notebook", "apiGroup": "rbac.authorization.k8s.io"}]
        cluster.rbac.create_namespaced_role_binding(NAMESPACE, binding)
        yield cluster


@pytest.fixture
def script(cluster: Cluster, tmp_path: Path) -> Iterator[Script]:
    """A notebook's process outside of the cluster."""
    with Script(tmp_path, **cluster.settings()) as script:
        script.ok("import axon_nb")
        yield script


def test_ranks_run_in_pods_through_the_port_forward_and_stop_leaves_nothing(cluster: Cluster, script: Script) -> None:
    started = script.ok(START.format(4, 2), timeout=230)
    assert "k8s-1 is the pod axon-nb-" in started.out
    assert "The controller, the rendezvous store and Gloo listen on 127.0.0.1" in started.out
    assert script.value(f"dict(c.run({CELL!r}).values)") == {r: (f"k8s-{r // 2}", None, 4.0) for r in range(4)}
    key = script.value("c.connection.client.session.key.decode()")
    jobs = cluster.batch.list_namespaced_job(NAMESPACE, **LABELLED).items
    assert len(jobs) == 2
    assert not [job for job in jobs if key in str(job)]
    assert not [line for line in command_lines(psutil.process_iter()) if key in line]
    refused = script.run("c.resize(5)")
    assert refused.message.startswith("The pods were made for 4 ranks.")
    script.ok("c.stop()")
    assert until(lambda: not cluster.left()), cluster.left()
    assert until(lambda: not script.others()), command_lines(script.others())


def test_killed_pod_is_reported_and_repaired_and_a_killed_notebook_is_attached_to_until_keep_alive_is_over(
    cluster: Cluster, script: Script, tmp_path: Path
) -> None:
    script.ok(START.format(2, 1)[:-1] + ", name='kept')", timeout=230)
    script.ok("c.run('kept = rank')")
    script.submit("c.run('import time\\nif rank == 1: time.sleep(100)\\ndist.barrier()')")
    cluster.core.delete_namespaced_pod(cluster.pod("k8s-1").metadata.name, NAMESPACE, grace_period_seconds=0)
    assert "lost with its host 'k8s-1'" in script.collect().message
    script.ok("c.repair()", timeout=230)
    assert script.value(f"dict(c.run({CELL!r}).values)") == {0: ("k8s-0", 0, 2.0), 1: ("k8s-1", None, 2.0)}
    script.process.kill()
    script.process.wait(60)
    with Script(tmp_path, **cluster.settings()) as second:
        second.ok("import axon_nb\nfrom axon_nb.cluster.session import current\nc = axon_nb.attach('kept')")
        assert second.value(f"dict(c.run({CELL!r}).values)") == {0: ("k8s-0", 0, 2.0), 1: ("k8s-1", None, 2.0)}
        second.ok("current.session().settings.set('keep_alive=1s')")
        second.process.kill()
        second.process.wait(60)
        assert until(lambda: not cluster.left()), cluster.left()
        assert until(lambda: not script.others() and not second.others()), command_lines(script.others())


def test_notebook_in_a_pod_is_reached_directly_and_its_end_ends_the_jobs(cluster: Cluster, tmp_path: Path) -> None:
    name = socket.gethostname().lower()
    own = {
        "metadata": {"name": name},
        "spec": {"nodeName": "elsewhere", "containers": [{"name": "notebook", "image": "here"}]},
    }
    cluster.core.create_namespaced_pod(NAMESPACE, own)
    cluster.core.patch_namespaced_pod_status(name, NAMESPACE, {"status": {"podIP": cluster.network.ip}})
    with Script(tmp_path, KUBECONFIG=cluster.plane.kubeconfig("notebook")) as script:  # the image is the pod's own
        started = script.ok("import axon_nb\n" + START.format(2, 1), timeout=230)
        assert f"Gloo listen on {cluster.network.ip} for" in started.out
        assert script.value(f"dict(c.run({CELL!r}).values)") == {r: (f"k8s-{r}", None, 2.0) for r in range(2)}
        cluster.core.delete_namespaced_pod(name, NAMESPACE, grace_period_seconds=0)
        assert until(lambda: not cluster.left()), cluster.left()
        script.ok("c.stop()")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"image": "missing:1"}, 'ImagePullBackOff: Back-off pulling image "missing:1". Correct `image`'),
        ({"command": ["no-such-program"]}, 'exec: "no-such-program": executable file not found in $PATH.'),
        ({"command": ["axon-nb", "help"]}, "has ended: "),
    ],
)
def test_pod_that_cannot_run_says_why_and_is_removed(
    cluster: Cluster, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with Script(tmp_path, **cluster.settings(**changes)) as script:
        refused = script.run("import axon_nb\n" + START.format(1, 1))
        assert refused.kinds[0] == "StartError"
        assert refused.message.startswith("The host 'k8s-0' cannot join: k8s-0 ")
        assert reason in refused.message
        assert until(lambda: not cluster.left()), cluster.left()


def test_scheduler_and_quota_say_why_a_pod_is_pending(cluster: Cluster, tmp_path: Path) -> None:
    with Script(tmp_path, **cluster.settings(nodeSelector={"disk": "fast"})) as script:
        script.ok(IMPATIENT)
        refused = script.run(START.format(1, 1))
        assert "Waiting: k8s-0 is pending: 0/2 nodes are available" in refused.out
        assert "Correct `nodeSelector` or the affinity in the template." in refused.message
    with Script(tmp_path, **cluster.settings()) as script:
        script.ok(IMPATIENT)
        refused = script.run(START.format(9, 9))
        assert "k8s-0 is pending: 0/2 nodes are available: 2 Insufficient cpu. Use fewer ranks" in refused.message
        quota = {"metadata": {"name": "small"}, "spec": {"hard": {"requests.cpu": "1"}}}
        cluster.core.create_namespaced_resource_quota(NAMESPACE, quota)
        try:
            assert until(lambda: cluster.core.read_namespaced_resource_quota("small", NAMESPACE).status.hard)
            refused = script.run(START.format(2, 2))
            assert "k8s-0 gets no pod: Error creating: pods " in refused.message
            assert "exceeded quota: small, requested: requests.cpu=2" in refused.message
            assert "ask for a larger quota." in refused.message
        finally:
            cluster.core.delete_namespaced_resource_quota("small", NAMESPACE)
    assert until(lambda: not cluster.left()), cluster.left()


def test_server_refuses_a_template_or_a_namespace_before_anything_starts(cluster: Cluster, tmp_path: Path) -> None:
    with Script(tmp_path, **cluster.settings(restartPolicy="Always")) as script:
        refused = script.run("import axon_nb\n" + START.format(1, 1))
        assert refused.message.startswith("Kubernetes refuses to make Jobs: ")
        assert "restartPolicy" in refused.message
    with Script(tmp_path, **cluster.settings()) as script:
        refused = script.run("import axon_nb\naxon_nb.start(1, hosts='k8s:other', devices='cpu')")
        assert 'User "notebook" cannot create resource "jobs"' in refused.message
        refused = script.run("axon_nb.start(1, hosts='k8s')")
        assert "`--gpus-per-rank` says it" in refused.message
    assert not cluster.left()


def test_doctor_says_what_is_missing(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    from axon_nb.doctor.examine import examine

    for name, value in cluster.settings().items():
        monkeypatch.setenv(name, value)
    report = examine("k8s")
    assert report.status == 0
    assert f"namespace {NAMESPACE}" in report.text()
    assert "through the API server's port-forward" in report.text()
    report = examine("k8s:other")
    assert report.status == 1
    assert "create jobs" in report.text()
    monkeypatch.setenv("KUBECONFIG", cluster.plane.kubeconfig("admin"))
    assert "node-1" in examine("k8s").text()
