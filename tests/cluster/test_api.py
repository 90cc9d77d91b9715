"""The Python API in a script without a notebook or an event loop: clusters, cells, and views as text."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.cell_output import by_rank
from tests.support.processes import until
from tests.support.script import Script, run_script

MODEL = """import torch
model = torch.nn.Linear(16, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(4, 16)).sum().backward()
torch.distributed.all_reduce(torch.ones(2))
optimizer.step()"""

TERMINAL = """
shell = get_ipython()
assert not hasattr(shell, "kernel")
run, cell = shell.run_line_magic, shell.run_cell_magic
run("load_ext", "axon_nb")
run("distributed", "start -n 2 --devices cpu --name terminal")
cell("distributed", "", MODEL)
for view, line in (("timeline", ""), ("watch", ""), ("memory", "model optimizer"), ("shards", "model")):
    print("VIEW", view)
    run(view, line)
print("VIEW cell")
cell("distributed", "--watch", "dist.barrier()")
run("distributed", "stop")
"""


def test_run_returns_values_times_and_text(script: Script) -> None:
    answer = script.ok("r = c.run('print(\"hello\", rank)\\nrank * 10')")
    assert by_rank(answer.out) == {0: ["hello 0"], 1: ["hello 1"]}
    assert script.value("dict(r.values), r[1], r.ok, dict(r.errors)") == ({0: 0, 1: 10}, 10, True, {})
    assert script.value("dict(r.text)") == {0: "hello 0\n", 1: "hello 1\n"}
    assert script.value("sorted(r.seconds), all(0 <= s < 600 for s in r.seconds.values())") == ([0, 1], True)
    assert script.value("repr(r).splitlines()[1:]") == ["rank 0: 0", "rank 1: 10"]


def test_values_are_returned_and_not_shown(script: Script) -> None:
    assert script.ok("c.run('rank')").out == ""
    assert by_rank(script.ok("c.run('rank', show_value=True)").out) == {0: ["0"], 1: ["1"]}


def test_rank_without_value_returns_none(script: Script) -> None:
    assert script.value("dict(c.run('1 if rank else None').values)") == {1: 1}
    answer = script.run("c.run('x = 1')[0]")
    assert answer.kinds[0] == "KeyError"
    assert "rank 0 has no value; ranks with one: none" in answer.message


UNLOADABLE = "class U:\n    def __reduce__(self): return (eval, ('1/0',))\n    def __repr__(self): return 'U here'\n"


def test_unloadable_values_arrive_as_text(script: Script) -> None:
    script.ok(f"c.run({UNLOADABLE!r} + 'u = U()')")
    assert script.value("dict(c.run('u').values)") == {0: "U here", 1: "U here"}
    assert script.value("dict(c.run('[u, 1]').values)") == {0: "[U here, 1]", 1: "[U here, 1]"}
    answer = script.run("c.pull('u', ranks=1)")
    assert answer.message == ("Rank 1 sent 'u', but the notebook cannot load it: ZeroDivisionError: division by zero")


def test_values_of_classes_defined_in_a_cell_can_be_fetched(script: Script) -> None:
    script.ok("c.run('class Point:\\n    def __init__(self, x): self.x = x\\np = Point(rank)')")
    assert script.value("[c.pull('p', ranks=r).x for r in range(2)], c.run('p')[1].x") == ([0, 1], 1)


def test_unpicklable_values_arrive_as_text(script: Script) -> None:
    assert "lambda" in script.value("c.run('lambda: 1', ranks=[0])[0]")


def test_quiet_shows_nothing_and_keeps_the_text(script: Script) -> None:
    answer = script.ok("r = c.run('import sys\\nprint(1)\\nprint(2, file=sys.stderr)', quiet=True)\nr.text[0]")
    assert (answer.out, answer.err) == ("", "")
    assert "1\n" in answer.value


def test_seeded_ranks_draw_the_same_numbers(script: Script) -> None:
    script.ok("c.seed(3)")
    first, second = script.value("c.run('float(torch.rand(()))').values").values()
    assert first == second
    script.ok("c.seed(3, per_rank=True)")
    first, second = script.value("c.run('float(torch.rand(()))').values").values()
    assert first != second


@pytest.mark.parametrize(("ranks", "chosen"), [("'1'", [1]), ("[0]", [0]), ("(1, 0, 1)", [0, 1]), ("'all'", [0, 1])])
def test_cell_runs_on_selected_ranks(script: Script, ranks: str, chosen: list[int]) -> None:
    assert script.value(f"sorted(c.run('rank', ranks={ranks}).values)") == chosen


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ("c.run('1', ranks='5')", "rank 5 does not exist: ranks are 0 to 1."),
        ("c.run('1', ranks=[])", "no rank is named; ranks are 0 to 1."),
        ("c.run('1', ranks=[-3])", "does not exist"),
        ("c.run('1', timeout=0)", "timeout must be a number of seconds above 0"),
        ("c.run('1', timeout=-1)", "timeout must be a number of seconds above 0"),
        ("c.run('def broken(:')", "line 1: "),
        ("c.run_noblock('1 +')", "line 1: "),
        ("c.push({'not a name': 1})", "'not a name' is not a valid variable name"),
        ("c.pull('nothing_there')", "Rank 0 cannot send 'nothing_there': NameError"),
        ("c.pull('(x for x in [])', ranks=0)", "Rank 0 cannot send '(x for x in [])'"),
        ("c.pull('rank', ranks=2)", "rank 2 does not exist"),
        ("axon_nb.start(2)", "The cluster 'script' with 2 ranks is running"),
        ("axon_nb.attach()", "already has the cluster 'script'"),
    ],
)
def test_invalid_call_is_rejected_in_one_sentence(script: Script, call: str, sentence: str) -> None:
    answer = script.run(call)
    assert "UsageError" in answer.kinds
    assert "ValueError" in answer.kinds
    assert sentence in answer.message
    assert script.value("c.run('rank')[1]") == 1


def test_failed_rank_raises_with_cause_first(script: Script) -> None:
    answer = script.run("c.run('if rank == 1:\\n    raise LookupError(\"no such thing\")')")
    assert answer.kinds[0] == "CellError"
    assert answer.message == "rank 1: LookupError: no such thing"


def test_check_false_returns_failures_and_other_values(script: Script) -> None:
    script.ok('r = c.run(\'assert rank == 0, "bad"\\n"good"\', check=False)')
    assert script.value("r.ok, dict(r.values), sorted(r.errors), r.errors[1].ename, r.errors[1].kind") == (
        False,
        {0: "good"},
        [1],
        "AssertionError",
        "raised",
    )
    assert script.value("str(r.errors[1])") == "AssertionError: bad"


def test_timeout_aborts_only_the_cell(script: Script) -> None:
    answer = script.run("c.run('import time\\ntime.sleep(600)', timeout=0.5)")
    assert answer.kinds[0] == "CellTimeoutError"
    assert {"CellError", "TimeoutError"} <= set(answer.kinds)
    script.ok("r = c.run('import time\\ntime.sleep(600)', timeout=0.5, check=False)")
    assert script.value("r.ok, sorted(r.errors)") == (False, [0, 1])
    assert script.value("dict(c.run('rank').values)") == {0: 0, 1: 1}


def test_ctrl_c_aborts_the_cell_and_keeps_the_ranks(script: Script, tmp_path: Path) -> None:
    cell = f"busy = True\nopen('{tmp_path}/' + str(rank), 'w').close()\nwhile True: pass"
    script.submit(f"c.run({cell!r})")
    assert until(lambda: len(list(tmp_path.iterdir())) == 2)
    os.kill(script.process.pid, signal.SIGINT)
    answer = script.collect()
    assert answer.kinds[0] == "CellInterrupt"
    assert "KeyboardInterrupt" in answer.kinds
    assert script.value("dict(c.run('busy').values)") == {0: True, 1: True}


def test_ctrl_c_aborts_an_awaited_cell_of_a_program(script: Script, tmp_path: Path) -> None:
    cell = f"open('{tmp_path}/' + str(rank), 'w').close()\nwhile True: pass"
    script.submit(f"import asyncio\nasync def main(): await c.run_async({cell!r})\nasyncio.run(main())")
    assert until(lambda: len(list(tmp_path.iterdir())) == 2)
    os.kill(script.process.pid, signal.SIGINT)
    assert "KeyboardInterrupt" in script.collect().kinds
    assert script.value("c.state.busy, c.run('rank')[1]") == ([], 1)


@pytest.mark.parametrize("code", ["", ", ranks=[0]"])
def test_error_of_a_signal_handler_ends_the_cell(script: Script, code: str) -> None:
    """Also while a rank that does not answer, as it is stopped, delays the start of the cell."""
    handlers = "def limit(*_): raise LookupError('limit')\n_ = signal.signal(signal.SIGALRM, limit)"
    script.ok(f"{handlers}\nstopped = c.rank_info[1].pid")
    stop, alarm = "os.kill(stopped, signal.SIGSTOP)\n" * bool(code), "_ = signal.setitimer(signal.ITIMER_REAL, 0.3)\n"
    answer = script.run(f"{stop}{alarm}c.run('while True: pass'{code}, exclusive={bool(code)})")
    assert (answer.kinds[0], answer.message) == ("LookupError", "limit")
    script.ok(
        "os.kill(stopped, signal.SIGCONT)" if code else "_ = signal.signal(signal.SIGALRM, lambda *_: sys.exit(3))"
    )
    assert script.value("c.state.busy, c.run('rank')[1]") == ([], 1)
    answer = script.run(f"{alarm}c.run('while True: pass')")
    assert answer.kinds[0] == ("LookupError" if code else "SystemExit")
    assert script.value("c.state.busy, c.run('rank')[1]") == ([], 1)


def test_background_cell(script: Script) -> None:
    script.ok("h = c.run_noblock('import time\\nwhile not globals().get(\"go\"): time.sleep(0.01)\\nrank', quiet=True)")
    assert script.value("h.done()") is False
    assert "running on ranks 0-1" in script.value("repr(h)")
    assert script.run("h.result(0.1)").kinds[0] == "TimeoutError"
    script.ok("h.cancel()")
    answer = script.run("h.result(100)")
    assert "KeyboardInterrupt" in answer.kinds
    assert script.value("h.done()") is True
    script.ok("c.push({'go': True})\nh = c.run_noblock('go and rank', quiet=True)")
    assert script.value("dict(h.result(100).values)") == {0: 0, 1: 1}
    assert script.value("repr(h)") == "CellHandle(done)"


def test_cells_can_be_run_from_several_threads(script: Script) -> None:
    script.ok(
        "got = {}\ndef work(n):\n    got[n] = [dict(c.run(f'{n} * 100 + rank', quiet=True).values) for _ in range(5)]\n"
        "threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]\n"
        "[t.start() for t in threads]\n[t.join(100) for t in threads]"
    )
    assert script.value("got") == {n: [{0: n * 100, 1: n * 100 + 1}] * 5 for n in range(4)}


def test_each_of_several_background_cells_has_its_own_value(script: Script) -> None:
    script.ok("handles = [c.run_noblock(f'{n} * 10 + rank', quiet=True) for n in range(6)]")
    assert script.value("[dict(h.result(100).values) for h in handles]") == [
        {0: n * 10, 1: n * 10 + 1} for n in range(6)
    ]


def test_background_value_is_kept_while_another_cell_runs(script: Script) -> None:
    script.ok("h = c.run_noblock('\"first\"', ranks=[0], quiet=True)\nr = c.run('\"second\"', ranks=[0], quiet=True)")
    assert script.value("h.result(100)[0], r[0]") == ("first", "second")


def test_cells_can_be_awaited(script: Script) -> None:
    assert script.value("import asyncio\ndict(asyncio.run(c.run_async('rank + 5')).values)") == {0: 5, 1: 6}


def test_collectives_work_in_cells(script: Script) -> None:
    assert script.value("dict(c.run('t = torch.ones(3) * (rank + 1); dist.all_reduce(t); t.tolist()').values)") == {
        0: [3.0] * 3,
        1: [3.0] * 3,
    }


def test_push_and_pull_keep_types(script: Script) -> None:
    script.ok("import numpy as np, torch\nc.push({'a': np.arange(4.0), 't': torch.eye(2), 'd': {'k': [1, (2, 'x')]}})")
    assert script.value("c.run('print(type(a).__name__, type(t).__name__, d)', quiet=True).text[1]") == (
        "ndarray Tensor {'k': [1, (2, 'x')]}\n"
    )
    assert script.value("{r: v.tolist() for r, v in c.pull('t * (rank + 1)').items()}") == {
        0: [[1.0, 0.0], [0.0, 1.0]],
        1: [[2.0, 0.0], [0.0, 2.0]],
    }
    assert script.value("c.pull('d', ranks=1), c.pull('a.sum()', ranks=[0])[0].item()") == ({"k": [1, (2, "x")]}, 6.0)


def test_push_falls_back_to_messages_without_shared_memory(script: Script) -> None:
    script.ok("import msgspec, numpy as np, torch\nb = np.arange(1 << 18)\nplaces = c.rank_info")
    script.ok("from axon_nb.host import shared_memory\naddress = shared_memory.SharedBlock.address")
    # As a launcher's rank on another host says.
    elsewhere = (
        "info = (c.rank_info[0], msgspec.structs.replace(c.rank_info[1], host='elsewhere'))\n"
        "c.state._facts = msgspec.structs.replace(c.state._facts, rank_info=info)"
    )
    unreachable = (
        "shared_memory.SharedBlock.address = property(lambda self: (('/proc/1/fd/99999', 1),) * 2)"  # as in a container
    )
    for difference in (elsewhere, unreachable):
        script.ok(difference)
        script.ok("c.push({'b': b, 'n': {'t': torch.ones(3)}})\nc.run('b[0] = rank', quiet=True)")
        assert script.value("[int(v[0] + v[-1]) for v in c.pull('b').values()]") == [(1 << 18) - 1, 1 << 18]
        assert script.value("c.pull('n', ranks=1)['t'].tolist(), b[0].item()") == ([1.0] * 3, 0)
        script.ok("c.scatter({'s': list(range(5))})")
        assert script.value("c.gather('s'), c.pull('s', ranks=1)") == ([0, 1, 2, 3, 4], [3, 4])
        answer = script.run("c.pull('nothing_there')")
        assert "Rank 0 cannot send 'nothing_there': NameError" in answer.message
    assert script.value("[v for v in c.client.results.values() if isinstance(v, bytes) and len(v) > 9999]") == []
    script.ok("c.state._facts = msgspec.structs.replace(c.state._facts, rank_info=places)")
    script.ok("shared_memory.SharedBlock.address = address")


def test_push_to_some_ranks(script: Script) -> None:
    script.ok("c.push({'only': 1}, ranks='1')")
    assert script.value("dict(c.run('\"only\" in globals()').values)") == {0: False, 1: True}


def test_status_is_a_table_of_ranks(script: Script) -> None:
    # A rank that is too busy to answer is reported as one that does not.
    idle = "s = c.status()\ns['state'].tolist(), s['cell'].isna().tolist()"
    assert until(lambda: script.value(idle) == (["idle", "idle"], [True, True]), timeout=60)
    assert script.value("list(s.columns)") == [
        "rank", "host", "pid", "device", "backend", "state", "memory", "device_memory", "cell",
    ]  # fmt: skip
    assert script.value("s['rank'].tolist(), s['device'].tolist(), s['backend'].tolist()") == (
        [0, 1],
        ["cpu", "cpu"],
        ["shm", "shm"],
    )
    assert script.value("s['pid'].tolist() == list(c.run('import os\\nos.getpid()').values.values())") is True
    assert script.value("(s['memory'] > 50e6).all().item(), (s['device_memory'] == 0).all().item()") == (True, True)


def test_status_reports_what_ranks_do(script: Script) -> None:
    script.ok("h = c.run_noblock('import time\\ntime.sleep(600)', cell=41, quiet=True)")
    reported = ([41, 41], ["running line 2"] * 2)
    look = "s = c.status()\ns['cell'].dropna().tolist(), s['state'].tolist()"
    assert until(lambda: script.value(look) == reported, timeout=60)
    script.ok("h.cancel()")
    assert "KeyboardInterrupt" in script.run("h.result(100)").kinds


def test_cluster_repr_describes_it(script: Script) -> None:
    assert script.value("repr(c)") == "Cluster('script', 2 ranks, shm, running)"
    assert script.value("axon_nb.current_cluster() is c, c.running, c.ranks, c.backend, c.engines") == (
        True,
        True,
        [0, 1],
        "shm",
        "axon",
    )


def test_pause_is_for_gpus_and_ends_with_the_next_cell(script: Script) -> None:
    refused = script.run("from axon_nb.magics.distributed import SUBCOMMANDS\nSUBCOMMANDS['pause']('')")
    assert refused.kinds[0] == "UsageError"
    assert refused.message == "%distributed pause gives back memory of GPUs, and these ranks compute on CPUs."
    script.ok("c.state.is_paused = True")  # as on NCCL
    cell = "t = torch.ones(1); dist.all_reduce(t)\nt.item()"
    assert script.value(f"c.run({cell!r})[1]") == 2.0
    assert script.value("c.state.is_paused") is False


def test_html_displays_become_text_in_scripts(script: Script) -> None:
    cell = "import pandas as pd\npd.DataFrame({'column': [71]})"
    out = script.ok(f"c.run({cell!r}, ranks=[1], show_value=True)").out
    assert out.startswith("[rank 1]\n")
    assert "column" in out
    assert "71" in out


def test_stop_can_be_called_twice_and_start_again(script: Script) -> None:
    script.ok("before = [p.pid for p in c.rank_info]\nc.stop()\nc.stop()")
    assert script.value("c.running, 'was stopped' in repr(c)") == (False, True)
    assert not [process for process in script.others() if process.pid in script.value("before")]
    for call in ("c.run('1')", "c.push({'x': 1})", "c.pull('rank')", "c.run_noblock('1')"):
        answer = script.run(call)
        assert answer.kinds[0] == "ClusterLostError"
        assert "was stopped" in answer.message
    assert script.run("axon_nb.current_cluster()").kinds[0] == "NoClusterError"
    assert script.value("c.status()['state'].tolist()") == ["gone", "gone"]
    script.ok("c = axon_nb.start(2, devices='cpu', name='script')")
    assert script.value("dict(c.run('rank').values)") == {0: 0, 1: 1}


def missing_words(view: str, text: str) -> list[str]:
    """What each view says of two ranks, and this text does not."""
    words = {
        "timeline": ("Timeline, ", "2 ranks, ", "  rank 1: ", "communicating "),
        "watch": ("2 ranks, no cell is running", "  rank 1: idle; "),
        "memory": ("model, optimizer: memory of 2 ranks", "  rank 1: "),
        "shards": ("model: ", "weight"),
        "cell": ("In [", "rank 1: "),
    }
    return [word for word in words[view] if word not in text]


@pytest.mark.timeout(300)
def test_script_shows_views_as_text(script: Script) -> None:
    script.ok(f"c.run({MODEL!r}, quiet=True)")
    for view, names in {"timeline": "", "watch": "", "memory": "'model', 'optimizer', ", "shards": "'model', "}.items():
        shown: list[str] = []

        def complete(view: str = view, names: str = names, shown: list[str] = shown) -> bool:
            shown.append(script.ok(f"_ = axon_nb.show.{view}({names}cluster=c)").out)
            return not missing_words(view, shown[-1])

        # A rank that is too busy to answer is reported as one that does not.
        assert until(complete, timeout=240), shown[-1]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_terminal_ipython_shows_views_as_text(tmp_path: Path) -> None:
    arguments = ["--no-banner", "--colors=NoColor", "-c", TERMINAL.replace("MODEL", repr(MODEL))]
    code = f"import IPython\nIPython.start_ipython({arguments!r})"
    run = run_script(code, timeout=150, IPYTHONDIR=str(tmp_path))
    assert run.code == 0, run.out + run.err
    parts = dict(part.split("\n", 1) for part in run.out.split("VIEW ")[1:])
    assert list(parts) == ["timeline", "watch", "memory", "shards", "cell"], run.out + run.err
    for view, text in parts.items():
        assert not missing_words(view, text), text
    assert run.left() == []
