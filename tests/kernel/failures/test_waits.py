"""Ranks that wait for each other, skip a call or disagree about it: explained, and ended without a death."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel.recovery.conditions import touch_when
from tests.support.kernel import FreshCluster, Kernel, Reply

MODEL = """%%distributed
import time
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput, parallelize_module

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
mesh = init_device_mesh("cpu", (world_size,))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
model(torch.ones(2, 16)).sum().backward()
gather = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True)
gathering = parallelize_module(nn.Linear(16, 16), mesh, gather)
"""

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


@pytest.fixture(scope="module")
def ranks() -> Iterator[Kernel]:
    """A kernel whose 4 ranks have an FSDP2 model with gradients."""
    with Kernel() as kernel:
        kernel.ok("%load_ext axon_nb\n%distributed start -n 4\nimport time, axon_nb")
        kernel.ok(MODEL)
        yield kernel


def late(folder: Path) -> str:
    """One line that waits until the test lets it go on."""
    return f"while not __import__('os').path.exists({str(folder / 'come')!r}): time.sleep(0.01)"


def notices(reply: Reply) -> list[str]:
    """The lines about who is waited for, as they were shown one after the other."""
    return [text for _, kind, text in reply.arrivals if "display_data" in kind]


def still_works(kernel: Kernel) -> None:
    reply = kernel.ok("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nmodel(torch.ones(2, 16))\nt.item()")
    assert reply.lines() == ["[ranks 0-3] 4.0"]


def test_slow_rank_is_named_while_awaited(ranks: Kernel, tmp_path: Path) -> None:
    request = ranks.submit(f"%%distributed\nif rank == 1:\n    {late(tmp_path)}\ndist.all_reduce(torch.ones(1))\n'met'")
    sentence = "Waiting for rank 1 (line 3): ranks 0,2-3 have been in all_reduce at line 4 for "
    ranks.wait_for_output(request, sentence)
    ranks.wait_for_output(request, sentence)  # it is kept up to date
    (tmp_path / "come").touch()
    reply = ranks.collect(request)
    assert reply.ok
    assert reply.lines() == ["[ranks 0-3] 'met'"]
    assert all(re.search(r" for ([3-9]|\d\d+)(\.\d)? s$", text) for text in notices(reply) if text)
    assert {data["text/plain"] for data in reply.displays} == {""}, "nothing of it stays"


def test_send_and_recv_wait_for_a_slow_peer(ranks: Kernel) -> None:
    code = "t = torch.ones(1) * rank\nif rank == 1: time.sleep(5)\nif rank == 0: dist.send(t, 1)\n"
    reply = ranks.ok(f"%%distributed\n{code}if rank == 1: dist.recv(t, 0)\nif rank == 2: dist.recv(t, 3)\n"
                     "if rank == 3:\n    time.sleep(5)\n    dist.send(t, 2)\nt.item()")  # fmt: skip
    assert {line.split()[-1] for line in reply.lines()} == {"0.0", "3.0"}


def test_new_group_waits_for_a_slow_rank(ranks: Kernel, tmp_path: Path) -> None:
    code = f"if rank == 1:\n    {late(tmp_path)}\nfresh = dist.new_group([0, 1])\nrank < 2"
    request = ranks.submit(f"%%distributed\n{code}")
    ranks.wait_for_output(request, "Waiting for rank 1 (line 3): rank 0 has been in new_group")
    (tmp_path / "come").touch()
    assert ranks.collect(request).ok
    still_works(ranks)


def test_partial_new_group_is_explained_with_fix(ranks: Kernel) -> None:
    reply = ranks.run("%%distributed\nif rank == 0:\n    dist.new_group([0, 1])")
    assert "rank 0 waits in new_group at line 3 for rank 1, which has finished the cell." in reply.traceback
    assert "`new_group()` must be called by every rank" in reply.traceback
    still_works(ranks)


@pytest.mark.parametrize("options", ["", " --quiet"])
def test_only_quiet_cells_do_not_name_slow_ranks(ranks: Kernel, tmp_path: Path, options: str) -> None:
    ranks.ok("t_sentences = set()")
    # The cell's loop shows one sentence before it asks for the next: with a second one, the first was due.
    current = "t_sentences.update(run.abort.slow for run in t_current.state.active_cells)"
    touch_when(ranks, f"{current} or len(t_sentences - {{''}}) >= 2", tmp_path / "come")
    reply = ranks.ok(f"%%distributed{options}\nif rank == 1:\n    {late(tmp_path)}\ndist.barrier()")
    assert all(text.startswith("Waiting for rank 1 ") for text in ranks.value("t_sentences - {''}"))
    assert bool(reply.displays) == (not options)


def test_status_names_awaited_ranks(ranks: Kernel, tmp_path: Path) -> None:
    ranks.ok(f"%%distributed --noblock --out background\nif rank == 1:\n    {late(tmp_path)}\ndist.barrier()")
    ranks.ok(
        "cluster, end, state = axon_nb.current_cluster(), time.time() + 60, ''\n"
        "while not state.startswith('waiting in barrier at line 4 for rank 1, for '):\n"
        "    assert time.time() < end, state\n    state = cluster.status()['state'][0]"
    )
    (tmp_path / "come").touch()
    ranks.ok("background.result()")


def test_stacks_show_every_rank_while_a_cell_is_stuck_or_in_c(ranks: Kernel) -> None:
    ranks.ok(
        "%%distributed --noblock --out background\nimport asyncio\ndef wait_for_it():\n    time.sleep(600)\n"
        "if rank == 1:\n    wait_for_it()\nelif rank == 2:\n    await asyncio.sleep(600)\nelif rank == 3:\n"
        "    x = torch.ones(2500, 2500)\n    while True: x @ x\n"
        "dist.all_reduce(torch.ones(1))"
    )
    ranks.ok(
        "cluster, end, text = axon_nb.current_cluster(), time.time() + 60, ''\n"
        "while 'x @ x' not in text or 'waiting in all_reduce' not in text or 'sleep(600)' not in text:\n"
        "    text = repr(cluster.stacks())\n    assert time.time() < end, text"
    )
    ranks.ok("%%distributed --noblock --out queued\n1")
    text = ranks.ok("%distributed stacks").stdout
    head = next(line for line in text.splitlines() if line.startswith("[rank 0]"))
    assert "waiting in all_reduce at line 12 for rank" in head, text
    assert "      dist.all_reduce(torch.ones(1))" in text
    assert "frames of torch" in text
    assert "[rank 1]" in text
    assert "line 4, in wait_for_it\n      time.sleep(600)" in text
    assert "      await asyncio.sleep(600)" in text
    assert "      while True: x @ x" in text
    assert ranks.ok("%distributed stacks --ranks 1").stdout.startswith("[rank 1] In [")
    ranks.ok("background.cancel()")
    assert ranks.run("background.result()").ename == "CellInterrupt"
    assert "not run, because the cell that it was queued behind" in ranks.run("queued.result()").evalue
    assert ranks.ok("%distributed stacks").lines() == ["[ranks 0-3] idle"]
    still_works(ranks)


ALONE = {
    "full_tensor": "weights = [p.full_tensor() for p in model.parameters()]",
    "get_model_state_dict": "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))",
    "clip_grad_norm_": "nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()",
    "redistribute": "model[0].weight.redistribute(mesh, [torch.distributed.tensor.Replicate()])",
    "the forward pass of a tensor-parallel layer": "gathering(torch.ones(1, 16))",
    "the forward pass of an FSDP model": "model(torch.ones(2, 16))",
}


@pytest.mark.parametrize("then", ["", "\ndist.barrier()"])
@pytest.mark.parametrize("function", ALONE)
def test_implicit_collective_on_one_rank_is_explained_with_fix(ranks: Kernel, function: str, then: str) -> None:
    reply = ranks.run(f"%%distributed\nimport torch.distributed.tensor\nif rank == 0:\n    {ALONE[function]}{then}")
    assert reply.ename == "CellError"
    assert f"rank 0 {'is' if then else 'waits'} in {function} at line 4" in reply.traceback
    quoted = function[0].upper() + function[1:] if " " in function else f"`{function}()`"
    assert f"{quoted} " in reply.traceback
    assert "on every rank" in reply.traceback
    still_works(ranks)


def test_ddp_forward_is_not_described_as_fsdp(ranks: Kernel) -> None:
    ranks.ok(
        "%%distributed\nfrom torch.nn.parallel import DistributedDataParallel\n"
        "t_ddp = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))"
    )
    reply = ranks.run("%%distributed\nif rank == 1:\n    t_ddp(torch.ones(4, 2))")
    assert "rank 1 waits in the forward pass of a DDP model at line 3" in reply.traceback
    assert "The forward pass of a DDP model synchronizes buffers with all ranks: run the same model" in reply.traceback
    still_works(ranks)


REFUSED = {
    "all_reduce": ("0,2", "dist.all_reduce(torch.ones(1))", "all_reduce at line 2 on the group of ranks 0-3"),
    "barrier": ("0", "dist.barrier()", "barrier at line 2 on the group of ranks 0-3 in a cell on rank 0"),
    "objects": ("1,3", "dist.all_gather_object([None] * 4, 1)", "all_gather_object at line 2"),
    "send": ("0", "dist.send(torch.ones(1), 1)", "Run the cell on ranks 0-1."),
    "recv": ("0", "dist.recv(torch.ones(1), 3)", "recv at line 2 with rank 3 in a cell on rank 0: rank 3 does not"),
    "waited later": ("0", "work = dist.all_reduce(torch.ones(1), async_op=True)\nwork.wait()", "ranks 1-3 do not run"),
    "full_tensor": ("0", "model[0].weight.full_tensor()", "full_tensor at line 2"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_default_group_on_some_ranks_is_rejected_before_waiting(ranks: Kernel, what: str) -> None:
    chosen, code, text = REFUSED[what]
    reply = ranks.run(f"%%distributed --ranks {chosen}\n{code}")
    assert reply.ename == "CellError"
    assert "UsageError" in reply.traceback
    assert text in reply.traceback
    assert ("Use `group=subgroup`" in reply.traceback) == (chosen in ("0,2", "1,3"))
    still_works(ranks)


def test_background_cells_may_communicate(ranks: Kernel) -> None:
    ranks.ok("%%distributed --ranks 0,2 --noblock --out first\ndist.all_reduce(t := torch.ones(1))\nt.item()")
    ranks.ok("%%distributed --ranks 1,3 --out second\ndist.all_reduce(t := torch.ones(1))\nt.item()")
    assert ranks.value("sum([*first.result().values.values(), *second.values.values()])") == 16.0


def test_call_of_one_cell_may_complete_in_the_next(ranks: Kernel, tmp_path: Path) -> None:
    ranks.ok("%%distributed --ranks 1-3\nt = torch.ones(1)\nwork = dist.all_reduce(t, async_op=True)")
    assert ranks.ok("%%rank 0\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()").lines() == ["[rank 0] 4.0"]
    assert ranks.ok("%%distributed --ranks 1-3\nwork.wait()\nt.item()").lines() == ["[ranks 1-3] 4.0"]
    ranks.ok(
        f"%%rank 1\nimport threading\ndef serve():\n    {late(tmp_path)}\n    dist.recv(torch.ones(1), 0)\n"
        "thread = threading.Thread(target=serve)\nthread.start()"
    )
    ranks.ok(f"%%rank 0\nopen({str(tmp_path / 'come')!r}, 'w').close()\ndist.send(torch.ones(1), 1)")
    ranks.ok("%%rank 1\nthread.join()")
    still_works(ranks)


def test_subgroup_is_the_group_of_the_cells_ranks(ranks: Kernel) -> None:
    total = "t = torch.ones(1)\ndist.all_reduce(t, group=subgroup)\n(t.item(), dist.get_process_group_ranks(subgroup))"
    for _ in range(2):
        assert ranks.ok(f"%%distributed --ranks 0,2\n{total}").lines() == ["[ranks 0,2] (2.0, [0, 2])"]
    assert ranks.ok(f"%%rank 1,2,3\n{total}").lines() == ["[ranks 1-3] (3.0, [1, 2, 3])"]
    assert ranks.ok(f"%%rank 3\n{total}").lines() == ["[rank 3] (1.0, [3])"]
    assert ranks.ok(f"%%distributed\n{total}").lines() == ["[ranks 0-3] (4.0, [0, 1, 2, 3])"]
    reply = ranks.run("%%distributed --ranks 0,2\nif rank == 0: 1 / 0\ndist.barrier(group=subgroup)")
    assert "ZeroDivisionError" in reply.traceback
    assert ranks.ok(f"%%distributed --ranks 0,2\n{total}").lines() == ["[ranks 0,2] (2.0, [0, 2])"]
    world = "from torch.distributed.distributed_c10d import _world"
    reply = ranks.ok(f"%%distributed\n{world}\nlen([name for name in _world.pg_names.values() if 'sub' in name])")
    assert reply.lines() == ["[ranks 0-1] 1", "[ranks 2-3] 2"], "each is made once"


def test_user_variable_named_subgroup_is_kept(ranks: Kernel) -> None:
    ranks.ok("%%distributed\nkept = globals().pop('subgroup', None)\nsubgroup = 'mine'")
    assert ranks.ok("%%rank 0,2\nsubgroup").lines() == ["[ranks 0,2] 'mine'"]
    ranks.ok("%%distributed\ndel subgroup")


def test_replaced_rank_joins_its_predecessors_subgroups(fresh_cluster: FreshCluster) -> None:
    total = "t = torch.ones(1)\ndist.all_reduce(t, group=subgroup)\nt.item()"
    kernel = fresh_cluster(3)
    # Ranks are then in different numbers of groups.
    kernel.ok("%%distributed\npair = dist.new_group([0, 1])")
    assert kernel.ok(f"%%distributed --ranks 0,2\n{total}").lines() == ["[ranks 0,2] 2.0"]
    kernel.run("%%rank 2\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    kernel.ok("%distributed repair")
    assert kernel.ok(f"%%distributed --ranks 0,2\n{total}").lines() == ["[ranks 0,2] 2.0"]
    assert kernel.ok(f"%%distributed --ranks 1,2\n{total}").lines() == ["[ranks 1-2] 2.0"]


def test_subgroup_waits_for_ranks_that_still_run_another_cell(ranks: Kernel) -> None:
    ranks.ok("%%rank 3 --noblock --out background\ntime.sleep(5)")
    reply = ranks.ok("%%distributed --ranks 0,3\ndist.barrier(group=subgroup)\n'met'")
    assert reply.lines()[-1] == "[ranks 0,3] 'met'"


SHAPES = {
    "all_reduce": ("dist.all_reduce(torch.ones(100_000 + 1000 * rank))", "100,000 float32"),
    "types": ("dist.all_reduce(torch.ones(4, dtype=torch.float64 if rank else torch.float32))", "4 float64"),
    "broadcast": ("dist.broadcast(torch.ones(14 - rank), 0)", "14 float32|56 bytes"),
    "roots": ("dist.broadcast(torch.ones(4), rank % 2)", "(4 float32|16 bytes) with root rank 1"),
    "all_gather": ("dist.all_gather([torch.ones(4 + rank) for _ in range(4)], torch.ones(4 + rank))", "float32|bytes"),
    "reduce_scatter": ("dist.reduce_scatter(torch.ones(4 + rank), [torch.ones(4 + rank)] * 4)", "float32"),
    "all_to_all_single": ("dist.all_to_all_single(torch.ones(4 + 4 * rank), torch.ones(4 + 4 * rank))", "bytes"),
    "gather": ("dist.gather(torch.ones(4 + rank), [torch.ones(4)] * 4 if rank == 0 else None)", "4 float32|16 bytes"),
    "scatter": ("dist.scatter(torch.ones(4 + rank), [torch.ones(4)] * 4 if rank == 0 else None)", "4 float32|bytes"),
    "send": ("if rank == 0: dist.send(torch.ones(10), 1)\nif rank == 1: dist.recv(torch.ones(4), 0)",
             "rank 0 sends 40 bytes, but rank 1 receives into 16 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("what", SHAPES)
def test_shape_mismatch_is_explained_and_no_rank_dies(ranks: Kernel, what: str) -> None:
    code, text = SHAPES[what]
    reply = ranks.run(f"%%distributed\n{code}")
    assert reply.ename == "CellError"
    assert re.search(text, reply.traceback)
    assert "at line 2: rank" in reply.traceback or what == "send"
    still_works(ranks)


def test_split_sizes_and_tagged_messages_are_unaffected(ranks: Kernel) -> None:
    code = (
        "own = torch.ones(4) * rank if rank else torch.zeros(7)\n"
        "splits = [4, 1, 1, 1] if rank == 0 else [1] * 4\nback = [4, 1, 1, 1] if rank == 0 else [1] * 4\n"
        "out = torch.zeros(sum(back))\ndist.all_to_all_single(out, own, back, splits)\n"
        "if rank == 0:\n    first = dist.isend(torch.ones(9), 1, tag=5)\n    dist.send(torch.ones(2), 1, tag=6)\n"
        "    first.wait()\n"
        "if rank == 1:\n    dist.recv(torch.ones(2), 0, tag=6)\n    dist.recv(torch.ones(9), 0, tag=5)\n"
        "sum(out.tolist())"
    )
    reply = ranks.ok(f"%%distributed\n{code}")
    assert reply.lines() == ["[ranks 0-3] 6.0"]


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
