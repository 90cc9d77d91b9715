"""Cells that create the group themselves or use frameworks, in a script that already has a group."""

from __future__ import annotations

import pytest

from axon_nb.export.script import make_script
from axon_nb.export.translation import guard_group_calls
from axon_nb.records.history import ExecutedCell, SessionFacts

GUARD = "if not dist.is_initialized():  # this script created the group above\n"
ON_CPUS = SessionFacts(4, "gloo", threads=3)
ON_GPUS = SessionFacts(2, "nccl", 1, on_gpus=True)


def script(*cells: ExecutedCell, facts: SessionFacts = ON_CPUS) -> str:
    return make_script(cells, facts, title="a test", file_name="train.py").text


@pytest.mark.parametrize(
    ("cell", "kept"),
    [
        ("dist.init_process_group()\n", f"{GUARD}    dist.init_process_group()\n"),
        (
            "def setup():\n    dist.init_process_group(\n        backend='gloo',\n    )\n",
            f"def setup():\n    {GUARD}        dist.init_process_group(\n            backend='gloo',\n        )\n",
        ),
        ("init_process_group('gloo')  # again\n", f"{GUARD}    init_process_group('gloo')  # again\n"),
        (
            "torch.distributed.init_process_group()\n",
            f"{GUARD.replace('dist.is', 'torch.distributed.is')}    torch.distributed.init_process_group()\n",
        ),
        (
            "if dist.is_initialized():\n    dist.destroy_process_group()\n",
            (
                "if dist.is_initialized():\n"
                "    pass  # dist.destroy_process_group(): this script destroys the group below\n"
            ),
        ),
        (
            "dist.destroy_process_group(group=dist.group.WORLD)\nprint(1)\n",
            (
                "pass  # dist.destroy_process_group(group=dist.group.WORLD): this script destroys the group below\n"
                "print(1)\n"
            ),
        ),
        ("dist.destroy_process_group(pair)\n", "dist.destroy_process_group(pair)\n"),
        ("self.init_process_group()\n", "self.init_process_group()\n"),
    ],
)
def test_script_group_is_kept(cell: str, kept: str) -> None:
    assert guard_group_calls(cell) == kept


def test_failed_cell_is_truncated_at_the_failure() -> None:
    code = "dist.init_process_group()\na = {}\nb = a[rank]\n"
    failed = ExecutedCell(1, "distributed", code, "failed", 3, "KeyError")
    text = script(failed, ExecutedCell(2, "distributed", "print(a)\n"))
    assert "    dist.init_process_group()\na = {}\n# Failed here in the notebook at line 3" in text


def test_cell_may_shadow_torch_distributed() -> None:
    text = script(ExecutedCell(1, "distributed", "dist = torch.ones(2)\nprint(dist)\n"))
    assert text.endswith("\ntorch.distributed.destroy_process_group()\n")


def test_accelerate_trains_together_on_cpus() -> None:
    setting = 'os.environ.setdefault("ACCELERATE_USE_CPU", "true")  #'
    training = ExecutedCell(
        1, "distributed", "def train():\n    from transformers.trainer import Trainer\n    Trainer()\n"
    )
    assert setting in script(training)
    assert setting in script(ExecutedCell(1, "distributed", "import accelerate.utils as utils\nprint(utils)\n"))
    assert setting not in script(ExecutedCell(1, "distributed", "import os\nprint(os.name)\n"))
    assert setting not in script(training, facts=ON_GPUS)


def test_deepspeed_skips_op_builds_as_on_ranks() -> None:
    training = ExecutedCell(1, "distributed", "import deepspeed\nprint(deepspeed)\n")
    head = script(training).partition("dist.init_process_group")[0]
    assert '    import_module("deepspeed.comm.torch").build_shm_op = lambda: None\n' in head
    assert "build_shm_op" not in script(training, facts=ON_GPUS)
