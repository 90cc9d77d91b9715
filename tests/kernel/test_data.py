"""`%push` and `%pull`."""

from __future__ import annotations

from tests.kernel.driver import Kernel


def test_push_reaches_every_rank(kernel: Kernel) -> None:
    kernel.ok("import numpy as np\nt_a, t_b = np.arange(6).reshape(2, 3), {'k': (1, 'x')}\n%push t_a t_b")
    assert kernel.ok("%%distributed\nprint(t_a.sum(), t_b)").lines() == ["[ranks 0-3] 15 {'k': (1, 'x')}"]


def test_push_to_some_ranks(kernel: Kernel) -> None:
    kernel.ok("t_some = 5\n%push t_some --ranks 1,3")
    reply = kernel.ok("%%distributed\n't_some' in globals()")
    assert sorted(reply.lines()) == ["[ranks 0,2] False", "[ranks 1,3] True"]


def test_pull_gives_a_dict_by_rank_or_the_value_of_one(kernel: Kernel) -> None:
    kernel.ok("%%distributed\nt_x = torch.full((2,), float(rank))")
    kernel.ok("%pull t_x --as t_all\n%pull t_x --ranks 2 --as t_one")
    assert kernel.value("{r: v.tolist() for r, v in t_all.items()}") == {r: [float(r)] * 2 for r in range(4)}
    assert kernel.value("t_one.tolist(), str(t_one.dtype)") == ([2.0, 2.0], "torch.float32")


def test_pull_never_overwrites_unasked(kernel: Kernel) -> None:
    kernel.ok("t_mine = 'precious'\n%push t_mine")
    reply = kernel.run("%pull t_mine")
    assert "The notebook already has a variable 't_mine'" in reply.traceback
    kernel.ok("%pull t_mine --force")
    kernel.ok("%pull t_mine")
    assert kernel.value("t_mine") == dict.fromkeys(range(4), "precious")


def test_python_api_runs_pushes_and_pulls(kernel: Kernel) -> None:
    kernel.ok("import axon_nb\nt_c = axon_nb.cluster.current.get()\nt_c.push({'t_p': 3}, ranks=[0, 2])")
    assert kernel.value("t_c.pull('t_p + rank', ranks=[0, 2])") == {0: 3, 2: 5}
    assert kernel.value("dict(t_c.run('rank * 2', ranks='1,3').values)") == {1: 2, 3: 6}
    assert kernel.value("t_c.run('rank * 2')[3]") == 6


def test_the_notebook_imports_no_torch_until_a_tensor_comes(new_kernel: object) -> None:
    kernel = new_kernel()  # type: ignore[operator]
    kernel.ok("%load_ext axon_nb\n%distributed start -n 2")
    kernel.ok("%%distributed\nt = torch.ones(2)\nt")
    kernel.ok("%distributed status")
    assert kernel.value("'torch' in __import__('sys').modules") is False
    assert kernel.value("'ipywidgets' in __import__('sys').modules") is False
