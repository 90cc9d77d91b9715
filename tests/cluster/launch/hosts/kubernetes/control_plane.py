"""A Kubernetes control plane on loopback for tests: etcd, and the real API server, controller manager and scheduler.

Its nodes are imitations: `node_agent`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_FOLDER = "AXON_NB_TEST_KUBERNETES"
"""The environment variable with the folder of the programs; else they are looked for on the path."""
_PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
_CONTROLLERS = "job,garbagecollector,resourcequota,serviceaccount,serviceaccount-token,ttl-after-finished,namespace"
_START_S = 120.0
NAMESPACE = "team"


def _find(program: str) -> str | None:
    return shutil.which(program, path=os.pathsep.join(filter(None, [os.environ.get(_FOLDER), os.environ["PATH"]])))


def why_no_cluster() -> str:
    """Why there can be no control plane here; empty when there can."""
    missing = [name for name in (*_PROGRAMS, "openssl") if name != "openssl" and _find(name) is None]
    if shutil.which("openssl") is None:
        missing.append("openssl")
    return f"needs {', '.join(missing)} on the path or in {_FOLDER}" if missing else ""


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@dataclass(frozen=True)
class ControlPlane:
    """A running API server, and what is needed to use it."""

    server: str
    folder: Path

    def kubeconfig(self, user: str) -> str:
        """Path of the kubeconfig of a user: `admin`, `node` or `notebook`."""
        path = self.folder / f"{user}.yaml"
        cluster = {"server": self.server, "certificate-authority": str(self.folder / "apiserver.crt")}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": f"{user}-token"}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user, "namespace": NAMESPACE}}],
            "current-context": "test",
        }
        path.write_text(yaml.safe_dump(content))
        path.chmod(0o600)
        return str(path)

    def api(self, user: str = "admin") -> Any:
        """Kubernetes' client, as a user."""
        from kubernetes import config

        return config.new_client_from_config(self.kubeconfig(user))


@contextlib.contextmanager
def control_plane(folder: Path) -> Iterator[ControlPlane]:
    """A control plane, as long as it lasts."""
    with contextlib.ExitStack() as stack:
        key = str(folder / "accounts.key")
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True, timeout=60)
        tokens = folder / "tokens.csv"
        tokens.write_text(
            'admin-token,admin,1,"system:masters"\nnode-token,node,2,"system:masters"\nnotebook-token,notebook,3\n'
        )
        etcd, peers, port = (_free_port() for _ in range(3))
        plane = ControlPlane(f"https://127.0.0.1:{port}", folder)
        config = plane.kubeconfig("admin")

        def run(program: str, *options: str) -> subprocess.Popen[bytes]:
            log = stack.enter_context(open(folder / f"{program}.log", "wb"))
            path = _find(program)
            assert path is not None
            process = subprocess.Popen([path, *options], stdout=log, stderr=log, cwd=folder)
            stack.callback(process.wait, 60)
            stack.callback(process.kill)
            return process

        here = f"http://127.0.0.1:{etcd}"
        run(
            "etcd",
            f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls={here}",
            f"--advertise-client-urls={here}",
            f"--listen-peer-urls=http://127.0.0.1:{peers}",
        )
        server = run(
            "kube-apiserver",
            f"--etcd-servers={here}",
            f"--secure-port={port}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--cert-dir={folder}",
            f"--token-auth-file={tokens}",
            "--authorization-mode=RBAC",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-cluster-ip-range=10.96.0.0/24",
            "--kubelet-preferred-address-types=InternalIP",
            "--feature-gates=TTLAfterFinished=true",
        )
        _await_server(plane, server)
        run(
            "kube-controller-manager",
            f"--kubeconfig={config}",
            f"--controllers={_CONTROLLERS}",
            "--leader-elect=false",
            "--port=0",
            f"--secure-port={_free_port()}",
            f"--cert-dir={folder / 'manager'}",
            f"--service-account-private-key-file={key}",
            f"--root-ca-file={folder / 'apiserver.crt'}",
            "--feature-gates=TTLAfterFinished=true",
        )
        run(
            "kube-scheduler",
            f"--kubeconfig={config}",
            "--leader-elect=false",
            "--port=0",
            f"--secure-port={_free_port()}",
            f"--cert-dir={folder / 'scheduler'}",
        )
        yield plane


def _await_server(plane: ControlPlane, process: subprocess.Popen[bytes]) -> None:
    from kubernetes import client

    end = time.monotonic() + _START_S
    while True:
        assert process.poll() is None, (plane.folder / "kube-apiserver.log").read_text()[-2000:]
        try:
            client.CoreV1Api(plane.api()).list_namespace(_request_timeout=5)
            break
        except Exception:
            assert time.monotonic() < end, (plane.folder / "kube-apiserver.log").read_text()[-2000:]
            time.sleep(0.2)
    body = client.V1Namespace(metadata=client.V1ObjectMeta(name=NAMESPACE))
    client.CoreV1Api(plane.api()).create_namespace(body)
