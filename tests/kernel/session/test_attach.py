"""A restarted notebook attaches to its cluster, which may be of another version."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from axon_nb.records.protocol.wire import PROTOCOL
from tests.support.kernel import Kernel, Reply
from tests.support.processes import footprint, until

pytestmark = pytest.mark.timeout(600)

MakeKernel = Callable[..., Kernel]

HANDLE = "__import__('axon_nb').cluster.current.get().running_cell"
TICKS = "import os, time\nwhile not os.path.exists('stop'):\n    print('tick', flush=True)\n    time.sleep(0.05)\n"
LEAVE = {
    "graceful restart": lambda kernel: kernel.restart(now=False),
    "forced restart": lambda kernel: kernel.restart(now=True),
    "SIGKILL": lambda kernel: kernel.come_back(),
}

ANOTHER = "import axon_nb.records.protocol.wire as t_version\nt_version.PROTOCOL += 1"
"""From here on this kernel speaks another protocol than the processes that run already."""


def start(kernel: Kernel, n: int = 2) -> None:
    kernel.ok("%load_ext axon_nb")
    kernel.ok(f"%distributed start -n {n}")


def leave_during(kernel: Kernel, code: str, until_text: str, how: str = "SIGKILL") -> None:
    """Run a cell, let the kernel go away when it has printed `until_text`, and get a fresh one."""
    request = kernel.submit(f"%%distributed\n{code}")
    kernel.wait_for_output(request, until_text)
    LEAVE[how](kernel)
    kernel.ok("%load_ext axon_nb")


def end_meanwhile(kernel: Kernel, request: str, folder: Path, *files: str) -> None:
    """Let the kernel go away, then the cell go on until it has made `files`, and get a fresh kernel."""
    kernel.wait_for_output(request, "tick")
    kernel.kill()
    (folder / "stop").touch()
    assert until(lambda: all((folder / name).exists() for name in files))
    kernel.restart(now=True)
    kernel.ok("%load_ext axon_nb")


def attach(kernel: Kernel, wanted: str) -> Reply:
    """Attach, and collect what appears in that cell until it holds `wanted`, long after its own end if need be."""
    request = kernel.submit("%distributed attach")
    reply = kernel.collect(request)
    kernel.follow(request, reply, until=lambda: wanted in reply.stdout + reported(reply))
    return reply


def reported(reply: Reply) -> str:
    """What the cell wrote to stderr, without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", reply.stderr)


def numbers(reply: Reply, word: str) -> list[int]:
    return [int(number) for number in re.findall(rf"\] {word} (\d+)$", reply.stdout, re.MULTILINE)]


@pytest.mark.parametrize("how", LEAVE)
def test_running_cell_returns_and_ends_in_the_new_kernel(new_kernel: MakeKernel, tmp_path: Path, how: str) -> None:
    kernel = new_kernel()
    start(kernel)
    counting = (
        "import os, time\ni = 0\nwhile not os.path.exists('stop'):\n"
        "    print('tick', i, flush=True); i += 1; time.sleep(0.05)\ndist.barrier()\nprint('met')"
    )
    leave_during(kernel, counting, "tick 3", how)
    request = kernel.submit("%distributed attach")
    reply = kernel.collect(request)
    assert reply.lines()[0] == "Cell In[3] is still running on ranks 0-1. Its output continues here."
    assert "CellHandle(running on ranks 0-1)" in reply.result
    kernel.follow(request, reply, until=lambda: max(numbers(reply, "tick"), default=0) > 20)
    (tmp_path / "stop").touch()
    kernel.follow(request, reply, until=lambda: "is done" in reply.stdout)
    assert {line for line in reply.lines() if "met" in line} <= {"[rank 0] met", "[rank 1] met", "[ranks 0-1] met"}
    assert " met" in reply.stdout
    assert re.fullmatch(r"Cell In\[3\] is done: [\d.]+ s\.", reply.lines()[-1])
    for rank in "01":
        seen = _ticks_of(reply, rank)
        assert seen == [*range(len(seen))], "nothing is lost, nothing twice"
    assert kernel.ok(f"{HANDLE}.result(100)").result.startswith("CellResult of ranks 0-1")
    assert kernel.ok("%%distributed\nt = torch.ones(1); dist.all_reduce(t); t.item()").lines() == ["[ranks 0-1] 2.0"]


def _ticks_of(reply: Reply, rank: str) -> list[int]:
    labels = {f"[rank {rank}]", "[ranks 0-1]"}
    lines = [re.fullmatch(r"(\[.*?\]) tick (\d+)", line) for line in reply.lines()]
    return [int(line[2]) for line in lines if line and line[1] in labels]


def test_cell_that_ended_meanwhile_is_reported_with_output(new_kernel: MakeKernel, tmp_path: Path) -> None:
    kernel = new_kernel()
    start(kernel)
    code = f"{TICKS}print('last words')\nopen(f'ended{{rank}}', 'w').close()\nx = rank + 5"
    request = kernel.submit(f"%%distributed\n{code}")
    end_meanwhile(kernel, request, tmp_path, "ended0", "ended1")
    reply = attach(kernel, "is done")
    assert reply.lines()[0] == "Cell In[3] finished on ranks 0-1 while no notebook was connected."
    assert "[ranks 0-1] last words" in reply.lines()
    assert reply.result == ""
    assert sorted(kernel.ok("%%distributed\nx").lines()) == ["[rank 0] 5", "[rank 1] 6"]
    kernel.come_back()
    kernel.ok("%load_ext axon_nb")
    assert kernel.ok("%distributed attach").stdout == "", "what was reported once is not reported again"


def test_rank_that_failed_meanwhile_is_the_cause_and_releases_the_others(
    new_kernel: MakeKernel, tmp_path: Path
) -> None:
    kernel = new_kernel()
    start(kernel, 3)
    code = (
        f"{TICKS}if rank == 1:\n    open('failing', 'w').close()\n    raise ValueError('bug')\n"
        "open(f'waits{rank}', 'w').close(); dist.barrier()"
    )
    request = kernel.submit(f"%%distributed\n{code}")
    end_meanwhile(kernel, request, tmp_path, "failing", "waits0", "waits2")
    reply = attach(kernel, "waited in barrier")
    assert "Cell In[3] failed.\n[rank 1]" in reported(reply)
    assert "ValueError: bug" in reported(reply)
    assert "[ranks 0,2] waited in barrier at line 9" in reported(reply)
    assert kernel.run(f"{HANDLE}.result(100)").ename == "CellError"
    fresh = "g = dist.new_group([0, 2])\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()"
    assert kernel.ok(f"%%distributed\n{fresh}").lines() == ["[ranks 0-2] 3.0"]


def test_rank_that_died_meanwhile_is_reported_and_replaceable(new_kernel: MakeKernel) -> None:
    kernel = new_kernel()
    start(kernel, 3)
    before = footprint(kernel)
    waiting = "print('go', flush=True)\nif rank != 1: dist.barrier()\nwhile True: pass"
    request = kernel.submit(f"%%distributed\n{waiting}")
    kernel.wait_for_output(request, "go", ranks=range(3))
    kernel.come_back()
    os.kill(before.ranks[1], signal.SIGKILL)
    kernel.ok("%load_ext axon_nb")
    reply = attach(kernel, "`%distributed repair`")
    assert "rank 1 was killed by SIGKILL" in reported(reply)
    kernel.ok("%distributed repair")
    assert kernel.ok("%%distributed\nt = torch.ones(1); dist.all_reduce(t); t.item()").lines() == ["[ranks 0-2] 3.0"]


def test_cancel_interrupts_the_returned_cell(new_kernel: MakeKernel) -> None:
    kernel = new_kernel()
    start(kernel)
    leave_during(kernel, "print('go', flush=True)\nif rank == 0: dist.barrier()\nwhile True: pass", "go")
    request = kernel.submit("%distributed attach")
    reply = kernel.collect(request)
    assert kernel.value(f"{HANDLE}.done()") is False, "the notebook is usable meanwhile"
    cancel = kernel.submit("%distributed cancel")
    answer = kernel.collect(cancel)
    assert answer.lines() == ["Interrupted the cell on ranks 0-1."]
    if "continues below the cell that ran last" in reply.stdout:  # ipykernel before 6.29
        request, reply = cancel, answer
    kernel.follow(request, reply, until=lambda: " stopped." in reported(reply))
    assert "closed stream" not in reported(reply)
    assert "[rank 0] waited in barrier at line 3" in reported(reply)
    assert kernel.run(f"{HANDLE}.result(100)").ename == "CellInterrupt"
    assert kernel.ok("%distributed cancel").lines() == ["No cell is running."]
    assert kernel.ok("%%distributed\ndist.barrier()\n'fine'").lines() == ["[ranks 0-1] 'fine'"]


def test_deadlock_in_the_returned_cell_is_explained(new_kernel: MakeKernel) -> None:
    kernel = new_kernel()
    start(kernel)
    code = "import os, time\nprint('go', flush=True)\nif rank == 0:\n    dist.barrier()"
    leave_during(kernel, f"{code}\nelse:\n    dist.recv(torch.ones(1), 0)", "go")
    reply = attach(kernel, "CellError")
    sentence = "rank 0 waits in barrier at line 5 for rank 1; rank 1 waits in recv at line 7 for rank 0."
    assert sentence in reported(reply)
    assert kernel.ok("%%distributed\ndist.barrier()\n'fine'").lines() == ["[ranks 0-1] 'fine'"]


def test_only_recent_output_is_kept_and_truncation_is_reported(new_kernel: MakeKernel, tmp_path: Path) -> None:
    kernel = new_kernel()
    start(kernel)
    flood = "for i in range(20000): print('line', i)\nopen(f'ended{rank}', 'w').close()"
    request = kernel.submit(f"%%distributed\n{TICKS}{flood}")
    end_meanwhile(kernel, request, tmp_path, "ended0", "ended1")
    attach(kernel, "is done")
    text = kernel.ok(f"print({HANDLE}.result(100).text[0])").stdout
    assert re.match(r"… [\d,]+ lines \([\d.]+ kB\) printed before the notebook reconnected: discarded …\nline ", text)
    assert text.rstrip().endswith("line 19999")
    assert 50_000 < len(text) < 70_000
    kept = [int(line.split()[1]) for line in text.splitlines() if line.startswith("line ")]
    assert kept == list(range(kept[0], 20000))
    assert int(text.split()[1].replace(",", "")) > kept[0], "with the ticks"


def test_displays_and_value_of_the_returned_cell_are_shown(new_kernel: MakeKernel, tmp_path: Path) -> None:
    kernel = new_kernel()
    start(kernel)
    code = (
        "from IPython.display import HTML, display\nif rank == 0:\n    display(HTML('<b>seen</b>'))\n"
        f"    display(HTML('x' * 100000))\n{TICKS}rank * 7"
    )
    request = kernel.submit(f"%%distributed --out result\n{code}")
    kernel.wait_for_output(request, "tick", ranks=[0])
    kernel.come_back()
    kernel.ok("%load_ext axon_nb")
    request = kernel.submit("%distributed attach")
    reply = kernel.collect(request)
    (tmp_path / "stop").touch()
    kernel.follow(request, reply, until=lambda: "is done" in reply.stdout)
    assert any("<b>seen</b>" in display.get("text/html", "") for display in reply.displays)
    assert "1 display (100." in reported(reply)
    assert kernel.value(f"{HANDLE}.result(100).values") == {0: 0, 1: 7}


def test_kernel_killed_during_an_interrupt(new_kernel: MakeKernel) -> None:
    kernel = new_kernel()
    start(kernel)
    # Rank 0 ends the kernel itself when it is interrupted: so it is interrupted once.
    code = (
        "import os, time\nends_kernel = rank == 0\nfor _ in range(4):\n    try:\n"
        "        print('go', flush=True)\n        dist.barrier() if rank else time.sleep(600)\n"
        f"    except BaseException:\n        if ends_kernel: os.kill({kernel.pid}, 9)\n        ends_kernel = False"
    )
    request = kernel.submit(f"%%distributed\n{code}")
    kernel.wait_for_output(request, "go", ranks=[0, 1])
    kernel.interrupt()
    assert until(lambda: not kernel.manager.is_alive())
    kernel.restart(now=True)
    kernel.ok("%load_ext axon_nb")
    reply = attach(kernel, "Cell In[3] failed")
    assert "KeyboardInterrupt" in reported(reply)
    assert kernel.ok("%%distributed\ndist.barrier()\n'fine'").lines() == ["[ranks 0-1] 'fine'"]


HALF_WAY = {
    "an abort": "for rank in (0, 1): cluster.client.request(rank, AbortRequest()).result()",
    "an abort on one rank": "cluster.client.request(0, AbortRequest()).result()",
    "a rebuild on one rank": (
        "import time\nfrom axon_nb.cluster import rpc as remote\n"
        "remote.call(cluster.client, 1, RecoverAfterRepair(int(time.time()) + 9, replaced=False))\n"
        "while not cluster.client.request(1, CellsRequest()).result().rebuilding: pass"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", HALF_WAY)
def test_kernel_killed_during_a_recovery(new_kernel: MakeKernel, what: str) -> None:
    kernel = new_kernel()
    start(kernel)
    records = (
        "from axon_nb.records.protocol.cells import AbortRequest\n"
        "from axon_nb.records.protocol.cells import CellsRequest\n"
        "from axon_nb.records.protocol.recovery import RecoverAfterRepair\n"
    )
    kernel.ok(f"{records}cluster = __import__('axon_nb').cluster.current.get()\n{HALF_WAY[what]}")
    kernel.come_back()
    kernel.ok("%load_ext axon_nb\n%distributed attach")
    reply = kernel.ok("%%distributed\nt = torch.ones(1); dist.all_reduce(t); t.item()")
    assert reply.lines() == ["[ranks 0-1] 2.0"]


def test_running_cell_returns_with_late_replies(new_kernel: MakeKernel, tmp_path: Path) -> None:
    kernel = new_kernel()
    start(kernel)
    ranks = footprint(kernel).ranks
    leave_during(kernel, TICKS, "tick")
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    try:
        request = kernel.submit("%distributed attach")
        time.sleep(1.0)  # as on a machine that has other things to do
    finally:
        for pid in ranks:
            os.kill(pid, signal.SIGCONT)
    reply = kernel.collect(request)
    assert reply.lines()[0] == "Cell In[4] is still running on ranks 0-1. Its output continues here."
    (tmp_path / "stop").touch()
    kernel.follow(request, reply, until=lambda: "is done" in reply.stdout)


def test_engines_of_another_launcher_stop_after_an_attach() -> None:
    with Kernel() as kernel:
        kernel.ok("%load_ext axon_nb\n%distributed start -n 2 --engines local --devices cpu")
        pids = kernel.value("[place.pid for place in __import__('axon_nb').cluster.current.require('x').rank_info]")
        kernel.restart(now=True)
        kernel.ok("%load_ext axon_nb\n%distributed attach")
        kernel.ok("%distributed stop")
        assert until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), timeout=60)


def test_attach_to_ranks_of_another_protocol_is_refused(new_kernel: MakeKernel) -> None:
    kernel = new_kernel()
    kernel.ok("%load_ext axon_nb\n%distributed start -n 2")
    kernel.ok("%%distributed\nkept = 40 + rank")
    folder = kernel.value("str(__import__('axon_nb').cluster.current.get().connection.run_dir.path)")
    kernel.come_back()
    kernel.ok(f"%load_ext axon_nb\n{ANOTHER}")
    refused = kernel.run("%distributed attach")
    assert refused.ename == "UsageError"
    assert f"(protocol {PROTOCOL}), but this notebook has axon_nb" in refused.traceback
    assert f"(protocol {PROTOCOL + 1}). Run `%distributed start` to start new ranks." in refused.traceback
    # Ranks of an axon_nb that had no number yet.
    file = Path(folder) / "agent.json"
    info = json.loads(file.read_text())
    version = info.pop("version")
    file.write_text(json.dumps(info))
    refused = kernel.run("%distributed attach")
    assert "run an older axon_nb, but this notebook has axon_nb" in refused.traceback
    # The ranks were left alone: the same version gets them back.
    file.write_text(json.dumps({**info, "version": version}))
    kernel.ok("t_version.PROTOCOL -= 1\n%distributed attach")
    assert kernel.ok("%%distributed\nkept").lines() == ["[rank 0] 40", "[rank 1] 41"]


def test_start_works_where_attach_is_rejected(new_kernel: MakeKernel) -> None:
    kernel = new_kernel()
    kernel.ok("%load_ext axon_nb\n%distributed start -n 2")
    old = footprint(kernel).ranks
    kernel.come_back()
    kernel.ok(f"import os\nos.environ['AXON_NB_WARM_UP'] = '0'\n{ANOTHER}\n%load_ext axon_nb")
    assert kernel.run("%distributed attach").ename == "UsageError"
    kernel.ok("t_version.PROTOCOL -= 1")  # the ranks of this kernel import the number from the file
    kernel.ok("%distributed start -n 1")
    assert not set(footprint(kernel).ranks) & set(old)


def test_ranks_of_another_protocol_are_rejected(new_kernel: MakeKernel) -> None:
    kernel = new_kernel()
    kernel.ok(f"%load_ext axon_nb\n{ANOTHER}")
    refused = kernel.run("%distributed start -n 2")
    assert refused.ename == "StartError"
    assert "Rank 0 on " in refused.traceback
    assert "Install axon_nb" in refused.traceback
    kernel.ok("t_version.PROTOCOL -= 1\n%distributed start -n 2")
    assert kernel.ok("%%distributed\nrank").lines() == ["[rank 0] 0", "[rank 1] 1"]
