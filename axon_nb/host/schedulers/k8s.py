"""What `--hosts k8s` does in Kubernetes, in a process of its own.

Each host is a Job with one pod, in which its agent runs. The agent exits when the cluster stops, or when nobody comes
back to it within `keep_alive`; the Job is then complete, and Kubernetes deletes it, and with the last one the Secret
that it owned. A pod that is lost the Job replaces. ``look`` asks whether this would be accepted, ``check`` is for
`axon-nb doctor`, and ``place`` makes the Jobs and says why pods do not run.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import json
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from axon_nb.errors import StartError
from axon_nb.host.children import set_parent_death_signal
from axon_nb.host.run_dir import RunDir
from axon_nb.host.schedulers.serving import Refused, serve
from axon_nb.records.environment import HOST_IP, JOIN_KEY, K8S_TEMPLATE

TEMPLATE = """\
# The Job that `--hosts k8s` makes for each host. It adds names, labels and, to the first container, the arguments, the
# variables AXON_NB_*, and a CPU and a GPU for each rank unless `resources` names its own. Set AXON_NB_K8S_TEMPLATE to
# the path of a copy of this file.
apiVersion: batch/v1
kind: Job
spec:
  ttlSecondsAfterFinished: 10
  template:
    spec:
      restartPolicy: Never
      automountServiceAccountToken: false
      terminationGracePeriodSeconds: 10
      containers:
        - name: agent
          image: ""  # with the axon_nb, torch and Python of the notebook; "": the image of the notebook's own pod
          command: ["axon-nb"]
          terminationMessagePolicy: FallbackToLogsOnError
          volumeMounts:
            - name: shared-memory
              mountPath: /dev/shm
      volumes:
        - name: shared-memory
          emptyDir:
            medium: Memory
"""
LABEL = "axon-nb"
_GPU = "nvidia.com/gpu"
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_OWN_MESSAGE = "axon-nb: "
_POLL_S = 0.5
_PERMISSIONS = (
    ("batch", "jobs", ("create", "get", "delete")),
    ("", "secrets", ("create", "update")),
    ("", "pods", ("list", "delete")),
    ("", "pods/portforward", ("get",)),
    ("", "events", ("list",)),
)
"""What a user needs; the documentation has them as a Role."""
_HOPELESS = ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerError", "RunContainerError")
"""Why a container waits although waiting does not help."""
_FIXES = {
    "exceeded quota": " Use fewer ranks, or ask for a larger quota.",
    "Insufficient": " Use fewer ranks or `--hosts k8s:NAMESPACE=RANKS` with fewer on each pod, or wait for room.",
    "node affinity": " Correct `nodeSelector` or the affinity in the template.",
    "taint": " Add `tolerations` to the template.",
    "image": " Correct `image` in the template.",
}
PORT = 29467
"""Where the pod's end waits for forwarded connections: none that a system chooses for others."""
_WAITING = 4
_RETRY_S = 0.5
_ANSWER_S = 10.0
_ACCEPTED = b"+"
_LOOPBACK = "127.0.0.1"


class Client:
    """The API, as the user's configuration or the account of the notebook's pod reaches it."""

    def __init__(self) -> None:
        from kubernetes import client, config

        try:
            config.load_config()
            contexts = [] if _ACCOUNT.exists() else [config.list_kube_config_contexts()[1]["context"]]
        except Exception as error:
            raise Refused(
                f"Cannot find a Kubernetes cluster ({str(error).rstrip('.')}): set KUBECONFIG to the configuration "
                "with which `kubectl get pods` works."
            ) from None
        self.error: Any = client.ApiException
        self.unreached: Any = client.rest.urllib3.exceptions.HTTPError
        self.core, self.batch, self.version = client.CoreV1Api(), client.BatchV1Api(), client.VersionApi()
        self.authorization = client.AuthorizationV1Api()
        own = _ACCOUNT.read_text().strip() if _ACCOUNT.exists() else contexts[0].get("namespace", "default")
        self.namespace = str(own)

    @contextlib.contextmanager
    def explaining(self, what: str) -> Iterator[None]:
        """Refuse what the API refuses."""
        try:
            yield
        except self.error as error:
            message = error.reason
            with contextlib.suppress(Exception):
                message = json.loads(error.body)["message"]
            raise Refused(f"Kubernetes refuses to {what}: {message.rstrip('.')}.{_fix(message)}") from None
        except (OSError, self.unreached) as error:
            reason = getattr(error, "reason", error)
            raise Refused(f"The API server of Kubernetes cannot be reached: {reason}.") from None

    def forward(self, pod: str, namespace: str) -> Any:
        """Return a socket that the API server connects to the tunnel's end in a pod."""
        from kubernetes import client, stream

        core = client.CoreV1Api(client.ApiClient())  # for this one: its requests become websockets
        return stream.portforward(core.connect_get_namespaced_pod_portforward, pod, namespace, ports=f"{PORT}").socket(
            PORT
        )

    def own_pod(self) -> Any:
        """The pod in which this process runs, if it is one of this namespace."""
        with contextlib.suppress(self.error):
            pod = self.core.read_namespaced_pod(socket.gethostname().lower(), self.namespace)
            with contextlib.suppress(OSError, TypeError), socket.create_server((pod.status.pod_ip, 0)):
                return pod  # this host has its address
        return None


def read_template(own: Any) -> dict[str, Any]:
    """Return the Job of the user's template, or of the usual one.

    Args:
        own: The notebook's pod, if it is one.
    """
    import yaml

    path = K8S_TEMPLATE.get()
    try:
        template: dict[str, Any] = yaml.safe_load(Path(path).expanduser().read_text() if path else TEMPLATE)
        container = template["spec"]["template"]["spec"]["containers"][0]
        if template["kind"] != "Job":
            raise ValueError(f"kind is {template['kind']}")
        if not container.get("image") and own is not None:
            container["image"] = own.spec.containers[0].image
    except (OSError, ValueError, TypeError, LookupError, AttributeError, yaml.YAMLError) as error:
        problem = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise Refused(
            f"{K8S_TEMPLATE.name} must name a file with a Job, as `axon-nb host --k8s-template` prints; {path}: "
            f"{' '.join(str(problem).split())}."
        ) from None
    if not container.get("image"):
        raise Refused(
            "The pods need an image with axon_nb. Run `axon-nb host --k8s-template > job.yaml`, name the image there, "
            f"and set {K8S_TEMPLATE.name} to the path of that file."
        )
    return template


def make_job(template: Mapping[str, Any], request: Mapping[str, Any], host: str, own: Any) -> dict[str, Any]:
    """Return the Job of a host.

    Args:
        template: The user's.
        request: What ``place`` got.
        host: The host's name.
        own: The notebook's pod, if it is one: the Job ends with it.
    """
    job, name = copy.deepcopy(dict(template)), _job_name(request, host)
    labels = {LABEL: "agent", f"{LABEL}/cluster": _cluster(request), f"{LABEL}/host": host}
    metadata, pod = job.setdefault("metadata", {}), job["spec"]["template"]
    metadata |= {"name": name, "labels": {**metadata.get("labels", {}), **labels}}
    if own is not None and own.metadata.namespace == request["namespace"]:
        owner = {"apiVersion": "v1", "kind": "Pod", "name": own.metadata.name, "uid": own.metadata.uid}
        metadata["ownerReferences"] = [owner]
    inner = pod.setdefault("metadata", {})
    inner["labels"] = {**inner.get("labels", {}), **labels}
    container, count = pod["spec"]["containers"][0], request["hosts"][host]
    container["args"] = ["host", "--join", request["join"], "--name", host]
    if request["ports"]:
        container["args"] += ["--tunnel", *map(str, request["ports"])]
    container["env"] = [
        *container.get("env", []),
        {"name": JOIN_KEY.name, "valueFrom": {"secretKeyRef": {"name": name, "key": "key"}}},
        {"name": HOST_IP.name, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]
    resources = container.setdefault("resources", {})
    limits, requests = resources.setdefault("limits", {}), resources.setdefault("requests", {})
    if "cpu" not in {*limits, *requests}:
        requests["cpu"] = str(count)
    if request["gpus_per_rank"]:
        limits.setdefault(_GPU, str(count))
    return job


def _cluster(request: Mapping[str, Any]) -> str:
    return Path(request["folder"]).name


def _job_name(request: Mapping[str, Any], host: str) -> str:
    return f"axon-nb-{_cluster(request)}-{host.rpartition('-')[2]}"


def look(client: Client, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Say which namespace it is, how many ranks each host gets, and GPUs each rank, and this host's address if a pod.

    The API server checks the Job of the first host without making it.
    """
    gpus, number = request["gpus_per_rank"], request["num_ranks"]
    namespace, _, count = request["where"].partition("=")
    namespace, size = namespace or client.namespace, int(count or 1)
    bundles = [min(size, number - first) for first in range(0, number, size)]
    with client.explaining("read pods"):
        own = client.own_pod()
    if gpus is None:
        gpus = _find_gpus(client)
    first = {"namespace": namespace, "folder": "check", "gpus_per_rank": gpus, "join": "127.0.0.1:1", "ports": []}
    job = make_job(read_template(own), {**first, "hosts": {"k8s-0": bundles[0]}}, "k8s-0", own)
    with client.explaining("make Jobs"):
        client.batch.create_namespaced_job(namespace, job, dry_run="All")
    ip = "" if own is None else own.status.pod_ip
    yield {"where": f"{namespace}={size}", "bundles": bundles, "gpus_per_rank": gpus, "ip": ip}


def _find_gpus(client: Client) -> int:
    with client.explaining("find out whether nodes have GPUs (`--gpus-per-rank` says it)"):
        nodes = client.core.list_node().items
    return int(any(node.status.allocatable.get(_GPU, "0") != "0" for node in nodes))


def place(client: Client, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Make the Jobs of the hosts, unless they are there, and say as soon as all run which pods they are.

    Before, it notes why pods do not run. Afterwards a pod that fails is still reported, until standard input ends.
    """
    own, made = client.own_pod(), list[str]()
    request = {**request, "namespace": request["where"].partition("=")[0]}
    template, old = read_template(own), {pod.metadata.uid for pod in _pods(client, request)}
    try:
        for host in request["hosts"]:
            _make(client, make_job(template, request, host, own), request, made)
        yield from _follow(client, request, old)
    except BaseException:
        for name in made:
            with contextlib.suppress(Exception):
                client.batch.delete_namespaced_job(name, request["namespace"], propagation_policy="Background")
        raise


def _make(client: Client, job: Mapping[str, Any], request: Mapping[str, Any], made: list[str]) -> None:
    """Make a Job and the Secret with the key, which it owns; where it is already, have it replace a running pod."""
    name, namespace = job["metadata"]["name"], request["namespace"]
    with client.explaining("make Jobs"):
        while True:
            try:
                there = client.batch.read_namespaced_job(name, namespace)
            except client.error as error:
                if error.status != 404:
                    raise
                break
            over = any(one.type in ("Complete", "Failed") for one in there.status.conditions or [])
            if not there.metadata.deletion_timestamp and not over:
                for pod in _pods(client, request):
                    if pod.metadata.labels[f"{LABEL}/host"] == job["metadata"]["labels"][f"{LABEL}/host"]:
                        client.core.delete_namespaced_pod(pod.metadata.name, namespace)  # its agent is lost
                return
            if not there.metadata.deletion_timestamp:
                client.batch.delete_namespaced_job(name, namespace, propagation_policy="Background")
            time.sleep(_POLL_S)
        owner = client.batch.create_namespaced_job(namespace, dict(job))
        made.append(name)
    owners = [{"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": owner.metadata.uid}]
    secret = {"metadata": {"name": name, "ownerReferences": owners}, "stringData": {"key": request["key"]}}
    with client.explaining("make Secrets"):
        try:
            client.core.create_namespaced_secret(namespace, secret)
        except client.error as error:
            if error.status != 409:
                raise
            client.core.replace_namespaced_secret(name, namespace, secret)  # of a Job that was deleted


def _pods(client: Client, request: Mapping[str, Any]) -> list[Any]:
    with client.explaining("list pods"):
        chosen = f"{LABEL}/cluster={_cluster(request)}"
        pods = client.core.list_namespaced_pod(request["namespace"], label_selector=chosen).items
    return [pod for pod in pods if pod.metadata.deletion_timestamp is None]


def _follow(client: Client, request: Mapping[str, Any], old: Collection[str]) -> Iterator[dict[str, Any]]:
    """Note why pods do not run, say which do as soon as all do, and then still report one that fails.

    Args:
        client: The API.
        request: What ``place`` got.
        old: The pods that were there before.
    """
    end, said, answered = time.monotonic() + request["timeout_s"], set[str](), False
    tunnels = set[str]()
    while True:
        running, reasons = {}, []
        new = [pod for pod in _pods(client, request) if pod.metadata.uid not in old]
        new.sort(key=lambda pod: pod.metadata.creation_timestamp)
        pods = {pod.metadata.labels[f"{LABEL}/host"]: pod for pod in new}
        for host in request["hosts"]:
            reason, hopeless = _problem(client, request, host, pods.get(host))
            if hopeless:
                raise Refused(f"{host} {reason}.{_fix(reason)}")
            if reason:
                reasons.append(f"{host} {reason}.{_fix(reason)}")
            elif host in pods and pods[host].status.phase == "Running":
                running[host] = f"{host} is the pod {pods[host].metadata.name} on {pods[host].spec.node_name}."
                if request["ports"] and host not in tunnels:
                    tunnels.add(host)
                    _start_tunnel(request, host)
        if not answered:
            yield from ({"note": f"Waiting: {reason}"} for reason in reasons if reason not in said)
            said |= {*reasons}
            if len(running) == len(request["hosts"]):
                yield {"placed": [*running.values()]}
                answered = True
            elif time.monotonic() > end:
                raise Refused(reasons[0] if reasons else "not all pods run yet: see `kubectl get pods`.")
        if select.select([0], [], [], _POLL_S)[0]:  # the notebook has all it wants, or is gone
            if answered:
                return
            sys.exit(1)


def _problem(client: Client, request: Mapping[str, Any], host: str, pod: Any) -> tuple[str, bool]:
    """Return why a pod does not run, empty if it does or will soon, and whether waiting cannot help."""
    if pod is None:
        chosen = f"involvedObject.name={_job_name(request, host)},type=Warning"
        with client.explaining("list events"):
            events = client.core.list_namespaced_event(request["namespace"], field_selector=chosen).items
        message = events[-1].message if events else ""
        return (f"gets no pod: {_short(message)}", True) if message else ("", False)
    states = [one.state for one in pod.status.container_statuses or []]
    for state in states:
        if state.terminated is not None:
            lines = [line.strip() for line in (state.terminated.message or "").splitlines() if line.strip()]
            own = [line.removeprefix(_OWN_MESSAGE) for line in lines if line.startswith(_OWN_MESSAGE)]
            code = f"exit code {state.terminated.exit_code} ({state.terminated.reason})"
            return f"has ended: {(own or lines[-1:] or [code])[0].rstrip('.')}", True
        if state.waiting is not None and state.waiting.message:
            why = f"{state.waiting.reason}: {_short(state.waiting.message)}"
            return f"is pending: {why}", state.waiting.reason in _HOPELESS
    for condition in pod.status.conditions or []:
        if condition.type == "PodScheduled" and condition.status == "False":
            return f"is pending: {_short(condition.message or condition.reason)}", False
    return "", False


def _short(message: str) -> str:
    return " ".join(message.split()).rstrip(".")


def _fix(message: str) -> str:
    return next((fix for words, fix in _FIXES.items() if words in message), "")


def _start_tunnel(request: Mapping[str, Any], host: str) -> None:
    """Keep the tunnel's notebook end in a process that ends with the cluster's folder, unless there is one."""
    folder = RunDir(Path(request["folder"]))
    mark = os.open(folder.path / f"tunnel-{host}", os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(mark)
        return
    if os.fork():
        os.close(mark)  # the child keeps the lock
        return
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("pipe:"):  # the notebook's
                os.dup2(nothing, int(name))
    client = Client()  # connections of its own

    def connect_to_pod() -> Any:
        there = [one for one in _pods(client, request) if one.metadata.labels[f"{LABEL}/host"] == host]
        pod = next(one for one in there if one.status.phase == "Running")
        return client.forward(pod.metadata.name, request["namespace"])

    keep_waiting(connect_to_pod, request["ports"])
    while folder.is_alive():
        time.sleep(2 * _POLL_S)
    os._exit(0)


def check(client: Client, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Say what `axon-nb doctor` reports: versions, permissions, room, and whether this host is a pod."""
    namespace = request["where"].partition("=")[0] or client.namespace
    with client.explaining("read its version"):
        version = client.version.get_code().git_version
        own = client.own_pod()
    denied = []
    for group, resource, verbs in _PERMISSIONS:
        kind, _, part = resource.partition("/")
        for verb in verbs:
            wanted = {"namespace": namespace, "group": group, "resource": kind, "subresource": part, "verb": verb}
            review = {"spec": {"resourceAttributes": wanted}}
            with client.explaining("ask what you may do"):
                if not client.authorization.create_self_subject_access_review(review).status.allowed:
                    denied.append(f"{verb} {resource}")
    problem = ""
    if not denied:
        try:
            next(look(client, {"where": namespace, "gpus_per_rank": 0, "num_ranks": 1}))
        except Refused as refused:
            problem = str(refused)
    nodes = []
    with contextlib.suppress(client.error):
        for node in client.core.list_node().items:
            room = node.status.allocatable
            nodes.append({"name": node.metadata.name, "cpu": room.get("cpu", "0"), "gpu": room.get(_GPU, "0")})
    found = {"version": version, "namespace": namespace, "denied": denied, "problem": problem, "nodes": nodes}
    yield {**found, "ip": "" if own is None else own.status.pod_ip}


# ---- the tunnel of a pod that cannot connect to the notebook's host, both ends of it ---------------------------------


def relay(ports: Collection[int]) -> None:
    """Listen on these ports of loopback, and return in a child, with which this process ends: an agent kills its own.

    Raises:
        StartError: one is in use.
    """
    try:
        listeners = {port: socket.create_server((_LOOPBACK, port), backlog=128) for port in (PORT, *ports)}
    except OSError as error:
        raise StartError(
            f"Cannot listen on the ports of the notebook's host ({error.strerror}): a pod in the network of its node "
            "cannot use the port-forward. Remove `hostNetwork` from the template."
        ) from None
    if not (child := os.fork()):
        set_parent_death_signal(signal.SIGTERM)
        for listener in listeners.values():
            listener.close()
        return
    signal.signal(signal.SIGTERM, lambda number, _: os.kill(child, number))
    waiting: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
    for port, listener in listeners.items():
        threading.Thread(target=_accept, args=(listener, port, waiting), daemon=True).start()
    os._exit(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))


def _accept(listener: socket.socket, port: int, waiting: queue.SimpleQueue[socket.socket]) -> None:
    while True:
        connection = listener.accept()[0]
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if port == PORT:
            waiting.put(connection)
        else:
            threading.Thread(target=_send_through, args=(connection, port, waiting), daemon=True).start()


def _send_through(connection: socket.socket, port: int, waiting: queue.SimpleQueue[socket.socket]) -> None:
    answer = b""
    while not answer:  # those whose other end is gone give none
        stream = waiting.get()
        with contextlib.suppress(OSError):
            stream.settimeout(_ANSWER_S)
            stream.sendall(port.to_bytes(2, "big"))
            answer = stream.recv(1)
            stream.settimeout(None)
    if answer == _ACCEPTED:
        _join(connection, stream)
    stream.close()
    connection.close()


def keep_waiting(connect: Callable[[], Any], ports: Collection[int]) -> None:
    """Keep connections to the pod's end waiting, in threads, and lead each to the port of this host that it names.

    Args:
        connect: Opens one; returns a socket.
        ports: The ports of loopback that may be named.
    """
    for _ in range(_WAITING):
        threading.Thread(target=_wait, args=(connect, ports), daemon=True).start()


def _wait(connect: Callable[[], Any], ports: Collection[int]) -> None:
    while True:
        named = b""
        with contextlib.suppress(Exception):  # there is none yet, or the API server is not reached
            stream = connect()
            while len(named) < 2 and (data := stream.recv(2 - len(named))):
                named += data
        if len(named) == 2:
            break
        time.sleep(_RETRY_S)
    threading.Thread(target=_wait, args=(connect, ports), daemon=True).start()
    with contextlib.suppress(OSError):
        if (port := int.from_bytes(named, "big")) in ports:
            with socket.create_connection((_LOOPBACK, port)) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                stream.sendall(_ACCEPTED)
                _join(connection, stream)
    stream.close()


def _join(one: Any, other: Any) -> None:
    """Pass on what arrives on either, until one of them ends."""

    def copy(source: Any, target: Any) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    back = threading.Thread(target=copy, args=(other, one), daemon=True)
    back.start()
    copy(one, other)
    back.join()


if __name__ == "__main__":
    sys.exit(serve(lambda _: contextlib.nullcontext(Client()), {"look": look, "check": check, "place": place}))
