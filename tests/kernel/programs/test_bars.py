"""Progress bars that would be widgets in a notebook are text bars of ranks, and widgets are shown as text."""

from __future__ import annotations

import pytest

from tests.support.kernel import Kernel

WIDGET = "application/vnd.jupyter.widget-view+json"
BARS = {
    "tqdm.auto": ("from tqdm.auto import tqdm\nfor i in tqdm(range(30), desc='steps'): time.sleep(0.02)", "30/30"),
    "tqdm.notebook": (
        "from tqdm.notebook import tqdm\nfor i in tqdm(range(30), desc='steps', display=True): time.sleep(0.02)",
        "30/30",
    ),
    "trange": ("from tqdm.notebook import trange\nfor i in trange(30, desc='steps'): time.sleep(0.02)", "30/30"),
    "rich": ("from rich.progress import track\nfor i in track(range(30), 'steps'): time.sleep(0.02)", "100%"),
}


@pytest.mark.parametrize("bar", BARS)
def test_progress_bar_moves_and_ends(kernel: Kernel, bar: str) -> None:
    if bar == "rich":
        pytest.importorskip("rich")
    code, end = BARS[bar]
    reply = kernel.ok(f"%%rank 1\nimport time\n{code}")
    texts = [data.get("text/plain", "") for data in reply.displays]
    assert not [data for data in reply.displays if WIDGET in data]
    shown = "\n".join(texts) + reply.stdout + reply.stderr
    assert "steps" in shown
    assert end in shown


def test_other_widgets_are_shown_as_text(kernel: Kernel) -> None:
    reply = kernel.ok("%%rank 2\nimport ipywidgets\nipywidgets.IntSlider(value=3)")
    assert reply.lines() == ["[rank 2] IntSlider(value=3) (a widget of a rank: its text)"]
    assert not [data for data in reply.displays if WIDGET in data]


def test_clear_output_affects_one_rank_only(kernel: Kernel) -> None:
    reply = kernel.ok(
        "%%distributed\nfrom IPython.display import clear_output\nprint('text of', rank)\ndist.barrier()\n"
        "import time; time.sleep(0.3)\n"
        "if rank == 0:\n    for step in range(3):\n        clear_output(wait=True)\n"
        "        print('step', step)\n        time.sleep(0.1)"
    )
    assert sorted(reply.after_clear().splitlines()) == [
        "[rank 0] step 2",
        *(f"[rank {rank}] text of {rank}" for rank in (1, 2, 3)),
    ]
