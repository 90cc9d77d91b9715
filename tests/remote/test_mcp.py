"""Tasks that an agent does with the tools of `axon-nb mcp` alone, through the client of the package `mcp`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from axon_nb.remote.tools import TOOLS, WRITING
from tests.doctor.command import ROOT
from tests.remote.conftest import Owner

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="the extra `mcp` is not installed")

Ask = Callable[..., Awaitable[dict[str, Any]]]


@contextlib.asynccontextmanager
async def tools(folder: Path, *options: str) -> AsyncIterator[Ask]:
    """A server and a client of it; the function calls a tool and returns its reply."""
    environment = {**os.environ, "AXON_NB_RUNTIME_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    import mcp  # for a second: only the worker that runs these tests needs it

    command = mcp.StdioServerParameters(
        command=sys.executable, args=["-m", "axon_nb.cli", "mcp", *options], env=environment
    )
    async with mcp.Client(mcp.stdio_client(command)) as client:
        listed = await client.list_tools()
        assert [each.name for each in listed.tools] == list(TOOLS)
        assert {each.name for each in listed.tools if not each.annotations.read_only_hint} == WRITING

        async def ask(tool: str, /, **arguments: Any) -> dict[str, Any]:
            reply = await client.call_tool(tool, arguments)
            assert reply.is_error == ("error" in reply.structured_content)
            return dict(reply.structured_content)

        yield ask


def by_tools(owner: Owner, task: Callable[[Ask], Awaitable[None]], *options: str) -> None:
    """Do a task with a server of its own."""

    async def session() -> None:
        async with tools(owner.folder, *options) as ask:
            await task(ask)

    asyncio.run(session())


async def finished(ask: Ask, code: str, **arguments: Any) -> dict[str, Any]:
    """Run a cell to its end; its result, with what it printed under ``printed``."""
    run = (await ask("run_start", code=code, timeout=60, **arguments))["run"]
    where = {"run": run, "cluster": arguments.get("cluster")}
    while not (reply := await ask("run_poll", wait_s=5, **where))["done"]:
        pass
    output = (await ask("run_tail", **where))["output"]
    return {**reply["result"], "printed": {group["ranks"]: group["text"] for group in output}}


def test_agent_that_may_only_look_finds_the_rank_that_hangs(owner: Owner) -> None:
    async def task(ask: Ask) -> None:
        (cluster,) = (await ask("clusters"))["clusters"]
        assert cluster["name"] == "lab"
        why = await ask("explain", cluster="lab")
        assert why["waited_for"] == "1"
        (group,) = (await ask("stacks", ranks="1"))["groups"]
        assert any(frame["code"] == "while not done_waiting():" for frame in group["frames"])
        assert (await ask("status"))["busy"] == "0-2"
        assert [each["name"] for each in (await ask("vars"))["variables"]]
        for name, arguments in {"interrupt": {}, "run_start": {"code": "1"}, "start": {"n": 2}}.items():
            assert (await ask(name, **arguments))["error"]["code"] == "refused"
        assert (await ask("status", cluster="nobody"))["error"]["code"] == "no_cluster"
        assert (await ask("diff", name="done_waiting"))["error"]["code"] == "busy"

    owner.hang()
    try:
        by_tools(owner, task)
    finally:
        owner.release()
    assert owner.script.value("h.result().ok") is True


def test_agent_that_may_run_debugs_by_tool_calls_alone(owner: Owner) -> None:
    async def task(ask: Ask) -> None:
        # which rank has which rank number
        numbered = await finished(ask, "print(rank)")
        assert numbered["printed"] == {"0": "0\n", "1": "1\n", "2": "2\n"}
        # name the shape that differs
        await finished(ask, "w = torch.ones(4, 3 if rank == 2 else 2)")
        (row,) = (row for row in (await ask("vars"))["variables"] if row["name"] == "w")
        assert row["ranks"] == "differs on rank 2"
        assert "4 × 3" in (await ask("diff", name="w"))["differences"][0]["values"]
        # name the value that differs
        await finished(ask, "v = torch.zeros(5)\nif rank == 1:\n    v[3] = 7.0")
        (where,) = (await ask("diff", name="v"))["differences"]
        assert (where["rank"], where["first at"], where["largest difference"]) == (1, "[3]", 7.0)
        # which rank failed first, and where
        failed = await finished(ask, "x = [1, 2]\nx[rank]\ndist.barrier()")
        assert (failed["cause"]["ranks"], failed["cause"]["type"], failed["cause"]["line"]) == ("2", "IndexError", 2)
        # correct it and go on: the variables are still there
        assert (await finished(ask, "x.append(3)\nprint(x[rank])\ndist.barrier()"))["state"] == "ok"
        # why did the ranks never finish
        stuck = await finished(ask, "if rank:\n    dist.barrier()")
        assert "barrier" in stuck["verdict"]
        assert stuck["state"] == "failed"
        assert (await ask("explain"))["last_result"]["verdict"] == stuck["verdict"]
        # do all ranks call the same collective
        mixed = await finished(ask, "t = torch.ones(2)\ndist.all_reduce(t) if rank else dist.broadcast(t, 0)")
        assert mixed["state"] == "failed"
        assert all(call in json.dumps(mixed) for call in ("all_reduce", "broadcast"))
        # give up on a cell
        run = (await ask("run_start", code="import time\nwhile True:\n    time.sleep(0.05)"))["run"]
        assert (await ask("run_poll", run=run, wait_s=0.2))["done"] is False
        assert (await ask("run_start", code="1"))["error"]["code"] == "busy"
        await ask("run_cancel", run=run)
        while not (reply := await ask("run_poll", run=run))["done"]:
            pass
        assert reply["result"]["state"] == "interrupted"
        # what takes the time
        await finished(ask, "for _ in range(20):\n    dist.all_reduce(torch.ones(10))")
        assert any(call["name"] == "all_reduce" for call in (await ask("timeline"))["calls"])
        # on some ranks only
        assert (await finished(ask, "print('here')", ranks="0,2"))["printed"] == {"0,2": "here\n"}
        # a long output is cut
        long = await finished(ask, "print('x' * 100_000)")
        assert sum(map(len, long["printed"].values())) < 8000
        # mistakes in the call
        assert (await ask("run_start", code="def"))["error"]["code"] == "bad_request"
        assert (await ask("run_start", code="1", ranks="9"))["error"]["code"] == "bad_request"
        assert (await ask("run_poll", run="nothing"))["error"]["code"] == "bad_request"

    owner.share(True)
    try:
        by_tools(owner, task, "--allow-run")
    finally:
        owner.share(False)


def test_agent_starts_a_cluster_and_replaces_a_rank_that_died(owner: Owner) -> None:
    async def task(ask: Ask) -> None:
        assert (await ask("start", n=2, name="agent", devices="cpu"))["num_ranks"] == 2
        # two clusters: which one
        assert "agent" in (await ask("status"))["error"]["message"]
        trained = "w = torch.full((3,), 5.0)\nmodel = torch.nn.Linear(2, 2)"
        assert (await finished(ask, trained, cluster="agent"))["state"] == "ok"
        # which rank died, of what
        killed = "import os, signal\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()"
        died = await finished(ask, killed, cluster="agent")
        assert died["state"] == "failed"
        assert died["cause"]["ranks"] == "1"
        assert "SIGKILL" in json.dumps(died["cause"])
        assert (await ask("explain", cluster="agent"))["waited_for"] == "1"
        # replace it, with the variables of a replica
        assert "1" in (await ask("repair", from_rank=0, cluster="agent"))["repaired"]
        again = await finished(ask, "dist.all_reduce(w)\nprint(w[0].item())", cluster="agent")
        assert again["printed"] == {"0-1": "10.0\n"}
        assert (await ask("stop"))["stopped"] == "agent"
        assert [cluster["name"] for cluster in (await ask("clusters"))["clusters"]] == ["lab"]

    by_tools(owner, task, "--allow-run")


@pytest.mark.timeout(900)
def test_agent_exports_a_notebook_and_plans_a_model(owner: Owner) -> None:
    async def task(ask: Ask) -> None:
        script = await ask("export", notebook=str(ROOT / "examples" / "01_quickstart.ipynb"))
        assert "init_process_group" in script["script"]
        planned = await ask("plan", model="7B", ranks=64, card="a100", top=2, max_cp=1)
        assert planned["fits"] is True
        assert (planned["layouts"][0]["ep"], planned["layouts"][0]["cp"]) == (1, 1)
        assert planned["layouts"][0]["dp"] * planned["layouts"][0]["tp"] * planned["layouts"][0]["pp"] == 64
        assert 16 < planned["layouts"][0]["memory_gib"] < 80
        assert "card" in (await ask("plan", model="125m", ranks=4, card="voodoo"))["error"]["message"]

    by_tools(owner, task, "--max-seconds", "600")
