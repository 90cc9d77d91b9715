"""`%%distributed --branch`, `--try` and `--compare`: what they show and restore, and options that do not fit."""

from __future__ import annotations

import pytest

from tests.support.kernel import Kernel

CELL = """%%distributed --branch t_lr=0.5,0.25 --keep best:loss --out t_branches
import axon_nb
t_w = 10.0
for step in range(4):
    t_w -= t_lr * t_w
    axon_nb.log(loss=t_w, step=step)
"""


def test_table_shows_each_value_with_its_curve(kernel: Kernel) -> None:
    reply = kernel.ok(CELL)
    assert reply.lines()[-1] == "Kept t_lr = 0.5: the cell ran with it once more."
    (bundle,) = (bundle for bundle in reply.displays if "text/html" in bundle)
    assert bundle["text/html"].count('alt="loss from ') == 2
    assert "finished, kept" in bundle["text/html"]
    assert "t_lr state" in " ".join(bundle["text/plain"].split())
    assert kernel.ok("%%rank 0\nprint(t_w)").lines() == ["[rank 0] 0.625"]
    assert kernel.value("t_branches.kept") == "0.5"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--keep best:loss", "--keep best:loss needs --branch"),
        ("--branch t_lr=1,2 --noblock", "--branch does not go with --noblock."),
        ("--branch t_lr=1,2 --try", "--branch does not go with --try."),
        ("--branch t_lr", "name a variable and its values, such as --branch lr=1e-3,3e-4."),
    ],
)
def test_options_that_do_not_go_together_get_one_sentence(kernel: Kernel, options: str, sentence: str) -> None:
    assert sentence in kernel.run(f"%%distributed {options}\npass").traceback


TROUBLES = {
    "raises": "1 / (rank - 1)",
    "is late": "time.sleep(1000 * rank)",
    "is interrupted": "print('go', flush=True)\ntime.sleep(1000)",
}
"""By what happens to the cell, its last lines."""


@pytest.fixture
def model(kernel: Kernel) -> Kernel:
    kernel.ok("%%distributed\nimport time\nt_model, t_runs = torch.nn.Linear(2, 1), 0")
    return kernel


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("option", ["--try", "--compare", "--branch t_k=1,2"])
def test_state_is_restored_however_the_cell_ends(model: Kernel, option: str, trouble: str) -> None:
    state = "%%distributed\n(t_runs, t_model.weight.sum().item())"
    before = model.ok(state).lines()
    limit = " --timeout 3" if trouble == "is late" else ""
    cell = f"%%distributed {option}{limit}\nt_runs += 1\nt_model.weight.data.add_(1)\nt_model(torch.ones(1, 2))"
    request = model.submit(f"{cell}\n{TROUBLES[trouble]}")
    if trouble == "is interrupted":
        model.wait_for_output(request, "go", ranks=range(4))
        model.interrupt()
    reply = model.collect(request)
    model.settle()
    is_row = option.startswith("--branch") and trouble != "is interrupted"
    assert reply.status == ("ok" if is_row else "error"), reply.traceback
    assert model.ok(state).lines() == before
