"""Who waits for whom is told: a slow rank while it is waited for, and what can never end at once or within seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernel.driver import Kernel, Reply

MODEL = """%%distributed
import time
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
mesh = init_device_mesh("cpu", (world_size,))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
model(torch.ones(2, 16)).sum().backward()
"""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Kernel]:
    """A kernel whose 4 ranks have an FSDP2 model with gradients."""
    with Kernel() as kernel:
        kernel.ok("%load_ext axon_nb\n%distributed start -n 4\nimport time, axon_nb")
        kernel.ok(MODEL)
        yield kernel


def notices(reply: Reply) -> list[str]:
    """The lines about who is waited for, as they were shown one after the other."""
    return [text for _, kind, text in reply.arrivals if "display_data" in kind]


def still_works(kernel: Kernel) -> None:
    reply = kernel.ok("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nmodel(torch.ones(2, 16))\nt.item()")
    assert reply.lines() == ["[ranks 0-3] 4.0"]


def test_a_slow_rank_is_named_while_it_is_waited_for(ranks: Kernel) -> None:
    reply = ranks.ok(
        "%%distributed\nif rank == 1:\n    time.sleep(7)\ndist.all_reduce(torch.ones(1))\n'met'", timeout=60
    )
    assert reply.lines() == ["[ranks 0-3] 'met'"]
    shown = [text for text in notices(reply) if text]
    assert shown[0].startswith("Waiting for rank 1 (line 3): ranks 0,2-3 have been in all_reduce at line 4 for 3.")
    assert len(shown) > 1, "it is kept up to date"
    assert [data["text/plain"] for data in reply.displays] == [""], "nothing of it stays"


def test_a_slow_peer_is_waited_for_in_send_and_recv(ranks: Kernel) -> None:
    code = "t = torch.ones(1) * rank\nif rank == 1: time.sleep(5)\nif rank == 0: dist.send(t, 1)\n"
    reply = ranks.ok(f"%%distributed\n{code}if rank == 1: dist.recv(t, 0)\nif rank == 2: dist.recv(t, 3)\n"
                     "if rank == 3:\n    time.sleep(5)\n    dist.send(t, 2)\nt.item()")  # fmt: skip
    assert sorted(reply.lines()) == ["[ranks 0-1] 0.0", "[ranks 2-3] 3.0"]


def test_quiet_cells_do_not_name_slow_ranks(ranks: Kernel) -> None:
    reply = ranks.ok("%%distributed --quiet\nif rank == 1:\n    time.sleep(4)\ndist.barrier()", timeout=60)
    assert not reply.displays


def test_status_says_who_is_waited_for(ranks: Kernel) -> None:
    ranks.ok("%%distributed --noblock --out background\nif rank == 1:\n    time.sleep(8)\ndist.barrier()")
    ranks.ok(
        "cluster, end, state = axon_nb.current_cluster(), time.time() + 20, ''\n"
        "while 'waiting' not in state and time.time() < end: state = cluster.status()['state'][0]"
    )
    assert ranks.value("state").startswith("waiting in barrier at line 4 for rank 1, for ")
    ranks.ok("background.result()")


def test_stacks_show_every_rank_while_a_cell_is_stuck_or_in_c(ranks: Kernel) -> None:
    ranks.ok(
        "%%distributed --noblock --out background\nimport asyncio\ndef wait_for_it():\n    time.sleep(600)\n"
        "if rank == 1:\n    wait_for_it()\nelif rank == 2:\n    await asyncio.sleep(600)\nelif rank == 3:\n"
        "    x = torch.ones(6000, 6000)\n    while True: x @ x\n"
        "dist.all_reduce(torch.ones(1))"
    )
    ranks.ok(
        "cluster, end, text = axon_nb.current_cluster(), time.time() + 20, ''\n"
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
    assert ranks.run("background.result()", timeout=60).ename == "CellInterrupt"
    ranks.ok("queued.result()")
    assert ranks.ok("%distributed stacks").lines() == ["[ranks 0-3] idle"]
    still_works(ranks)
