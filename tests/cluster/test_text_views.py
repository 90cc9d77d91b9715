"""Views as text: in a plain Python process and in IPython's terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

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


def missing_words(view: str, text: str) -> list[str]:
    """What each view says of two ranks, and this text does not."""
    words = {
        "timeline": ("Timeline, 2 ranks, ", "  rank 1: ", "communicating "),
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
