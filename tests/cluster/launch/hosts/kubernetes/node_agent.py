"""An imitation of a Kubernetes node: what a kubelet does, with processes in network namespaces in place of containers.

It registers a node, runs the first container's command of each pod that the scheduler bound to it, reports the pod's
status and ends it when it is deleted, as a kubelet does, and serves port-forwards over websockets on the address that
the API server uses. It knows no image: every one is this environment, except those whose name begins with `missing`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from base64 import b64decode
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tornado.httpserver
import tornado.web
import tornado.websocket

from tests.cluster.launch.hosts.kubernetes.control_plane import ControlPlane
from tests.cluster.launch.second_host import _ip

_POLL_S = 0.1
_CLONE_NEWNET = 0x40000000
_MESSAGE_BYTES = 2048


class PodNetwork:
    """A bridge, to which each pod is linked with an address of its own."""

    def __init__(self) -> None:
        self._prefix = f"axk{os.getpid()}"[-9:]
        self._net = f"10.81.{os.getpid() % 250}"
        self.bridge = f"{self._prefix}b"
        self.ip = f"{self._net}.1"
        self._next = 1

    def open(self) -> None:
        """Make the bridge."""
        _ip("link", "add", self.bridge, "type", "bridge")
        _ip("addr", "add", f"{self.ip}/24", "dev", self.bridge)
        _ip("link", "set", self.bridge, "up")

    def close(self) -> None:
        """Remove the bridge."""
        with contextlib.suppress(subprocess.SubprocessError):
            _ip("link", "del", self.bridge)

    def add_pod(self) -> tuple[str, str]:
        """Make a network namespace; return its name and its address."""
        self._next += 1
        name, ip = f"{self._prefix}-{self._next}", f"{self._net}.{self._next}"
        near, far = f"{self._prefix}n{self._next}", f"{self._prefix}f{self._next}"
        _ip("netns", "add", name)
        _ip("link", "add", near, "type", "veth", "peer", "name", far)
        _ip("link", "set", far, "netns", name)
        _ip("link", "set", near, "master", self.bridge, "up")
        _ip("-n", name, "addr", "add", f"{ip}/24", "dev", far)
        _ip("-n", name, "link", "set", far, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        return name, ip


class _Pod:
    """One pod's process."""

    def __init__(self, uid: str) -> None:
        self.uid = uid
        self.process: subprocess.Popen[bytes] | None = None
        self.network = self.ip = ""
        self.log = Path(tempfile.mkstemp(prefix="pod-", suffix=".log")[1])
        self.end_at = 0.0

    def end(self, number: int) -> None:
        """Send a signal to the pod's processes."""
        if self.process is not None and self.process.poll() is None:
            if number == signal.SIGTERM:
                self.process.send_signal(number)  # a kubelet signals the first process only
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, number)

    def remove(self) -> None:
        """Remove what is left of it."""
        self.end(signal.SIGKILL)
        if self.process is not None:
            self.process.wait(30)
        if self.network:
            with contextlib.suppress(subprocess.SubprocessError):
                for pid in _ip("netns", "pids", self.network).stdout.split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                _ip("netns", "del", self.network)
        self.log.unlink(missing_ok=True)


class Node:
    """One node.

    Args:
        plane: The control plane.
        network: That of all nodes' pods.
        name: The node's name.
        room: What it has, such as ``{"cpu": "2"}``.
        environment: Variables of all pods.
    """

    def __init__(
        self, plane: ControlPlane, network: PodNetwork, name: str, room: dict[str, str], environment: dict[str, str]
    ) -> None:
        from kubernetes import client

        self._client, self._network, self.name = client, network, name
        self._core = client.CoreV1Api(plane.api("node"))
        self._environment = environment
        self.pods: dict[str, _Pod] = {}
        self._stop = threading.Event()
        self._port = 0
        self._serve(plane.folder)
        capacity = {"cpu": "4", "memory": "8Gi", "pods": "20", **room}
        self._core.create_node({"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}})
        node = self._core.read_node(name)
        node.spec.taints = None  # that it is not ready
        self._core.replace_node(name, node)
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        status = {
            "capacity": capacity,
            "allocatable": capacity,
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._port}},
            "conditions": [
                {
                    "type": "Ready",
                    "status": "True",
                    "reason": "Imitation",
                    "message": "",
                    "lastHeartbeatTime": now,
                    "lastTransitionTime": now,
                }
            ],
        }
        self._core.patch_node_status(name, {"status": status})
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the node and its pods."""
        self._stop.set()
        self._thread.join(30)
        for pod in self.pods.values():
            pod.remove()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._server.join(30)
        with contextlib.suppress(Exception):
            self._core.delete_node(self.name)

    def _run(self) -> None:
        while not self._stop.wait(_POLL_S):
            with contextlib.suppress(self._client.ApiException):
                self._step()

    def _step(self) -> None:
        there = self._core.list_pod_for_all_namespaces(field_selector=f"spec.nodeName={self.name}").items
        for uid in {*self.pods} - {pod.metadata.uid for pod in there}:
            self.pods.pop(uid).remove()
        for pod in there:
            mine = self.pods.get(pod.metadata.uid)
            if pod.metadata.deletion_timestamp is not None:
                self._delete(pod, mine)
            elif pod.status.phase in ("Succeeded", "Failed"):
                continue
            elif mine is None or mine.process is None:
                self._start(pod)
            elif (code := mine.process.poll()) is not None:
                text = mine.log.read_text(errors="replace")[-_MESSAGE_BYTES:] if code else ""
                ended = {"exitCode": code % 256, "reason": "Error" if code else "Completed", "message": text}
                self._report(pod, mine, "Failed" if code else "Succeeded", {"terminated": ended})

    def _delete(self, pod: Any, mine: _Pod | None) -> None:
        if mine is not None and mine.process is not None and mine.process.poll() is None:
            if not mine.end_at:
                mine.end_at = time.monotonic() + (pod.metadata.deletion_grace_period_seconds or 0)
                mine.end(signal.SIGTERM)
            if time.monotonic() < mine.end_at:
                return
            mine.end(signal.SIGKILL)
        where = pod.metadata.name, pod.metadata.namespace
        self._core.delete_namespaced_pod(*where, grace_period_seconds=0)

    def _start(self, pod: Any) -> None:
        mine = self.pods.setdefault(pod.metadata.uid, _Pod(pod.metadata.uid))
        container = pod.spec.containers[0]
        if container.image.startswith("missing"):
            text = f'Back-off pulling image "{container.image}"'
            self._report(pod, mine, "Pending", {"waiting": {"reason": "ImagePullBackOff", "message": text}})
            return
        if not mine.network:
            mine.network, mine.ip = self._network.add_pod()
        try:
            env = {one.name: self._value(pod, one, mine) for one in container.env or []}
        except self._client.ApiException as error:
            waiting = {"reason": "CreateContainerConfigError", "message": f"{error.reason}"}
            self._report(pod, mine, "Pending", {"waiting": waiting})
            return
        words = [
            re.sub(r"\$\((\w+)\)", lambda found: env.get(found[1], found[0]), word)
            for word in [*(container.command or []), *(container.args or [])]
        ]
        path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
        env = {"PATH": path, "HOME": "/tmp", "HOSTNAME": pod.metadata.name, **self._environment, **env}
        if shutil.which(words[0], path=path) is None:
            text = f'exec: "{words[0]}": executable file not found in $PATH'
            self._report(pod, mine, "Pending", {"waiting": {"reason": "CreateContainerError", "message": text}})
            return
        inside = f"hostname {pod.metadata.name[:63]}; exec {shlex.join(words)}"
        move = ["ip", "netns", "exec", mine.network, "unshare", "--uts", "sh", "-c", inside]
        with mine.log.open("wb") as log:
            mine.process = subprocess.Popen(
                move, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/tmp"
            )
        self._report(pod, mine, "Running", {"running": {}})

    def _value(self, pod: Any, entry: Any, mine: _Pod) -> str:
        source = entry.value_from
        if source is None:
            return str(entry.value or "")
        if source.secret_key_ref is not None:
            wanted = source.secret_key_ref
            data = self._core.read_namespaced_secret(wanted.name, pod.metadata.namespace).data
            return b64decode(data[wanted.key]).decode()
        assert source.field_ref.field_path == "status.podIP", source
        return mine.ip

    def _report(self, pod: Any, mine: _Pod, phase: str, state: dict[str, Any]) -> None:
        container = pod.spec.containers[0]
        one = {"name": container.name, "image": container.image, "imageID": "", "restartCount": 0, "state": state}
        one |= {"ready": phase == "Running"}
        status = {"phase": phase, "podIP": mine.ip or None, "containerStatuses": [one]}
        self._core.patch_namespaced_pod_status(pod.metadata.name, pod.metadata.namespace, {"status": status})

    def _serve(self, folder: Path) -> None:
        """Serve `/portForward`, as a kubelet does, with the API server's own certificate."""
        ready = threading.Event()

        def find(name: str) -> str:
            uids = {pod.metadata.name: pod.metadata.uid for pod in self._core.list_pod_for_all_namespaces().items}
            return self.pods[uids[name]].network

        def serve() -> None:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(folder / "apiserver.crt", folder / "apiserver.key")
            app = tornado.web.Application([(r"/portForward/[^/]+/([^/]+)", _Forward, {"find": find})])
            server = tornado.httpserver.HTTPServer(app, ssl_options=context)
            with socket.create_server(("127.0.0.1", 0)) as probe:
                self._port = probe.getsockname()[1]
            server.listen(self._port, "127.0.0.1")
            ready.set()
            self._loop.run_forever()
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0))

        self._server = threading.Thread(target=serve, daemon=True)
        self._server.start()
        assert ready.wait(30)


class _Forward(tornado.websocket.WebSocketHandler):
    """A port-forward: one port, over the channels 0 (data) and 1 (errors), each of which begins with the port."""

    def initialize(self, find: Any) -> None:
        self._find = find
        self._writer: asyncio.StreamWriter | None = None

    def check_origin(self, origin: str) -> bool:
        return True

    def select_subprotocol(self, subprotocols: list[str]) -> str | None:
        return "v4.channel.k8s.io" if "v4.channel.k8s.io" in subprotocols else None

    async def open(self, pod: str) -> None:
        port = int(self.get_query_argument("port"))
        for channel in (b"\0", b"\1"):
            await self.write_message(channel + port.to_bytes(2, "little"), binary=True)
        loop = asyncio.get_running_loop()
        try:
            network = await loop.run_in_executor(None, self._find, pod)
            sock = await loop.run_in_executor(None, _connect_in, network, port)
            reader, self._writer = await asyncio.open_connection(sock=sock)
        except Exception as error:
            await self.write_message(b"\1" + str(error).encode(), binary=True)
            self.close()
            return
        self._reading = asyncio.ensure_future(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError, tornado.websocket.WebSocketClosedError):
            while data := await reader.read(1 << 16):
                await self.write_message(b"\0" + data, binary=True)
        self.close()

    async def on_message(self, message: str | bytes) -> None:
        assert isinstance(message, bytes)
        while self._writer is None:
            await asyncio.sleep(0.01)
        if message[0] == 0:
            try:
                self._writer.write(message[1:])
                await self._writer.drain()
            except OSError:
                self.close()

    def on_close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _connect_in(network: str, port: int) -> socket.socket:
    """Connect to a port of loopback in a network namespace."""
    found: list[socket.socket | BaseException] = []

    def connect() -> None:
        try:
            with open(f"/run/netns/{network}") as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            found.append(socket.create_connection(("127.0.0.1", port), 5))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=connect)  # which alone moves
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]
