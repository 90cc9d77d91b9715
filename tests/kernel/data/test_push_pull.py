"""Values go to ranks and come back: push, pull, scatter, gather, and arrays of other libraries."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.cases.value_kinds import KINDS, LISTED, NOT_SENT
from tests.support.kernel import Kernel
from tests.support.processes import footprint, until

# Only the ranks have this library. Its text does not show all elements, and its memory is not the CPU's.
LIBRARY = """
import sys, types, numpy
cardpy = types.ModuleType("cardpy")
class Array:
    __module__, __qualname__ = "cardpy", "Array"
    def __init__(self, values):
        self._values = numpy.array(values, dtype=numpy.float32)
        self.shape, self.dtype, self.nbytes = self._values.shape, self._values.dtype, self._values.nbytes
    def __dlpack_device__(self):
        return (2, 0)
    def __dlpack__(self, *, dl_device=None, **options):
        if dl_device != (1, 0):
            raise BufferError("on the card")
        return self._values.__dlpack__()
    def __repr__(self):
        return "array([0., 1., 2., ..., 9997., 9998., 9999.])"
cardpy.Array = Array
sys.modules["cardpy"] = cardpy
"""
SETUP = f"""%%distributed
{LIBRARY}
values = numpy.arange(10_000)
same = cardpy.Array(values)
values[5000] += rank == 2
odd = cardpy.Array(values)
nested = {{"first": [odd], "rank": rank}}
long = "x" * 1000 + str(rank)
on_host = numpy.full(3, rank)
host = types.SimpleNamespace(__array_interface__=on_host.__array_interface__)
"""


@pytest.fixture
def kernel(kernel: Kernel) -> Kernel:
    """The shared kernel, where no other test has left a variable that `%pull` would overwrite."""
    kernel.ok("for t_name in [name for name in globals() if name.startswith('t_')]: del globals()[t_name]")
    return kernel


def shared_blocks_of(pid: int) -> list[str]:
    """The shared blocks that a process holds open or maps."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            found.append(os.readlink(path))
    found += Path(f"/proc/{pid}/maps").read_text().splitlines()
    others = ("memfd:axon_nb_group", "memfd:axon_nb-kept-memory")
    return [text for text in found if "memfd:axon_nb" in text and not any(other in text for other in others)]


def family(kernel: Kernel) -> list[int]:
    """The kernel and its ranks."""
    return [kernel.pid, *footprint(kernel).ranks]


def test_push_to_some_ranks(kernel: Kernel) -> None:
    kernel.ok("t_some = 5\n%push t_some --ranks 1,3")
    reply = kernel.ok("%%distributed\n't_some' in globals()")
    assert sorted(reply.lines()) == ["[ranks 0,2] False", "[ranks 1,3] True"]


def test_large_arrays_are_private_per_rank_and_freed(kernel: Kernel) -> None:
    kernel.ok("import numpy as np\nt_big = np.arange(1 << 20, dtype=np.float64)\n%push t_big")
    kernel.ok("%%distributed\nt_big[rank] = -1.0\nt_sum = float(t_big.sum())")
    expected = [sum(range(1 << 20)) - rank - 1.0 for rank in range(4)]
    kernel.ok("%pull t_sum --force")
    assert kernel.value("[float(t_sum[r]) for r in range(4)]") == expected
    assert kernel.value("float(t_big.sum())") == float(sum(range(1 << 20)))
    kernel.ok("%pull t_big --as t_back")
    assert kernel.value("[int(t_back[r].argmin()) for r in range(4)]") == [0, 1, 2, 3]
    assert kernel.value("[t_back[r].flags.writeable for r in range(4)]") == [True] * 4
    kernel.ok("del t_back\n%xdel t_big")
    kernel.ok("%distributed config undo_memory=0")  # undo would bring it back
    kernel.ok("%%distributed\ndel t_big")
    kernel.ok("%distributed config undo_memory=64MiB")
    assert until(lambda: not any(shared_blocks_of(pid) for pid in family(kernel)))
    assert not [name for name in os.listdir("/dev/shm") if "axon" in name]


def test_tensors_keep_dtype_layout_sharing_and_gradients(kernel: Kernel) -> None:
    kernel.ok(
        "%%distributed --ranks 1\n"
        "t_half = torch.arange(2048, dtype=torch.bfloat16)\n"
        "t_turned = torch.arange(12288.0).reshape(96, 128).T\n"
        "t_layer = torch.nn.Linear(64, 64)\n"
        "t_odd = {'c': torch.ones(3, dtype=torch.complex64).conj() * 1j, 'e': torch.empty(0, 3)}\n"
        "t_odd |= {'b': torch.ones(2) > 0, 's': torch.eye(2).to_sparse(), 'slice': torch.zeros(1 << 20)[:3]}\n"
        "t_tied = torch.nn.ModuleList([t_layer, t_layer]).state_dict()"
    )
    kernel.ok("%pull t_half t_turned t_odd t_tied t_layer --ranks 1")
    kernel.ok("import torch")
    assert kernel.value("str(t_half.dtype), t_half[-1].item(), t_half.requires_grad") == (
        "torch.bfloat16",
        2048.0,
        False,
    )
    assert kernel.value("bool((t_turned == torch.arange(12288.0).reshape(96, 128).T).all()), t_turned.stride()") == (
        True,
        (1, 128),
    )
    assert kernel.value("t_odd['c'].imag.tolist(), tuple(t_odd['e'].shape), t_odd['b'].tolist()") == (
        [1.0] * 3,
        (0, 3),
        [True, True],
    )
    assert kernel.value("t_odd['s'].to_dense().tolist(), t_odd['slice'].untyped_storage().nbytes()") == (
        [[1.0, 0.0], [0.0, 1.0]],
        12,
    )
    assert kernel.value("t_tied['0.weight'].data_ptr() == t_tied['1.weight'].data_ptr()") is True
    assert kernel.value("type(t_tied).__name__, [p.requires_grad for p in t_layer.parameters()]") == (
        "OrderedDict",
        [True, True],
    )
    kernel.ok("%push t_layer t_tied t_turned")
    reply = kernel.ok(
        "%%distributed\nt_layer.load_state_dict({k[2:]: v for k, v in t_tied.items() if k[0] == '0'})\n"
        "t_layer(torch.ones(64)).sum().backward()\n"
        "(t_layer.weight.grad.shape, t_turned.stride(), t_tied['0.bias'].data_ptr() == t_tied['1.bias'].data_ptr())"
    )
    assert reply.lines() == ["[ranks 0-3] (torch.Size([64, 64]), (1, 128), True)"]


def test_tables_and_picklable_objects_are_transferred(kernel: Kernel) -> None:
    kernel.ok(
        "import pandas as pd\nfrom collections import namedtuple\n"
        "t_frame = pd.DataFrame({'x': range(1000), 'name': ['ä'] * 1000})\n"
        "t_factor = 3\ndef t_multiplied(x):\n    return x * t_factor + rank\n"
        "class T_Thing:\n    def __init__(self, n): self.n = n\n    def twice(self): return t_multiplied(self.n)\n"
        "t_thing = T_Thing(5)\n%push t_frame t_multiplied t_thing"
    )
    reply = kernel.ok("%%distributed\n(int(t_frame.x.sum()), t_multiplied(1), t_thing.twice())")
    assert sorted(reply.lines()) == [f"[rank {r}] (499500, {3 + r}, {15 + r})" for r in range(4)]
    kernel.ok("%%distributed\nt_factor = 10")
    assert "[rank 0] 10" in kernel.ok("%%distributed\nt_multiplied(1)").lines()
    kernel.ok("%pull t_frame --ranks 2 --as t_frame2\n%pull t_thing --ranks 0 --as t_thing2")
    assert kernel.value("t_frame2.equals(t_frame), t_thing2.n") == (True, 5)


def test_untransferable_values_are_reported(kernel: Kernel) -> None:
    kernel.ok("import threading\nt_fine, t_lock = 1, threading.Lock()")
    reply = kernel.run("%push t_fine t_lock")
    assert "UsageError: 't_lock' cannot be sent to ranks: TypeError: cannot pickle" in reply.traceback
    kernel.ok("%%distributed\nimport threading\nt_there = threading.Lock()")
    assert "Rank 0 cannot send 't_there': TypeError" in kernel.run("%pull t_there").traceback
    assert "Rank 0 cannot send 't_nowhere': NameError" in kernel.run("%pull t_nowhere").traceback
    assert "The notebook has no variable 't_nowhere'" in kernel.run("%push t_nowhere").traceback
    assert "'t_fine +' is not a name or an expression" in kernel.run("%pull 't_fine +' --as t_other").traceback
    assert "--as t_other names one variable" in kernel.run("%pull t_fine t_lock --as t_other").traceback


TRIED = """
from tests.support.cases.value_kinds import KINDS as v_kinds, NOT_SENT as v_not_sent, differs as v_differs
from tests.support.cases.value_kinds import halves as v_halves, nested as v_nested
def v_tried(line, name="", check=None):
    \"\"\"The error of a magic, or what `check` says of the variable that it has bound.\"\"\"
    globals().pop(name, None)
    try:
        get_ipython().run_line_magic(*line.split(" ", 1))
        return check(globals()[name]) if check else ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""

MAKE = "for v_n, v_make in enumerate([*v_kinds.values(), *v_not_sent.values()]): globals()[f'v_{}_{v_n}'] = v_make({})"


@pytest.fixture(scope="module")
def trying(shared_kernel: Kernel) -> Kernel:
    """The shared kernel with all kinds of values: ``v_own_0``, another on rank 1, and the notebook's ``v_mine_0``."""
    shared_kernel.ok(f"{TRIED}\n{MAKE.replace('{}', 'mine', 1).replace('({})', '(1)')}")
    shared_kernel.ok(f"%%distributed\n{TRIED}\n{MAKE.replace('{}', 'own', 1).replace('({})', '(rank % 2)')}")
    return shared_kernel


def test_each_kind_of_value_is_pushed_and_pulled_unchanged(trying: Kernel) -> None:
    trying.ok(f"%push {' '.join(f'v_mine_{n}' for n in range(len(KINDS)))} --ranks 0,1")
    trying.ok(
        "%%distributed --ranks 0,1\n"
        "v_wrong = {k: v_differs(make(1), globals()[f'v_mine_{n}']) for n, (k, make) in enumerate(v_kinds.items())}\n"
        "v_wrong = {k: text for k, text in v_wrong.items() if text}"
    )
    trying.ok("%pull v_wrong --ranks 0,1 --force")
    assert trying.value("dict(v_wrong)") == {0: {}, 1: {}}
    trying.ok(
        "v_wrong = {k: v_tried(f'pull v_own_{n} --ranks 1 --as v_got', 'v_got', lambda got: v_differs(make(1), got))\n"
        "           for n, (k, make) in enumerate(v_kinds.items())}"
    )
    assert trying.value("{k: text for k, text in v_wrong.items() if text}") == {}


CANNOT_JOIN = (
    "UsageError: Cannot join parts of shapes {} along dimension 0: all other dimensions must be equal. Use `%pull` to "
    "fetch them as they are."
)
UNLIKE = {"empty": CANNOT_JOIN.format("(0, 3), (0, 4)"), "meta": CANNOT_JOIN.format("(4, 2), (4, 3)")}


def test_each_kind_of_value_is_gathered_unchanged(trying: Kernel) -> None:
    trying.ok("""
def v_check(got, make):
    parts = [make(0), make(1)]
    if type(got) is list and type(parts[0]) is not list:
        return "listed" if len(got) == 2 and not v_differs(parts, got) else f"listed: {v_differs(parts, got)}"
    if not getattr(parts[0], "shape", True):
        return "joined" if got.tolist() == [part.tolist() for part in parts] else str(got)
    return v_differs(parts, v_halves(got)) and f"{got} {getattr(got, 'dtypes', '')}" or "joined"
v_found = {k: v_tried(f"gather v_own_{n} --ranks 0,1 --as v_got", "v_got", lambda got: v_check(got, make))
           for n, (k, make) in enumerate(v_kinds.items())}
""")
    found = trying.value("v_found")
    assert "int64" in found.pop("dtype of column")  # numbers are converted to the dtype that holds all
    kinds = [kind for kind in KINDS if kind != "dtype of column"]
    assert found == {kind: "listed" if kind in LISTED else "joined" for kind in kinds} | UNLIKE


def test_each_kind_of_value_is_scattered_and_gathered_unchanged(trying: Kernel) -> None:
    trying.ok("""
def v_check(got, whole):
    if type(got) is list and type(whole) is not list:
        return "" if list(got[0]) + list(got[1]) == list(whole) else str(got)
    return v_differs(whole, got)
v_found = {}
for v_n, (v_kind, v_make) in enumerate(v_kinds.items()):
    v_found[v_kind] = v_tried(f"scatter v_mine_{v_n} --ranks 0,1") or v_tried(
        f"gather v_mine_{v_n} --ranks 0,1 --as v_got", "v_got", lambda got: v_check(got, v_make(1)))
""")
    found = trying.value("{k: text for k, text in v_found.items() if text}")
    refused = (
        "only dense tensors, arrays, tables and sequences can be split. Use `%push` to send all of it to each rank."
    )
    assert [text for text in found.values() if not text.endswith((refused, "has 0 dimensions."))] == []
    assert {"subclass", "marked parameter", "masked", "records", "conj", "categorical", "text"} & set(found) == set()


def test_values_of_a_process_are_refused_in_one_sentence(trying: Kernel) -> None:
    numbers = range(len(KINDS), len(KINDS) + len(NOT_SENT))
    for magic in ("push v_mine", "pull v_own"):
        texts = trying.value(f"[v_tried(f'{magic}_{{n}} --ranks 0') for n in {list(numbers)}]")
        assert all("cannot" in text and text.endswith(" object, which stays with its process") for text in texts), texts


def test_nested_values_come_back_unchanged(trying: Kernel) -> None:
    trying.ok("v_seeds = [v_nested(seed)[0] for seed in range(20)]\n%push v_seeds --ranks 1")
    trying.ok("%%rank 1\nv_wrong = [seed for seed in range(20) if v_differs(v_nested(seed)[0], v_seeds[seed])]")
    trying.ok("%pull v_wrong --ranks 1 --force\n%pull v_seeds --ranks 1 --as v_back")
    assert trying.value("v_wrong, [s for s in range(20) if v_differs(v_nested(s)[0], v_back[s])]") == ([], [])


def test_numpy_is_refused_for_tensors_that_it_cannot_hold(trying: Kernel) -> None:
    for kind in ("sparse", "csr", "jagged", "nested", "quantized", "meta"):
        text = trying.value(f"v_tried('pull v_own_{list(KINDS).index(kind)} --ranks 0 --numpy --as v_got')")
        assert "a tensor of this kind (" in text, text
        assert text.endswith("has no NumPy form; fetch it without --numpy"), text


def test_pull_returns_dict_by_rank_or_single_value(kernel: Kernel) -> None:
    kernel.ok("%%distributed\nt_x = torch.full((2,), float(rank))")
    kernel.ok("%pull t_x --as t_all\n%pull t_x --ranks 2 --as t_one\n%pull 't_x.sum().item() + rank' --as t_sums")
    assert kernel.value("{r: v.tolist() for r, v in t_all.items()}") == {r: [float(r)] * 2 for r in range(4)}
    assert kernel.value("t_one.tolist(), str(t_one.dtype)") == ([2.0, 2.0], "torch.float32")
    assert kernel.value("t_sums") == {r: 3.0 * r for r in range(4)}


def test_pull_takes_expressions_with_quotes(kernel: Kernel) -> None:
    kernel.ok("%%distributed\nfigures, loss = {'loss': 1, 'a b': 2, 'other': 3}, 'other'")
    kernel.ok("""%pull figures["loss"] --ranks 0 --as one\n%pull figures['a b'] --ranks 1 --as "two" """)
    kernel.ok("""%pull 'figures["loss"] + 1' --ranks 0 --as more""")
    assert kernel.value("[one, two, more]") == [1, 2, 2]


def test_pull_as_numpy(kernel: Kernel) -> None:
    kernel.ok("%%distributed\nt_values = {'w': torch.ones(3, dtype=torch.bfloat16), 'n': [torch.arange(2)]}")
    kernel.ok("%pull t_values --numpy --ranks 0 --as t_arrays")
    assert kernel.value("str(t_arrays['w'].dtype), t_arrays['n'][0].tolist()") == ("float32", [0, 1])


def test_pull_overwrites_only_on_request(kernel: Kernel) -> None:
    kernel.ok("t_mine = 'precious'\n%push t_mine")
    reply = kernel.run("%pull t_mine")
    assert "The notebook already has a variable 't_mine'" in reply.traceback
    kernel.ok("%pull t_mine --force")
    kernel.ok("%pull t_mine")
    assert kernel.value("t_mine") == dict.fromkeys(range(4), "precious")
    kernel.ok("t_mine = dict(t_mine)")
    assert "already has a variable" in kernel.run("%gather t_mine").traceback


def test_scatter_and_gather(kernel: Kernel) -> None:
    kernel.ok(
        "import numpy as np, torch\nt_rows, t_words = np.arange(10), list('abcde')\n"
        "t_grid = torch.arange(12).reshape(2, 6)"
    )
    kernel.ok("%scatter t_rows t_words\n%scatter t_grid --dim 1 --ranks 1,3")
    reply = kernel.ok("%%distributed\nprint(t_rows.tolist(), t_words)")
    assert sorted(reply.lines()) == [
        "[rank 0] [0, 1, 2] ['a', 'b']",
        "[rank 1] [3, 4, 5] ['c']",
        "[rank 2] [6, 7] ['d']",
        "[rank 3] [8, 9] ['e']",
    ]
    assert kernel.ok("%%rank 3\nt_grid.tolist()").lines() == ["[rank 3] [[3, 4, 5], [9, 10, 11]]"]
    kernel.ok("%%distributed\nt_rows = t_rows * 2")
    kernel.ok(
        "%gather t_rows --as t_doubled\n%gather t_words --as t_again\n%gather t_grid --dim 1 --ranks 1,3 --as t_whole"
    )
    assert kernel.value("t_doubled.tolist(), t_again") == (list(range(0, 20, 2)), list("abcde"))
    assert kernel.value("torch.equal(t_whole, t_grid)") is True
    assert "t_mapping has type dict" in kernel.run("t_mapping = {}\n%scatter t_mapping").traceback


def test_distributed_tensors_are_pulled_whole_or_sharded(kernel: Kernel) -> None:
    kernel.ok(
        "%%distributed\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor\n"
        "t_mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('a', 'b'))\n"
        "t_w = distribute_tensor(torch.arange(24.0).reshape(6, 4), t_mesh, [Shard(0), Shard(1)])\n"
        "t_copy = distribute_tensor(torch.ones(2), t_mesh, [Replicate(), Replicate()])\n"
        "t_parts = {'w': t_w, 'step': 3, 'copy': t_copy}\n"
        "t_split = torch.nn.Linear(4, 4)\n"
        "t_split.weight = torch.nn.Parameter(distribute_tensor(t_split.weight.data, t_mesh, [Shard(0), Replicate()]))"
    )
    kernel.ok("import torch\n%pull t_w --as t_full\n%pull t_w --ranks 3 --as t_full3\n%pull t_w --shards --as t_shards")
    assert kernel.value("[torch.equal(t_full[r], torch.arange(24.).reshape(6, 4)) for r in range(4)]") == [True] * 4
    kernel.ok("t_full[0][0, 0] = 7.0")
    assert kernel.value("t_full[1][0, 0].item(), torch.equal(t_full3, t_full[1])") == (0.0, True)
    assert kernel.value("{r: t_shards[r].tolist() for r in (0, 3)}") == {
        0: [[0.0, 1.0], [4.0, 5.0], [8.0, 9.0]],
        3: [[14.0, 15.0], [18.0, 19.0], [22.0, 23.0]],
    }
    kernel.ok("%pull t_parts --ranks 1 --as t_dict\n%gather t_w --as t_gathered")
    assert kernel.value("t_dict['w'].shape == (6, 4), t_dict['step'], t_dict['copy'].tolist()") == (True, 3, [1.0, 1.0])
    assert kernel.value("torch.equal(t_gathered, t_full3)") is True
    reply = kernel.run("%pull t_split")
    assert "Rank 0 cannot send 't_split': a sharded module or optimizer cannot leave its ranks" in reply.traceback
    kernel.ok("%pull t_split.state_dict() --ranks 0 --as t_state")
    assert kernel.value("{k: tuple(v.shape) for k, v in t_state.items()}") == {"weight": (4, 4), "bias": (4,)}


def test_cell_values_use_the_same_transfer(kernel: Kernel) -> None:
    kernel.ok("%%distributed --out t_result\ntorch.full((300_000,), float(rank))")
    assert kernel.value("[t_result[r].sum().item() for r in range(4)]") == [300_000.0 * r for r in range(4)]
    kernel.ok("del t_result")
    assert until(lambda: not shared_blocks_of(kernel.pid))


def test_push_waits_for_the_running_cell_with_a_note(kernel: Kernel, tmp_path: Path) -> None:
    wait = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)"
    kernel.ok(f"%%distributed --noblock --ranks 0,2 --out t_handle\n{wait}")
    request = kernel.submit("t_late = 1\n%push t_late")
    kernel.wait_for_output(request, "Waiting for the cell that is running on ranks 0,2.")
    (tmp_path / "go").touch()
    assert kernel.collect(request).ok
    assert kernel.ok("%%distributed\nt_late").lines() == ["[ranks 0-3] 1"]


def test_interrupted_pull_returns_control(kernel: Kernel) -> None:
    kernel.ok("%%distributed\nimport time\ndef t_slow():\n    print('begun', flush=True)\n    time.sleep(600)")
    request = kernel.submit("print('asking', flush=True)\n%pull t_slow() --as t_never")
    kernel.wait_for_output(request, "asking")
    kernel.interrupt()
    reply = kernel.collect(request)
    assert reply.ename in ("CellInterrupt", "KeyboardInterrupt")
    assert kernel.ok("%%distributed\n1").lines() == ["[ranks 0-3] 1"]
    assert until(lambda: not any(shared_blocks_of(pid) for pid in family(kernel)))


def test_rank_death_in_a_transfer_is_reported_and_leaks_nothing() -> None:
    with Kernel() as kernel:
        kernel.ok(
            "%load_ext axon_nb\n%distributed start -n 2\nimport numpy as np, os\nt_big = np.ones(1 << 20)\n%push t_big"
        )
        kernel.ok("%%distributed\nimport os, signal\ndef t_die():\n    os.kill(os.getpid(), signal.SIGKILL)")
        reply = kernel.run("%pull 't_die() if rank else t_big' --as t_none")
        assert "rank 1 was killed by SIGKILL" in reply.traceback
        assert "Rank 1 was killed by SIGKILL" in kernel.run("%push t_big").traceback
        assert until(lambda: not shared_blocks_of(kernel.pid))
        kernel.ok("%distributed repair\n%push t_big")
        assert kernel.ok("%%distributed\nfloat(t_big.sum())").lines() == ["[ranks 0-1] 1048576.0"]
        ranks = footprint(kernel).ranks
        kernel.come_back()
        assert psutil.pid_exists(ranks[0])
        assert all("(deleted)" in text for text in shared_blocks_of(ranks[0]))
        kernel.ok("%load_ext axon_nb\n%distributed attach")
        assert kernel.ok("%%distributed\nfloat(t_big.sum())").lines() == ["[ranks 0-1] 1048576.0"]


def test_notebook_imports_torch_only_for_tensors(new_kernel: Callable[..., Kernel]) -> None:
    kernel = new_kernel()
    kernel.ok("%load_ext axon_nb\n%distributed start -n 2\nimport numpy as np\nt_n = np.ones(1 << 20)\n%push t_n")
    kernel.ok("%%distributed\nt = torch.ones(2)\nt")
    kernel.ok("%distributed status\n%pull t --numpy\n%pull t_n --as t_m")
    assert kernel.value("'torch' in __import__('sys').modules") is False
    assert kernel.value("'ipywidgets' in __import__('sys').modules") is False


@pytest.fixture(scope="module")
def ready(shared_kernel: Kernel) -> Kernel:
    shared_kernel.ok(SETUP)
    shared_kernel.ok("from axon_nb.cluster.session import current\nc = current.require('t')")
    return shared_kernel


def test_table_has_shapes_and_compares_values(ready: Kernel) -> None:
    ready.ok("rows = {row['name']: row for row in c.variables().to_dict('records')}")
    columns = ("type", "shape", "dtype", "device", "ranks")
    assert ready.value(f"[rows['same'][name] for name in {columns}]") == ["Array", "10000", "float32", "cuda:0", "same"]
    assert ready.value("rows['odd']['ranks'], rows['host']['shape']") == ("differs on rank 2", "3")


def test_difference_hidden_by_repr_is_detected(ready: Kernel) -> None:
    assert ready.value("c.diff('odd').values.tolist()") == [["odd", 2, 1, 10_000, "[5000]", 1.0, "5000.0 / 5001.0"]]
    assert ready.value("len(c.diff('same')), len(c.diff('host'))") == (0, 3)


def test_long_reprs_with_equal_prefix_differ(ready: Kernel) -> None:
    assert ready.value("c.diff('long')['rank'].tolist()") == [1, 2, 3]


def test_foreign_arrays_are_pulled_as_numpy_without_the_library(ready: Kernel) -> None:
    assert ready.value("a = c.pull('odd', ranks=2)\n(type(a).__name__, a.shape, float(a[5000]))") == (
        "ndarray",
        (10_000,),
        5001.0,
    )
    assert ready.value("type(c.pull('nested', ranks=1)['first'][0]).__name__") == "ndarray"
    assert ready.value("type(c.run('odd', quiet=True)[0]).__name__") == "ndarray"
    assert "No module named 'cardpy'" in ready.run("%pull odd --ranks 2 --as-is").traceback


def test_foreign_arrays_are_pushed_as_numpy_unless_as_is(ready: Kernel) -> None:
    ready.ok(f"{LIBRARY}\nmine = cardpy.Array([1, 2, 3])")
    ready.ok("%push mine")
    kinds = "dict(c.run('type(mine).__name__', quiet=True).values)"
    assert set(ready.value(kinds).values()) == {"ndarray"}
    ready.ok("%push mine --as-is")
    assert set(ready.value(kinds).values()) == {"Array"}
    ready.ok("del sys.modules['cardpy']")


def _check(kernel: Kernel, seeds: range) -> None:
    load = f"from tests.support.cases import round_trips as v_trips\nv_seeds = {seeds!r}"
    kernel.ok(f"%%distributed --ranks 0,1\n{load}\nglobals().update(v_trips.prepare(rank, v_seeds))")
    kernel.ok(f"{load}\nv_found = v_trips.wrong(v_seeds)", timeout=200)
    assert kernel.value("v_found") == {}
    kernel.ok("%%rank 1\nv_pushed = v_trips.wrongly_pushed(globals(), v_seeds)")
    kernel.ok("%pull v_pushed --ranks 1 --force")
    differing, count = kernel.value("v_pushed")
    assert differing == {}
    assert count > 0.8 * len(seeds)
    forget = "for v_name in [name for name in globals() if name.startswith('v_')]: del globals()[v_name]"
    kernel.ok(forget)
    kernel.ok(f"%%distributed --ranks 0,1\n{forget}")


def test_drawn_values_come_back_unchanged_or_are_refused(kernel: Kernel) -> None:
    _check(kernel, range(20))


@pytest.mark.slow
def test_200_drawn_values_come_back_unchanged_or_are_refused(kernel: Kernel) -> None:
    for first in range(20, 220, 50):
        _check(kernel, range(first, first + 50))
