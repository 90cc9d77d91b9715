"""The Jupyter server extension behind the panel: which clusters there are, what they do, and requests to them.

It asks the same sockets as `axon-nb status`, so that it works while the kernel is busy. Each reply has the form of
`axon_nb.records.commands`, ``{"ok": …}`` or ``{"error": …}``, with HTTP status 200: a notebook that does not reply is
a state that the panel shows, and not a line in the server's log every two seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from jupyter_server.utils import url_path_join
from tornado import web

from axon_nb.doctor.clusters import FoundCluster, find_clusters, stop_clusters
from axon_nb.errors import AxonError
from axon_nb.records.commands import EndpointError, ErrorCode
from axon_nb.remote.tools import NotebookClient, connect

if TYPE_CHECKING:
    from jupyter_server.serverapp import ServerApp

_LOOK_TIMEOUT_S = 5.0
_ACT_TIMEOUT_S = 20.0
_REPAIR_TIMEOUT_S = 600.0
_NAME = r"([\w.-]+)"


def list_clusters() -> list[dict[str, Any]]:
    """Return an entry for each live cluster of this user.

    `kernel` is the id of the kernel that uses it or used it last, as Jupyter's server has it; None for other programs.
    `id` is the name of its folder, which is unique.
    """
    return [_described(each) for each in find_clusters() if each.state != "dead"]


def _described(cluster: FoundCluster) -> dict[str, Any]:
    owner = str(cluster.run_dir.read_info().get("owner", ""))
    return {
        "id": cluster.folder,
        "name": cluster.name,
        "state": cluster.state,
        "num_ranks": cluster.num_ranks,
        "kernel": owner.removeprefix("kernel-") if owner.startswith("kernel-") else None,
    }


def read_status(cluster: str) -> dict[str, Any]:
    """Return what each rank of a cluster is doing; while a cell runs, also whom the others wait for.

    Args:
        cluster: Its name, or that of its folder.

    Raises:
        EndpointError: there is no such cluster, or its notebook does not reply.
    """
    notebook = connect(cluster)
    status = notebook.request("status", timeout_s=_LOOK_TIMEOUT_S)
    why = notebook.request("explain", timeout_s=_LOOK_TIMEOUT_S) if status["busy"] else None
    return {**status, "verdict": why["verdict"] if why and why["kind"] != "running" else ""}


def _ask(operation: str, timeout_s: float = _ACT_TIMEOUT_S) -> Callable[[str], dict[str, Any]]:
    """Return a function that sends a request without arguments to the notebook of a cluster."""

    def ask(cluster: str) -> dict[str, Any]:
        notebook: NotebookClient = connect(cluster)
        return notebook.request(operation, timeout_s=timeout_s)

    return ask


def _stop(cluster: str) -> dict[str, Any]:
    return {"text": " ".join(stop_clusters(cluster, force=True))}


ACTIONS = {
    "interrupt": _ask("interrupt"),
    "stacks": _ask("stacks"),
    "repair": _ask("repair", _REPAIR_TIMEOUT_S),
    "stop": _stop,
}
"""What the panel's buttons do to a cluster; each function blocks."""


class _Handler(APIHandler):
    """A handler of Jupyter's server; whoever may see or change kernels may see or change clusters."""

    auth_resource = "kernels"

    async def reply(self, function: Callable[..., Any], *arguments: str) -> None:
        """Send what a function returns, or its error; it runs in a thread."""
        try:
            body = {"ok": await asyncio.to_thread(function, *arguments)}
        except EndpointError as error:
            body = error.to_json()
        except AxonError as error:
            body = EndpointError(ErrorCode.FAILED, str(error)).to_json()
        self.finish(body)


class _Clusters(_Handler):
    @web.authenticated
    @authorized
    async def get(self) -> None:
        """List clusters."""
        await self.reply(list_clusters)


class _Status(_Handler):
    @web.authenticated
    @authorized
    async def get(self, cluster: str) -> None:
        """Show what each rank is doing."""
        await self.reply(read_status, cluster)


class _Action(_Handler):
    @web.authenticated
    @authorized
    async def post(self, cluster: str, action: str) -> None:
        """Do what a button says."""
        await self.reply(ACTIONS[action], cluster)


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": __name__}]


def _load_jupyter_server_extension(server: ServerApp) -> None:
    base = url_path_join(server.web_app.settings["base_url"], "axon-nb", "clusters")
    handlers = [
        (base, _Clusters),
        (url_path_join(base, _NAME, "status"), _Status),
        (url_path_join(base, _NAME, f"({'|'.join(ACTIONS)})"), _Action),
    ]
    server.web_app.add_handlers(".*$", handlers)
