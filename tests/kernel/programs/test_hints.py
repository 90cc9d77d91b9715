"""Hints on what programs of others run into."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.kernel import Kernel

ONLY_HERE = {
    "a_value = 5": "Only the notebook has `a_value`: `%push a_value` sends it to the ranks.",
    "def a_function(): pass": "run its definition in a `%%distributed` cell, or `%push a_function`.",
    "import colorsys as a_module": "Only the notebook has imported `a_module`: import it in a `%%distributed` cell.",
}


@pytest.mark.parametrize("code", ONLY_HERE)
def test_notebook_only_name_gets_a_push_hint(kernel: Kernel, code: str) -> None:
    kernel.ok(code)
    name = next(word for word in code.replace("(", " ").split() if word.startswith("a_"))
    assert ONLY_HERE[code] in kernel.run(f"%%distributed\n{name}").traceback
    assert "Only the notebook" not in kernel.run(f"%%distributed\n{name}_of_nobody").traceback


def test_function_can_be_pushed(kernel: Kernel) -> None:
    kernel.ok("def pushed(x):\n    return 2 * x\n%push pushed")
    assert kernel.ok("%%rank 1\npushed(4)").lines() == ["[rank 1] 8"]


def test_pulled_call_that_communicates_with_other_ranks(kernel: Kernel) -> None:
    kernel.ok("%%distributed\ndef total():\n    t = torch.ones(1)\n    dist.all_reduce(t)\n    return t.item()")
    reply = kernel.run("%pull total() --ranks 0 --as summed")
    assert "rank 0 waited in all_reduce at line 1 (total, Cell In[" in reply.evalue
    assert "'total()' communicates with ranks that do not run it: leave --ranks out" in reply.traceback
    kernel.ok("%pull total() --as summed")
    assert kernel.value("summed") == dict.fromkeys(range(4), 4.0)


def test_variables_of_a_launcher_set_by_a_pasted_recipe(kernel: Kernel) -> None:
    recipe = "import os\nos.environ.update(RANK='0', LOCAL_RANK='0', WORLD_SIZE='1')"
    printed = kernel.ok(f"%%distributed --ranks 0-1\n{recipe}").stdout
    assert "[rank 0] axon_nb: the cell has set WORLD_SIZE=1, which misleads libraries" in printed
    assert "[rank 1] axon_nb: the cell has set RANK=0, LOCAL_RANK=0, WORLD_SIZE=1, which" in printed
    assert kernel.ok("%%distributed --ranks 0-1\nos.environ['RANK']").lines() == ["[ranks 0-1] '0'"], "said once"
    (restoring,) = {line.partition("`")[2].partition("`")[0] for line in printed.splitlines()}
    assert kernel.ok(f"%%distributed\nimport os\n{restoring}\nos.environ['RANK'] == str(rank)").lines() == [
        "[ranks 0-3] True"
    ]
    assert (
        "[ranks 0-1] axon_nb: the cell has set WORLD_SIZE=1"
        in kernel.ok("%%distributed --ranks 0-1\n%env WORLD_SIZE=1").stdout
    )
    kernel.ok(f"%%distributed\n{restoring}")


def test_sync_batch_norm_on_cpus(kernel: Kernel) -> None:
    reply = kernel.run("%%distributed\ntorch.nn.SyncBatchNorm(3)(torch.ones(2, 3))")
    assert "use `axon_nb.parallel.SyncBatchNorm`" in reply.traceback


def test_ddp_model_is_pulled_as_its_module(kernel: Kernel) -> None:
    kernel.ok(
        "%%distributed\nfrom torch.nn.parallel import DistributedDataParallel\n"
        "replica = DistributedDataParallel(torch.nn.Linear(2, 2))"
    )
    assert "pull its `.module`" in kernel.run("%pull replica").evalue
    kernel.ok("%pull replica.module --ranks 0 --as pulled")
    kernel.ok("%%distributed\ndel replica")


def test_thread_using_the_main_threads_group_gets_a_hint(kernel: Kernel) -> None:
    reply = kernel.run(
        "%%distributed\nimport threading\n"
        "def beside():\n    dist.all_reduce(torch.ones(3))\n"
        "thread = threading.Thread(target=beside, name='beside')\n"
        "if rank == 0:\n    thread.start()\n    thread.join()\n"
        "dist.all_reduce(torch.ones(5))\nif rank != 0:\n    thread.start()\n    thread.join()"
    )
    assert "Threads of the ranks (beside) communicate in the same group as the main thread" in reply.traceback


def test_async_checkpoint_in_a_separate_group(kernel: Kernel, tmp_path: Path) -> None:
    kernel.ok(
        "%%distributed\nimport torch.distributed.checkpoint as dcp\nfrom torch.distributed.fsdp import fully_shard\n"
        "model, group = fully_shard(torch.nn.Linear(4, 4)), dist.new_group()\n"
        f"state, folder = {{'model': model.state_dict()}}, {str(tmp_path)!r}\n"
        "saved = dcp.async_save(state, checkpoint_id=folder, process_group=group)\n"
        "for _ in range(20):\n    model(torch.ones(2, 4)).sum().backward()\n"
        "_ = saved.result()"
    )
