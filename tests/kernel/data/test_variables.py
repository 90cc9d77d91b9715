"""`%distributed vars`: one table of the ranks' variables, which says where they differ."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from axon_nb.cluster.inspection.variables import agreement
from axon_nb.records.protocol.inspection import VariableFacts
from tests.support.cases.value_kinds import KINDS, NOT_SENT
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
import threading
class Odd:
    def __repr__(self): raise ValueError("no")
thing = Odd()
lock = threading.Lock()
held = {"lock": lock, "step": rank == 3}
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
        "thing": "same",
        "lock": "not compared: a lock",
        "held": "differs on rank 3",
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
    html = shared_kernel.value("t_vars._repr_html_()")
    cells = re.findall(r">([^<]+)</t[hd]>", html)
    assert cells[:3] == ["name", "ranks", "type"], "the answer is beside the name"
    assert re.search(r">odd</th><td[^>]*>differs on rank\s2<", html)
    assert "96 B" in cells


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
        "odd": [["odd", 2, 3, 3, "[0]", 1.0, "0.0 / 1.0"]],
        "drifted": [["drifted.bias", 1, 2, 2, "[0]", 1.0]],
        "table": [['table["a"]', 3, 1, 3, "[2]", 1.0, "3 / 4"]],
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
    shared_kernel.ok("t_diff = %distributed diff odd")
    assert "rank 0: 0, rank 2: 1" in shared_kernel.value("t_diff._repr_html_()").replace("\xa0", " ")
    assert "1 float32 / 2 float32" in shared_kernel.ok("%distributed diff ranked").result
    assert "'hello from 0' / 'hello from 1'" in shared_kernel.ok("%distributed diff text").result
    assert "has no such variable" in shared_kernel.ok("%distributed diff few").result
    assert shared_kernel.ok("%distributed diff same").lines() == ["'same' is the same on all ranks."]
    assert "is sharded" in shared_kernel.run("%distributed diff split").traceback
    assert "has no such variable" in shared_kernel.run("%distributed diff nothing").traceback


@pytest.fixture(scope="module")
def kinds(shared_kernel: Kernel) -> dict[str, str]:
    """All kinds of values on the ranks: ``same_0`` is equal on all, ``odd_0`` another on odd ranks; names by kind."""
    shared_kernel.ok("from axon_nb.cluster.session import current")
    shared_kernel.ok(
        "%%distributed\n"
        "from tests.support.cases.value_kinds import KINDS as t_kinds, NOT_SENT as t_not_sent\n"
        "for t_index, t_make in enumerate(t_kinds.values()):\n"
        "    globals()[f'same_{t_index}'], globals()[f'odd_{t_index}'] = t_make(0), t_make(rank % 2)\n"
        "for t_index, t_make in enumerate(t_not_sent.values()):\n"
        "    globals()[f'own_{t_index}'] = t_make(1)"
    )
    return {kind: str(index) for index, kind in enumerate(KINDS)}


def test_each_kind_of_value_is_compared(shared_kernel: Kernel, kinds: dict[str, str]) -> None:
    shared_kernel.ok(
        "t_rows = {row['name']: row['ranks'] for row in current.require('t').variables().to_dict('records')}"
    )
    ranks = shared_kernel.value("{name: text for name, text in t_rows.items() if name[:4] in ('same', 'odd_', 'own_')}")
    assert {kind: ranks[f"same_{index}"] for kind, index in kinds.items()} == dict.fromkeys(kinds, "same")
    assert {kind: ranks[f"odd_{index}"] for kind, index in kinds.items()} == dict.fromkeys(
        kinds, "differs on ranks 1,3"
    )
    assert all(ranks[f"own_{index}"].startswith("not compared: ") for index in range(len(NOT_SENT)))


def test_diff_names_the_part_of_each_kind_that_differs(shared_kernel: Kernel, kinds: dict[str, str]) -> None:
    shared_kernel.ok("t_diff = lambda n: current.require('t').diff(n).values.tolist()")
    shared_kernel.ok(f"t_found = {{n: t_diff(f'odd_{{n}}') for n in range({len(kinds)})}}")
    found = shared_kernel.value("{n: [(row[0], row[1], row[6]) for row in rows] for n, rows in t_found.items()}")
    assert {kind: {row[1] for row in found[int(n)]} for kind, n in kinds.items()} == {kind: {1, 3} for kind in kinds}
    assert not [row for rows in found.values() for row in rows if "not compared" in row[2]]
    expected = {
        "dict": '["w"]',
        "data class": ".value[0]",
        "state dict": '["0.bias"]',
        "module": ".0.bias",
        "csr": ".values()",
    }
    expected |= {"frame": '["a"]', "index": ".index", "object": '.value["data"]', "tied": '["encoder"]', "text": ""}
    assert {kind: found[int(kinds[kind])][0][0] for kind in expected} == {
        kind: f"odd_{kinds[kind]}{path}" for kind, path in expected.items()
    }
    hidden = shared_kernel.value(f"t_found[{kinds['dict']}][0][2:]")
    assert hidden == [1, 5000, "[2500]", 1.0, "0.0 / 1.0"]
    bits = shared_kernel.value(f"t_diff('odd_{kinds['zeros']}')[0][6]")
    assert bits == "0.0 / -0.0"


def test_diff_says_what_it_has_not_compared(shared_kernel: Kernel, rows: object, kinds: dict[str, str]) -> None:
    reply = shared_kernel.ok("%distributed diff own_3")
    assert reply.lines()[0] == "'own_3' does not differ where it was compared; 1 part could not be compared:"
    assert 'own_3["lock"]' in reply.result
    assert "not compared: a lock" in reply.result
    assert "'lock' of rank 0 cannot be compared: it is a lock." in shared_kernel.run("%distributed diff lock").traceback
    assert "is the same" not in shared_kernel.ok("%distributed diff held").stdout
