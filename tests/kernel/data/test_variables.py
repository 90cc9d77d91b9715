"""`%distributed vars`: one table of the ranks' variables, which says where they differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from axon_nb.cluster.inspection.variables import agreement
from axon_nb.records.protocol.inspection import VariableFacts
from tests.support.kernel import Kernel

SETUP = """%%distributed
import pandas, numpy
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.device_mesh import init_device_mesh
line = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
torch.manual_seed(0)
same = torch.arange(6.0).reshape(2, 3)
odd = torch.zeros(3) + (rank == 2)
ranked = torch.full((rank + 1,), 1.0)
split = distribute_tensor(torch.arange(8.0), line, [Shard(0)])
copied = distribute_tensor(torch.arange(8.0), line, [Replicate()])
net = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
drifted = nn.Linear(4, 2)
with torch.no_grad():
    drifted.bias += rank == 1
table = pandas.DataFrame({"a": [1, 2, 3 + (rank == 3)]})
array = numpy.arange(5)
text = f"hello from {rank}"
number = 7
def function(): pass
class Odd:
    def __repr__(self): raise ValueError("no")
thing = Odd()
if rank < 2: few = 1
"""


@pytest.fixture(scope="module")
def rows(shared_kernel: Kernel) -> dict[str, dict[str, object]]:
    shared_kernel.ok(SETUP)
    shared_kernel.ok("from axon_nb.cluster.session import current")
    shared_kernel.ok("found = current.require('t').variables().to_dict('records')")
    return {row["name"]: row for row in shared_kernel.value("found")}


@pytest.mark.parametrize(
    ("name", "ranks"),
    {
        "same": "same",
        "odd": "differs on rank 2",
        "ranked": "differs",
        "split": "split",
        "copied": "same",
        "net": "same",
        "drifted": "differs on rank 1",
        "table": "differs on rank 3",
        "array": "same",
        "text": "differs",
        "number": "same",
        "few": "only on ranks 0-1",
        "thing": "not compared",
    }.items(),
)
def test_differing_ranks_are_reported(rows: dict[str, dict[str, object]], name: str, ranks: str) -> None:
    assert rows[name]["ranks"] == ranks


def test_variables_are_described(rows: dict[str, dict[str, object]]) -> None:
    same = rows["same"]
    assert (same["type"], same["shape"], same["dtype"], same["device"]) == ("Tensor", "2 × 3", "float32", "cpu")
    assert same["bytes"] == 4 * 24
    assert rows["split"]["placements"] == "Shard(0)"
    assert rows["split"]["bytes"] == 32
    assert rows["net"]["shape"] == "10 parameters"
    assert not {"rank", "torch", "dist", "Odd", "pandas"} & set(rows)


def test_vars_command_shows_the_table(shared_kernel: Kernel, rows: dict[str, dict[str, object]]) -> None:
    # Cells of other tests leave variables, too: pandas shortens a long table.
    assert "differs on rank 2" in shared_kernel.ok("t_vars = %distributed vars\nprint(t_vars.to_string())").stdout


def test_vars_command_mentions_a_running_cell(shared_kernel: Kernel, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    wait = f"import os, time\nwhile not os.path.exists({str(asked)!r}): time.sleep(0.01)"
    shared_kernel.ok(f"%%distributed --noblock --out job\n{wait}")
    reply = shared_kernel.run("%distributed vars")
    asked.touch()
    assert reply.ename == "UsageError"
    assert "A cell is running on" in reply.traceback
    shared_kernel.ok("_ = job.result()")


def _fact(digest: str, *, where: str = "") -> VariableFacts:
    return VariableFacts("x", "int", digest=digest, where=where)


@pytest.mark.parametrize(
    ("digests", "words"),
    [
        ({0: "a", 1: "a", 2: "a"}, "same"),
        ({0: "a", 1: "b", 2: "a"}, "differs on rank 1"),
        ({0: "a", 1: "b", 2: "c"}, "differs"),
        ({0: "a", 1: "a"}, "only on ranks 0-1"),
        ({0: "a", 1: "b"}, "differs, only on ranks 0-1"),
        ({0: "", 1: "", 2: ""}, "not compared"),
    ],
)
def test_agreement_in_words(digests: dict[int, str], words: str) -> None:
    assert agreement({rank: _fact(digest) for rank, digest in digests.items()}, [0, 1, 2]) == words


def test_tied_majority_follows_the_lowest_rank() -> None:
    facts = {rank: _fact("ab"[rank // 2]) for rank in range(4)}
    assert agreement(facts, range(4)) == "differs on ranks 2-3"


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "odd": [["", 2, 3, 3, "[0]", 1.0, "0.0 / 1.0"]],
        "drifted": [["bias", 1, 2, 2, "[0]", 1.0]],
        "table": [["column a", 3, 1, 3, "[2]", 1.0, "3 / 4"]],
        "same": [],
        "net": [],
    }.items(),
)
def test_diff_locates_the_difference(
    shared_kernel: Kernel, rows: object, name: str, expected: list[list[object]]
) -> None:
    shared_kernel.ok(f"where = current.require('t').diff({name!r}).values.tolist()")
    found = shared_kernel.value("where")
    assert [row[: len(wanted)] for row, wanted in zip(found, expected, strict=True)] == expected


def test_diff_of_shapes_texts_and_incomparable_values(shared_kernel: Kernel, rows: object) -> None:
    assert "1 float32 / 2 float32" in shared_kernel.ok("%distributed diff ranked").result
    assert "'hello from 0' / 'hello from 1'" in shared_kernel.ok("%distributed diff text").result
    assert "has no such variable" in shared_kernel.ok("%distributed diff few").result
    assert shared_kernel.ok("%distributed diff same").lines() == ["'same' is the same on all ranks."]
    assert "is sharded" in shared_kernel.run("%distributed diff split").traceback
    assert "has no such variable" in shared_kernel.run("%distributed diff nothing").traceback
