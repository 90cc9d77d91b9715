"""Ranks that wait for a failed one are released, and all objects still work; dead ranks are replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernel.recovery.conditions import MEET, meet_when, waiting
from tests.kernel.recovery.step_parity import PLACE, are_together, begin_together, place_everywhere, step_differences
from tests.kernel.recovery.trained_model import SETUP
from tests.support.kernel import FreshCluster, Kernel
from tests.support.processes import until

RAISES = {
    "before the step": "if rank == 1: raise ValueError('bug')\nstep()",
    "in a barrier": "if rank == 2: 1 / 0\ndist.barrier()",
    "in a loop of all_reduce": (
        "for i in range(500):\n    if rank == 3 and i == 5: {}['x']\n    dist.all_reduce(torch.ones(99999))"
    ),
    "in recv": "if rank == 0: raise ValueError('bug')\nif rank == 1: dist.recv(torch.ones(3), 0)\nelse: dist.barrier()",
    "in an object collective": "if rank == 1: raise ValueError('bug')\ndist.all_gather_object([None] * 4, rank)",
    "in new_group": "if rank == 2: raise ValueError('bug')\ndist.new_group([0, 1, 2, 3])\ndist.barrier()",
    "in a subgroup": (
        "if rank == 2: raise ValueError('bug')\nif rank in (1, 3): dist.all_reduce(torch.ones(1), group=rest)"
    ),
    "in reduce_scatter": (
        "if rank == 0: raise ValueError('bug')\ndist.reduce_scatter_tensor(torch.ones(1), torch.ones(4))"
    ),
    "in FSDP2's all-gather": "if rank == 3: raise ValueError('bug')\nsharded(torch.randn(8, 32))",
    "swallowed by a retry": (
        "if rank == 1: raise ValueError('bug')\nfor _ in range(5):\n"
        "    try:\n        dist.barrier()\n    except Exception:\n        pass"
    ),
}


@pytest.fixture(scope="module")
def trained() -> object:
    """A kernel whose 4 ranks have DDP, FSDP2 and subgroups that are in use."""
    with Kernel() as kernel:
        kernel.load_and_warm_up()
        kernel.ok("%distributed start -n 4")
        kernel.ok(SETUP)
        kernel.ok(f"%%distributed\n{MEET}\nstep()")
        kernel.ok(PLACE)
        yield kernel


@pytest.mark.parametrize("where", RAISES)
def test_failed_rank_releases_waiting_ranks(trained: Kernel, where: str) -> None:
    reply = trained.run(f"%%distributed\n{RAISES[where]}")
    assert reply.ename == "CellError"
    assert any(name in reply.traceback for name in ("ValueError: bug", "ZeroDivisionError", "KeyError: 'x'"))
    after = trained.ok("%%distributed\nstep()\nprint(len(weights()), 'fine')\nprint(groups_work())")
    assert "[ranks 0-3] 2 fine" in after.lines()
    assert "[rank 0] 2.0" in after.lines()


def test_waiting_ranks_report_their_call_and_line(trained: Kernel, tmp_path: Path) -> None:
    met = tmp_path / "met"
    meet_when(trained, waiting("barrier", 0, 1, 3), met)
    code = f"if rank == 2:\n    t_meet({str(met)!r}); raise ValueError('bug')\ndist.barrier()"
    reply = trained.run(f"%%distributed\n{code}")
    assert reply.traceback.startswith("[rank 2]")
    assert "[ranks 0-1,3] waited in barrier at line 4" in reply.traceback


INTERRUPTS = {
    "training": "while True: step()",
    "python": "while True: pass",
    "a stuck barrier": "if rank: dist.barrier()\nelse:\n    time.sleep(600)",
    "recv": "if rank == 0: dist.recv(torch.ones(1), 1)\nelse: dist.barrier()",
}


@pytest.mark.parametrize("what", INTERRUPTS)
def test_stop_button_aborts_any_cell_and_keeps_all_state(trained: Kernel, what: str) -> None:
    begin_together(trained)
    request = trained.submit(f"%%distributed\nprint('go', flush=True)\n{INTERRUPTS[what]}")
    trained.wait_for_output(request, "go")
    trained.interrupt()
    reply = trained.collect(request)
    assert reply.ename == "CellInterrupt"
    # Only training can leave ranks a step apart, where a machine is too busy for the cut; the cell says so then.
    apart = step_differences(reply)
    assert not apart or what == "training", apart
    places = place_everywhere(trained)
    assert are_together(places) or apart, places
    begin_together(trained, reply)
    assert "[ranks 0-3] True" in trained.ok("%%distributed\nstep()\nlen(weights()) == 2").lines()


def test_weights_after_a_failed_step_match_an_undisturbed_run(fresh_cluster: FreshCluster) -> None:
    kernel = fresh_cluster(2)
    setup = SETUP.replace("dist.new_group([0, 1]), dist.new_group([1, 2, 3])", "None, None")
    sums = []
    for broken in (False, True):
        kernel.ok(setup)
        if broken:
            hooks = {
                "forward": "ddp.module.layers[1].register_forward_pre_hook(boom)",
                "backward": "sharded.layers[1].register_full_backward_hook(boom)",
            }
            for hook in hooks.values():
                reply = kernel.run(
                    "%%distributed\ndef boom(*args):\n    handle.remove()\n"
                    "    if rank == 1: raise ValueError('bug')\n"
                    f"handle = {hook}\nmodel = ddp if 'ddp' in {hook!r} else sharded\n"
                    "model(torch.randn(8, 32)).sum().backward()"
                )
                assert "ValueError: bug" in reply.traceback
        kernel.ok("%%distributed\nfor _ in range(3): step()")
        sums.append(kernel.ok("%%distributed\nprint(*[value.hex() for value in weights()])").lines())
    assert sums[0] == sums[1]


DEADLOCKS = {
    "a rank that finished": (
        waiting("all_reduce", 0, 2, 3),
        "if rank != 1:\n    dist.all_reduce(torch.ones(1))\nelse: t_meet(MET)",
        "ranks 0,2-3 wait in all_reduce at line 3 for rank 1, which has finished the cell.",
    ),
    "a rank that skips": (
        waiting("barrier", 0, 1, 3),
        "for i in range(3):\n    if rank == 2 and i == 1: t_meet(MET); continue\n    dist.barrier()",
        "ranks 0-1,3 wait in barrier at line 4 for rank 2, which has finished the cell.",
    ),
    "a ring of recv": (
        "",
        "dist.recv(torch.ones(1), (rank + 1) % 4)",
        "; ".join(f"rank {r} waits in recv at line 2 for rank {(r + 1) % 4}" for r in range(4)) + ".",
    ),
    "two groups in opposite order": (
        "",
        """first, second = (pair, dist.group.WORLD) if rank == 0 else (dist.group.WORLD, pair)
dist.barrier(group=first)
if rank < 2: dist.barrier(group=second)""",
        "rank 0 waits in barrier at line 3 for rank 1",
    ),
    "different collectives": (
        waiting("all_reduce", 1, 2, 3),
        "if rank == 0:\n    t_meet(MET); dist.barrier()\nelse:\n    dist.all_reduce(torch.ones(1))",
        "Collective mismatch: rank 0 is in barrier at line 3, rank",
    ),
}
"""When the faulty rank continues, if it has to wait for the others; the cell; the report."""


@pytest.mark.parametrize("what", DEADLOCKS)
def test_deadlock_is_explained_and_aborted(trained: Kernel, tmp_path: Path, what: str) -> None:
    moment, code, sentence = DEADLOCKS[what]
    met = tmp_path / "met"
    if moment:
        meet_when(trained, moment, met)
    reply = trained.run(f"%%distributed\n{code.replace('MET', repr(str(met)))}")
    assert reply.ename == "CellError"
    assert sentence in reply.traceback
    assert "[ranks 0-3] 4.0" in trained.ok("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()").lines()


def test_slow_rank_is_never_aborted(trained: Kernel) -> None:
    reply = trained.ok("%%distributed\nif rank == 3:\n    time.sleep(3)\ndist.barrier()\n'met'")
    assert reply.lines() == ["[ranks 0-3] 'met'"]


def test_partially_created_group_blocks_nobody(trained: Kernel) -> None:
    trained.ok("%%distributed\nlame = dist.new_group([1, 2])\nif rank == 1: dist.destroy_process_group(lame)")
    reply = trained.run("%%distributed\nif rank == 3: raise ValueError('bug')\ndist.barrier()")
    assert "ValueError: bug" in reply.traceback
    assert "[rank 0] 2.0" in trained.ok("%%distributed\nstep()\nprint(groups_work())").lines()
    reply = trained.run("%%distributed\nif rank == 2: dist.all_reduce(torch.ones(1), group=lame)")
    assert "no longer exists on all of its ranks. Recreate it with `dist.new_group`" in reply.traceback


def test_rank_that_failed_before_new_group_blocks_nobody(trained: Kernel) -> None:
    """The others connect to it in C++; left alone they would stand between the next rebuild and the store."""
    for failing in range(4):
        reply = trained.run(f"%%distributed\nif rank == {failing}: 1 / 0\ndist.new_group([0, 1, 2, 3])")
        assert "ZeroDivisionError" in reply.traceback
    assert "[rank 0] 2.0" in trained.ok("%%distributed\nprint(groups_work())").lines()


def test_late_abort_does_not_affect_new_groups(trained: Kernel) -> None:
    trained.ok(
        "%%distributed\nfrom axon_nb.engine.groups.creation import all_groups\n"
        "late = [group.connection_closer() for group in all_groups()]"
    )
    assert "bug" in trained.run("%%distributed\nif rank == 3: raise ValueError('bug')\ndist.barrier()").traceback
    reply = trained.ok("%%distributed\nfor close in late: close()\nstep()\nprint(groups_work())")
    assert "[rank 0] 2.0" in reply.lines()


def test_connections_of_abandoned_groups_are_closed(trained: Kernel) -> None:
    count = "%%distributed --out fds\nimport os\nlen(os.listdir('/proc/self/fd'))"

    def counted() -> dict[int, int]:
        trained.ok(count)
        return dict(trained.value("fds.values"))

    before, seen = counted(), []
    for _ in range(24):
        trained.run("%%distributed\nif rank == 2: 1 / 0\nif rank in (1, 3): dist.barrier(group=rest)")

    def closed() -> bool:
        seen.append(counted())  # some are closed a moment later, by the threads that used them
        return all(seen[-1][rank] <= before[rank] + 8 for rank in range(4))

    assert until(closed), (before, seen[-1])


def test_repair_replaces_a_dead_rank_and_keeps_the_others_state(fresh_cluster: FreshCluster) -> None:
    kernel = fresh_cluster(4)
    kernel.ok(SETUP)
    _replace_rank_2(kernel)


def _replace_rank_2(trained: Kernel) -> None:
    trained.ok("%%distributed\nkept = rank * 11")
    reply = trained.run(
        "%%distributed\nimport os, signal\nif rank == 2:\n    os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()"
    )
    assert "rank 2 was killed by SIGKILL" in reply.traceback
    assert "`%distributed repair`" in reply.traceback
    alone = trained.run("%%distributed --ranks 0,1\ndist.barrier()")
    assert "rank 2 is dead" in alone.traceback
    replaced, lost = trained.ok("%distributed repair").lines()
    assert replaced == "Replaced rank 2: new and empty. All other ranks keep their state."
    assert lost.startswith("Only rank 2 held its part of `sharded` (6 of 6 parameters, ")
    reply = trained.ok("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nprint(t.item())\nglobals().get('kept')")
    assert "[ranks 0-3] 4.0" in reply.lines()
    assert [line for line in sorted(reply.lines()) if "4.0" not in line] == ["[rank 0] 0", "[rank 1] 11", "[rank 3] 33"]
    fresh_group = "g = dist.new_group([0, 1, 2, 3])\nt = torch.ones(1)\ndist.all_reduce(t, group=g)\nt.item()"
    assert trained.ok(f"%%distributed\n{fresh_group}").lines() == ["[ranks 0-3] 4.0"]
