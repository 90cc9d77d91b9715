"""The Jupyter server extension behind the panel: on a real server and the ranks of another program."""

from __future__ import annotations

import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from axon_nb.lab.server import ACTIONS
from tests.remote.conftest import Owner
from tests.support.browser.lab_server import LabServer

pytest.importorskip("jupyterlab", reason="needs JupyterLab: pip install jupyterlab")


class PlainServer(LabServer):
    """Jupyter's server without a front end."""

    module = "jupyter_server"

    def app_options(self, settings: Path) -> list[str]:
        """It has no application."""
        return []


@pytest.fixture(scope="module")
def server(owner: Owner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainServer]:
    """A server that sees the clusters of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AXON_NB_RUNTIME_DIR", str(owner.folder))
        with PlainServer(tmp_path_factory.mktemp("server") / "server") as running:
            yield running


def ok(server: PlainServer, method: str, path: str = "") -> Any:
    """The reply to a request that must work."""
    return server.request(method, f"axon-nb/clusters{path}")["ok"]


def error(server: PlainServer, method: str, path: str) -> tuple[str, str]:
    """The code and the message of a request that must fail."""
    found = server.request(method, f"axon-nb/clusters{path}")["error"]
    return found["code"], found["message"]


def test_clusters_are_listed(server: PlainServer) -> None:
    (cluster,) = ok(server, "GET")
    assert (cluster["name"], cluster["state"], cluster["num_ranks"]) == ("lab", "attached", 3)
    assert cluster["kernel"] is None, "a program started it"
    assert ok(server, "GET", f"/{cluster['id']}/status")["name"] == "lab"


def test_hang_is_explained_and_interrupted(server: PlainServer, owner: Owner) -> None:
    owner.hang()
    status = ok(server, "GET", "/lab/status")
    assert (status["busy"], status["dead"]) == ("0-2", "")
    assert status["verdict"].startswith("Waiting for rank 1 (line 2)")
    assert "while not done_waiting():" in ok(server, "POST", "/lab/stacks")["text"]
    assert error(server, "POST", "/lab/repair")[0] == "refused"
    assert ok(server, "POST", "/lab/interrupt")["text"] == "Interrupted the cell on ranks 0-2."
    owner.script.ok("h.wait(60)")
    idle = ok(server, "GET", "/lab/status")
    assert (idle["busy"], idle["verdict"]) == ("", "")
    assert idle["last_result"]["state"] == "interrupted"


def test_repair_needs_the_notebooks_permission(server: PlainServer, owner: Owner) -> None:
    code, message = error(server, "POST", "/lab/repair")
    assert code == "refused"
    assert "%distributed config share=on" in message
    owner.share(True)
    try:
        code, message = error(server, "POST", "/lab/repair")
        assert (code, message.partition(".")[0]) == ("bad_request", "All ranks are alive")
    finally:
        owner.share(False)


@pytest.mark.parametrize("action", sorted(ACTIONS))
def test_unknown_cluster_is_an_error(server: PlainServer, action: str) -> None:
    code, message = error(server, "POST", f"/absent/{action}")
    assert code in {"no_cluster", "failed"}
    assert "'absent'" in message


@pytest.mark.parametrize(("method", "path"), [("GET", ""), ("GET", "/lab/status"), ("POST", "/lab/stop")])
def test_requests_without_the_token_are_refused(server: PlainServer, method: str, path: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.request(method, f"axon-nb/clusters{path}", token="wrong")
    with refused.value:
        assert refused.value.code == 403
    assert ok(server, "GET", "/lab/status")["running"]
