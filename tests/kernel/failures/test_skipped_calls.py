"""Calls that some ranks skip or make differently: one sentence, on both backends, and all ranks survive."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.support.kernel import Kernel

CASES = {
    "an asynchronous call that nobody waits for": (
        "if rank == 0:\n    dist.all_reduce(torch.ones(1), async_op=True)\ndist.barrier()",
        r"all_reduce at line 3.*barrier at line 4|barrier at line 4.*all_reduce (at line 3|with `async_op=True`)",
    ),
    "an asynchronous call and a later one on the same line": (
        "if rank == 0: dist.all_reduce(torch.ones(1), async_op=True); dist.barrier()\nelse: dist.barrier()",
        r"all_reduce at line 2.*barrier at line 3|barrier at line 3.*all_reduce (at line 2|with `async_op=True`)",
    ),
    "monitored_barrier on one rank": ("if rank == 0:\n    dist.monitored_barrier()", r"monitored_barrier at line 3"),
    "monitored_barrier on all ranks but rank 0": (
        "if rank:\n    dist.monitored_barrier()",
        r"monitored_barrier at line",
    ),
    "all in recv from anyone": ("dist.recv(torch.ones(1))", r"ranks 0-1 wait in recv at line 2 for a message from any"),
    "recv from anyone beside a collective": (
        "if rank == 0:\n    dist.irecv(torch.ones(1)).wait()\nelse:\n    dist.all_reduce(torch.ones(1))",
        r"rank 0 waits in recv at line 3 for a message from any rank, and no rank sends one; rank 1 waits in all_red",
    ),
    "splits that do not agree": (
        (
            "out, own, splits = torch.zeros(4), torch.ones(4), [[1, 3], [2, 2]][rank]\n"
            "dist.all_to_all_single(out, own, splits, splits)"
        ),
        r"rank 0 sends 12 bytes to rank 1|all_to_all.*12 bytes|12 .*8",
    ),
    "different reductions": (
        "dist.all_reduce(torch.ones(1), op=[dist.ReduceOp.MAX, dist.ReduceOp.SUM][rank])",
        r"MAX.*SUM|SUM.*MAX",
    ),
    "all_gather of different sizes": (
        "dist.all_gather([torch.zeros(2 + rank) for _ in range(2)], torch.zeros(2 + rank))",
        r"all_gather.*[23] float32.*[23] float32|all_gather.*(8|12) bytes.*(8|12) bytes",
    ),
    "different operations of different sizes": (
        (
            "if rank == 0:\n    dist.all_gather_into_tensor(torch.zeros(200), torch.zeros(100))\n"
            "else:\n    dist.reduce_scatter_tensor(torch.zeros(3000), torch.zeros(6000))"
        ),
        r"all_gather.*reduce_scatter|reduce_scatter.*all_gather",
    ),
    "a batch of sends and receives with one receive missing": (
        (
            "t, u = torch.ones(8_000_000), torch.zeros(8_000_000)\nops = [dist.P2POp(dist.isend, t, 1 - rank)]\n"
            "if rank: ops.append(dist.P2POp(dist.irecv, u, 0))\nfor work in dist.batch_isend_irecv(ops): work.wait()"
        ),
        r"rank 1 waits in .*rank 0",
    ),
}


@pytest.fixture(scope="module", params=["gloo", "shm"])
def pair(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """A kernel with 2 ranks."""
    with Kernel(env={"AXON_NB_CPU_BACKEND": request.param}) as kernel:
        kernel.ok("%load_ext axon_nb\n%distributed start -n 2")
        kernel.ok("%%distributed\nkept = rank")
        yield kernel


@pytest.mark.parametrize("what", CASES)
def test_call_mismatch_is_explained_in_one_sentence(pair: Kernel, what: str) -> None:
    code, sentence = CASES[what]
    reply = pair.run(f"%%distributed\n{code}")
    assert reply.status == "error", reply.stdout
    assert re.search(sentence, reply.traceback), reply.traceback
    after = pair.ok("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item(), kept - rank")
    assert after.lines() == ["[ranks 0-1] (2.0, 0)"]


def test_partial_ddp_backward_is_explained_with_fix(pair: Kernel) -> None:
    pair.ok("%%distributed\nt_ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))")
    step = "t_ddp(torch.ones(1, 2)).sum().backward()"
    place = "rank 0 waits in the backward pass of a DDP model at line "
    for cell, why in (
        (f"%%distributed --ranks 0\n{step}", "2 for rank 1, which does not run this cell."),
        (f"%%distributed\nif rank == 0:\n    {step}", "3 for rank 1, which has finished the cell."),
    ):
        reply = pair.run(cell)
        assert place + why in reply.traceback
        assert "sums gradients over all ranks of its process group: run it on each of them, or build" in reply.traceback
    reply = pair.ok(f"%%distributed\nt_ddp.zero_grad()\n{step}\nt_ddp.module.bias.grad.tolist()")
    assert reply.lines() == ["[ranks 0-1] [1.0, 1.0]"]


def test_monitored_barrier_names_missing_ranks_on_a_cluster(pair: Kernel) -> None:
    code = "from datetime import timedelta\nimport time\nif rank: time.sleep(3)\n"
    reply = pair.run(f"%%distributed\n{code}dist.monitored_barrier(timeout=timedelta(seconds=0.5))")
    assert re.search(r"(?i)rank 1 (failed|did not)", reply.traceback), reply.traceback


ATTEMPT = """%%distributed
import warnings
from axon_nb.engine.frames import group_operations
warnings.simplefilter("ignore")
world, one, two, kinds = dist.group.WORLD, torch.ones(1), [torch.zeros(1), torch.zeros(1)], set()
def attempt(call):
    try:
        call()
    except Exception as error:
        kinds.update(kind.__name__ for kind in type(error).__mro__[:-3])
"""
FAILING = """if rank == 0:
    for name in group_operations():
        attempt(lambda: getattr(world, name)(wrong=1))
    for name in ("allgather", "gather", "reduce", "reduce_scatter", "scatter"):
        attempt(lambda: getattr(world, name)([], []))
    for call in (
        lambda: dist.all_gather([*two, one], one),
        lambda: dist.all_gather(two, torch.ones(2, 2)),
        lambda: dist.all_gather_into_tensor(torch.ones(5), one),
        lambda: dist.all_reduce(torch.ones(3).to_sparse(), op=dist.ReduceOp.MAX),
        lambda: dist.all_reduce(torch.nested.nested_tensor([torch.ones(2)])),
        lambda: dist.all_reduce(one.to("meta")),
        lambda: dist.broadcast(one.to("meta"), 0, async_op=True).wait(),
        lambda: dist.all_to_all(two, [*two, one]),
        lambda: dist.all_to_all_single(one, torch.ones(5), [1], [5]),
        lambda: dist.gather(one, [one], dst=0),
        lambda: dist.reduce_scatter(one, [*two, one]),
        lambda: dist.reduce_scatter_tensor(one, torch.ones(5)),
        lambda: dist.scatter(one, [*two, one], src=0),
        lambda: dist.scatter(one.to_sparse(), [one, one], src=0, async_op=True).wait(),
    ):
        attempt(call)
"""
RIGHT = """failing = []
if rank == 0:
    attempt(lambda: failing.append(dist.scatter(one.to_sparse(), [one, one], src=0, async_op=True)))
work = dist.all_reduce(one, async_op=True)
for late in failing:
    attempt(late.wait)
work.wait()
dist.scatter(two[0], [one, one] if rank == 0 else None, src=0)
dist.all_to_all_single(torch.zeros(2), torch.ones(2), [1, 1], [1, 1])
dist.reduce_scatter_tensor(two[1], torch.ones(2))
works = [dist.broadcast(torch.ones(2), 1, async_op=True), dist.all_gather(two, one, async_op=True)]
for work in works:
    work.wait()
one.item(), *(t.item() for t in two)
"""


def test_calls_that_fail_before_they_begin_do_not_count(pair: Kernel) -> None:
    assert pair.ok(ATTEMPT + RIGHT).lines() == ["[ranks 0-1] (2.0, 2.0, 2.0)"]
    reply = pair.run(f"{ATTEMPT}{FAILING}if rank == 1:\n    dist.barrier()")
    assert re.search(r"rank 1 waits in barrier at line \d+ for rank 0, which has finished the cell", reply.traceback)
    after = pair.ok("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nprint(t.item(), kept - rank, *kinds)").stdout
    assert re.findall(r"2.0 0", after) == ["2.0 0", "2.0 0"]
    assert {"IndexError", "RuntimeError", "TypeError"} <= set(after.split())


STORES = """%%distributed
import tempfile, torch.distributed.distributed_c10d as c10d
from datetime import timedelta
from torch.distributed import rpc
port = [None]
if rank == 0:
    server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60))
    port = [server.port]
dist.broadcast_object_list(port, 0)
tcp = server if rank == 0 else dist.TCPStore("127.0.0.1", port[0], None, False, timedelta(seconds=60))
name = [tempfile.mktemp()]
dist.broadcast_object_list(name, 0)
stores = {"tcp": tcp, "prefix": dist.PrefixStore("a", tcp), "file": dist.FileStore(name[0], 2)}
stores["own"] = c10d._get_default_store()
"""
MET = """
import time
got = []
for store in stores.values():
    if rank == 0:
        got += [store.get("k"), *store.multi_get(["k", "l"])]
        store.wait(["k"], timedelta(seconds=20))
        try:
            store.wait(["never"], timedelta(seconds=0.1))
        except dist.DistStoreError:
            got.append("timeout")
    else:
        time.sleep(0.1)
        store.set("k", "v")
        store.set("l", "w")
"""
RPC = """
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
got.append(rpc.rpc_sync(f"worker{1 - rank}", max, args=(rank, 5)))
rpc.shutdown()
"""


def test_waits_of_stores_and_of_rpc(pair: Kernel) -> None:
    got = f"{' '.join(['v v w timeout'.replace('v', str(b'v')).replace('w', str(b'w'))] * 4)} 5"
    assert pair.ok(f"{STORES}{MET}{RPC}print(*got)").lines() == [f"[rank 0] {got}", "[rank 1] 5"]
    for wait in (
        "tcp.wait(['x'])",
        "stores['prefix'].get('x')",
        "stores['file'].multi_get(['x'])",
        "stores['own'].wait(['x'])",
        "dist.HashStore().get('x')",
        "dist.TCPStore('127.0.0.1', 1, 2, False)",
        "tcp.queue_pop('q')",
    ):
        request = pair.submit(f"%%distributed\nprint('go', flush=True)\n{wait}")
        pair.wait_for_output(request, "go", ranks=range(2))
        pair.interrupt()
        reply = pair.collect(request)
        assert "CellInterrupt" in reply.ename, reply.traceback
        after = pair.ok("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item(), kept - rank, tcp.add('n', 0)")
        assert after.lines() == ["[ranks 0-1] (2.0, 0, 0)"]
    reply = pair.run("%%distributed\nif rank == 0:\n    rpc.init_rpc('lonely', rank=0, world_size=2)")
    assert "rank 0 waits in init_rpc at line 3 for rank 1, which has finished the cell" in reply.traceback
    after = pair.ok(f"%%distributed\ngot = []\n{RPC}dist.all_reduce(t)\nt.item(), kept - rank, *got")
    assert after.lines() == ["[ranks 0-1] (4.0, 0, 5)"]
