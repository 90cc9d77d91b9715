"""Output of ranks as a front end gets it, late lines and the user's threads included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kernel.cells.labelled import merged, ranks_of
from tests.support.kernel import Kernel

_HOLDS = """
import axon_nb.cluster.output.cell_output as t_lines, axon_nb.cluster.output.parser as t_values
t_holds_before = t_lines.HOLD_S, t_values._VALUE_HOLD_S
t_lines.HOLD_S = t_values._VALUE_HOLD_S = 60.0
"""
_AS_BEFORE = "t_lines.HOLD_S, t_values._VALUE_HOLD_S = t_holds_before"

# A small message need not wait for its receiver: on shared memory its sender goes on.
RECEIVES_LATER = """%%distributed
import os, threading, time
got = torch.zeros(4_000_000)
def receive():
    while not os.path.exists({!r}):
        time.sleep(0.01)
    dist.recv(got, 0)
if rank == 1:
    receiver = threading.Thread(target=receive)
    receiver.start()
if rank == 0:
    dist.send(torch.ones(4_000_000), 1)"""
WAITS_IN_A_RING = """%%distributed
import threading, time
from axon_nb.engine.kernel.control import user_threads
from concurrent.futures import ThreadPoolExecutor
from torch.utils.data import DataLoader
pool = ThreadPoolExecutor(1)
pool.submit(time.time).result()
for number, batch in enumerate(DataLoader(torch.arange(8), num_workers=1)):
    if number == 2 and rank in (2, 3):
        t_running, t_counted = threading.active_count() - 1, user_threads()
        dist.recv(torch.zeros(1), 5 - rank)"""


@pytest.fixture
def holding(kernel: Kernel) -> Iterator[Kernel]:
    """The kernel, where a line waits a minute, and not a moment, for other ranks to print the same."""
    kernel.ok(_HOLDS)
    yield kernel
    kernel.ok(_AS_BEFORE)


def test_stderr_stays_stderr_and_is_labelled(holding: Kernel) -> None:
    reply = holding.ok("%%distributed\nimport sys\nprint('out')\nprint('err', file=sys.stderr)")
    assert reply.stdout.splitlines() == ["[ranks 0-3] out"]
    assert reply.stderr.splitlines() == ["[ranks 0-3] err"]


def test_first_line_arrives_while_the_cell_runs(holding: Kernel, tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    request = holding.submit(
        "%%distributed\nimport os, time\nprint('early')\n"
        f"while not os.path.exists({str(shown)!r}): time.sleep(0.01)\nprint('late')"
    )
    holding.wait_for_output(request, "early")
    shown.touch()
    reply = holding.collect(request)
    texts = [text for _, kind, text in reply.arrivals if kind == "stream"]
    assert texts == ["[ranks 0-3] early\n", "[ranks 0-3] late\n"]


def test_progress_bar_does_not_consume_the_output_limit(kernel: Kernel) -> None:
    reply = kernel.ok(
        "%%distributed --ranks 0\nimport sys\n"
        "for i in range(3000):\n    sys.stderr.write(f'\\rstep {i} ' + '#' * 990)\n"
        "print('all of it')"
    )
    shown = "\n".join([reply.stdout, reply.stderr, *(d.get("text/plain", "") for d in reply.displays)])
    assert "[rank 0] all of it" in shown
    assert "step 2999" in shown
    assert "lines" not in shown.replace("all of it", ""), "nothing was cut"


def test_tqdm_is_one_display_updated_in_place(kernel: Kernel) -> None:
    reply = kernel.ok(
        "%%distributed\nimport time\nfrom tqdm import tqdm\n"
        "for i in tqdm(range(20), desc='steps', ncols=60):\n    time.sleep(0.02)"
    )
    bars = [d for d in reply.displays if "steps" in d.get("text/plain", "")]
    assert len(bars) == 1
    lines = bars[0]["text/plain"].splitlines()
    assert 1 <= len(lines) <= 4
    assert all("100%" in line for line in lines)
    assert "steps" not in reply.stderr


def test_dataframes_keep_their_html(holding: Kernel) -> None:
    reply = holding.ok("%%distributed --ranks 0,2\nimport pandas as pd\npd.DataFrame({'a': [1, 2]})")
    assert reply.lines() == ["[ranks 0,2]"]
    assert len(reply.displays) == 1
    assert "<table" in reply.displays[0]["text/html"]


def test_matplotlib_figures_arrive_as_images(kernel: Kernel) -> None:
    reply = kernel.ok("%%distributed --ranks 1\nimport matplotlib.pyplot as plt\nplt.plot([1, 2, 3])\nplt.show()")
    pictures = [d for d in reply.displays if "image/png" in d]
    assert len(pictures) == 1
    assert "[rank 1]" in reply.lines()


def test_plotly_figures_keep_their_mime_type(kernel: Kernel) -> None:
    reply = kernel.ok(
        "%%distributed --ranks 0\nimport plotly.graph_objects as go\n"
        "go.Figure(go.Scatter(y=[1, 2])).show('plotly_mimetype')"
    )
    assert [d for d in reply.displays if "application/vnd.plotly.v1+json" in d]
    reply = kernel.ok("%%distributed --ranks 0\ngo.FigureWidget()")
    assert (reply.displays, "FigureWidget({" in reply.stdout) == ([], True), "plotly's script would be in the notebook"


@pytest.mark.parametrize("where", ["stdout", "stderr"])
def test_ten_megabytes_of_output_are_bounded(kernel: Kernel, where: str) -> None:
    reply = kernel.ok(
        "%%distributed\nimport sys\nfor i in range(100_000):\n"
        f"    print('x' * 90, i, file=sys.{where})\nprint('end of it')",
        timeout=120,
    )
    shown = len(reply.stdout) + len(reply.stderr)
    assert shown < 3_000_000
    assert "not shown: the limit is 1 MiB per cell" in reply.stderr
    assert "99999" in reply.stdout + reply.stderr
    assert "end of it" in reply.stdout
    assert kernel.ok("%%distributed\n'alive'").lines() == ["[ranks 0-3] 'alive'"]


def test_display_is_updated_by_its_rank(kernel: Kernel) -> None:
    reply = kernel.ok(
        "%%distributed --ranks 0-1\nfrom IPython.display import display, HTML\n"
        "h = display(HTML(f'<b>one {rank}</b>'), display_id=True)\nh.update(HTML(f'<b>two {rank}</b>'))"
    )
    assert sorted(d["text/html"] for d in reply.displays) == ["<b>two 0</b>", "<b>two 1</b>"]


def test_empty_cell_prints_nothing(kernel: Kernel) -> None:
    reply = kernel.ok("%%distributed\npass")
    assert (reply.stdout, reply.stderr, reply.displays, reply.result) == ("", "", [], "")


UPDATES = """%%distributed
h = display("start", display_id="a")
for i in range(1000):
    h.update(i)
print("\\r1/2", end="")
print("\\r2/2")
"""


def test_cell_that_the_server_sends_ends_with_the_last_updates(kernel: Kernel) -> None:
    """As jupyter-server-nbmodel does, which ignores updates; here the process that started the kernel is the sender."""
    assert kernel.ok(UPDATES).displays != []
    kernel.ok("import os\nos.environ['JPY_SESSION_NAME'] = 'x.ipynb'")
    try:
        reply = kernel.ok(UPDATES)
    finally:
        kernel.ok("del os.environ['JPY_SESSION_NAME']")
    assert reply.displays == []
    assert reply.lines() == ["[ranks 0-3] 'start'", "[ranks 0-3] 2/2", "[ranks 0-3] 999"]


def test_what_is_printed_through_an_own_stdout_appears_in_its_cell(kernel: Kernel) -> None:
    reply = kernel.ok(
        "%%distributed --ranks 0-1\nimport sys\n"
        "class T_Quiet:\n"
        "    def __init__(self, stream): self.stream = stream\n"
        "    def write(self, text): return self.stream.write(text)\n"
        "    def flush(self): pass\n"
        "t_stdout = sys.stdout\nsys.stdout = T_Quiet(sys.stdout)\nprint('now')"
    )
    then = kernel.ok("%%distributed --ranks 0-1\nprint('then')\nsys.stdout = t_stdout")
    assert (reply.lines(), then.lines()) == (["[ranks 0-1] now"], ["[ranks 0-1] then"])
    for mute in ("sys.stdout = open('/dev/null', 'w')", "sys.stdout = sys.stderr = sys.__stdout__"):
        kernel.run(f"%%distributed --ranks 0-1\nimport os\nt_stderr = sys.stderr\n{mute}\nif rank: 1 / 0")
        back = kernel.ok(
            "%%distributed --ranks 0-1\nos.system('echo child; sleep 0.3')\n"
            "sys.stdout, sys.stderr = t_stdout, t_stderr; print('back')"
        )
        assert back.lines() == ["[ranks 0-1] child", "[ranks 0-1] back"], mute


def test_output_at_the_end_has_the_same_order_in_equal_runs(new_kernel: Callable[..., Kernel]) -> None:
    kernel = new_kernel(AXON_NB_OUTPUT_AT_END="1")
    kernel.ok("%load_ext axon_nb\n%distributed start -n 2")
    cell = (
        "%%distributed\nimport sys, time\nfor step in range(3):\n    time.sleep(0.3 * (rank == {late}))\n"
        "    print('step', step)\n    print(rank, 'has', step, file=sys.stderr if step == 2 else sys.stdout)\nrank"
    )
    first, second = (kernel.ok(cell.format(late=late)) for late in (0, 1))
    assert [text for _, _, text in first.arrivals] == [text for _, _, text in second.arrivals]
    assert [line for line in first.stdout.splitlines() if "step" in line] == [f"[ranks 0-1] step {n}" for n in range(3)]


@pytest.mark.parametrize(
    ("shown", "lines"),
    [
        ("[ranks 0-1] a\n[rank 3] a\n[rank 2] a\n", ["[ranks 0-3] a"]),
        ("[rank 0] a\n[rank 0] b\n[rank 1] a\n[rank 1] b\n", ["[ranks 0-1] a", "[ranks 0-1] b"]),
        ("[rank 0] a\n[rank 0] a\n[rank 1] a\n[rank 1] a\n", ["[ranks 0-1] a", "[ranks 0-1] a"]),
        ("[rank 0] a\n[rank 0] a\n[rank 1] a\n", ["[ranks 0-1] a", "[rank 0] a"]),
        ("[rank 0] a\n[ranks 0-1] b\n[rank 1] a\n", ["[rank 0] a", "[ranks 0-1] b", "[rank 1] a"]),
        ("[rank 0] a\nthe notebook's\n[rank 1] a\n", ["[rank 0] a", "the notebook's", "[rank 1] a"]),
        ("[rank 0] a\n         b\n[rank 1] a\n         b\n[rank 2] a\n", ["[ranks 0-1] a", f"{'':12}b", "[rank 2] a"]),
        ("[ranks 0,2]\n[rank 1]\n[rank 3] \n", ["[ranks 0-2]", "[rank 3] "]),
        ("", []),
        ("\n[rank 0\n", ["", "[rank 0"]),
    ],
)
def test_late_lines_of_several_ranks_are_merged(shown: str, lines: list[str]) -> None:
    assert merged(shown) == lines
    assert merged("\n".join(lines)) == lines


def test_ranks_of_a_line() -> None:
    assert ranks_of("[ranks 0,2-4] [rank 9] text") == {0, 2, 3, 4}
    assert ranks_of("[rank 12]") == {12}
    assert ranks_of(" [rank 1] text") == set()


def test_late_user_thread_is_waited_for_after_its_rank_finished(kernel: Kernel, tmp_path: Path) -> None:
    come = tmp_path / "come"
    request = kernel.submit(RECEIVES_LATER.format(str(come)))
    kernel.wait_for_output(request, "rank 0 has been in send")
    come.touch()
    assert kernel.collect(request).ok
    assert kernel.ok("%%distributed --ranks 1\nreceiver.join(60)\ngot.mean().item()").lines() == ["[rank 1] 1.0"]


def test_library_threads_are_not_waited_for(kernel: Kernel) -> None:
    """Those of a data loader and of a pool without work run on each rank here."""
    reply = kernel.run(WAITS_IN_A_RING)
    assert "rank 2 waits in recv at line 11 for rank 3; rank 3 waits in recv at line 11 for rank 2" in reply.traceback
    # A rank with a user's thread would have been waited for for 30 s; how long it took says little on a busy machine.
    counted = kernel.ok("%%distributed --ranks 2,3\nt_running >= 2, t_counted").lines()
    assert counted == ["[ranks 2-3] (True, [])"]
    kernel.ok("%%distributed\npool.shutdown()\ndist.all_reduce(torch.ones(1))")
