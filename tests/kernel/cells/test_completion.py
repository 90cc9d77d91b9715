"""Completions and help in cells: from a rank, whether it is idle, busy or silent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.completion import completed, expect_completed, expect_help, help_on, plain
from tests.support.kernel import Kernel
from tests.support.processes import until

SETUP = """%%distributed
import pandas
from torch import nn
t_net = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
t_net.head = nn.Linear(2, 2)
t_table = pandas.DataFrame({"alpha": [1], "beta two": [2]})
t_weights = {"first": 1, "second": 2, 7: 3}
if rank == 2:
    t_only_two = 1
def t_scale(values, *, factor=2.0):
    "Multiply the values."
    return values * factor
"""
WAIT = "import os, time\nwhile not os.path.exists({path!r}):\n    {work}"
KNOWN = """import asyncio
from axon_nb.cluster.session import current
while "t_scale" not in current.get().completion.names():
    await asyncio.sleep(0.05)
"""


@pytest.fixture(scope="module")
def typed(shared_kernel: Kernel) -> Kernel:
    """The shared kernel with something to complete on its ranks, and something else in the notebook."""
    shared_kernel.ok(SETUP)
    shared_kernel.ok("t_notebook = 1\nt_net = 'of the notebook'")
    return shared_kernel


@pytest.mark.parametrize(
    ("typed_so_far", "expected"),
    {
        "t_ne": "t_net",
        "t_net.he": "t_net.head",
        "t_net.head.wei": "t_net.head.weight",
        "t_net[0].out_f": "t_net[0].out_features",
        "t_table.alp": "t_table.alpha",
        "y = 2 * t_sca": "y = 2 * t_scale",
    }.items(),
)
def test_names_and_attributes_are_those_of_rank_0(typed: Kernel, typed_so_far: str, expected: str) -> None:
    expect_completed(typed, f"%%distributed --quiet\nx = 1\n{typed_so_far}", expected)


@pytest.mark.parametrize(("typed_so_far", "key"), [('t_weights["fi', "first"), ('t_table["bet', "beta two")])
def test_keys_and_columns_are_those_of_rank_0(typed: Kernel, typed_so_far: str, key: str) -> None:
    assert until(lambda: any(key in found for found in completed(typed, f"%%distributed\n{typed_so_far}")), timeout=100)


def test_cell_options_select_the_completing_rank(typed: Kernel) -> None:
    assert completed(typed, "%%distributed\nt_only_t") == []
    expect_completed(typed, "%%distributed --ranks 2-3\nt_only_t", "t_only_two")
    expect_completed(typed, "%%rank 2\nt_only_t", "t_only_two")


def test_plain_cell_completes_from_the_notebook(typed: Kernel) -> None:
    expect_completed(typed, "x = 1\nt_noteb", "t_notebook")
    assert completed(typed, "x = 1\nt_sca") == []


@pytest.mark.parametrize(
    ("typed_so_far", "expected"),
    {
        "%%distributed --ti": ["%%distributed --time", "%%distributed --timeout"],
        "%%rank 0 --qu": ["%%rank 0 --quiet"],
        "%distributed sta": ["%distributed stacks", "%distributed start", "%distributed status"],
        "%distributed start --back": ["%distributed start --backend"],
        "%distributed start --backend n": ["%distributed start --backend nccl"],
        "%distributed seed 0 --": ["%distributed seed 0 --per-rank"],
        "%distributed config warm": ["%distributed config warm_up=on"],
        "%distributed auto o": ["%distributed auto off", "%distributed auto on"],
        "%push t_notebook --r": ["%push t_notebook --ranks"],
    }.items(),
)
def test_options_and_commands_of_the_magics(typed: Kernel, typed_so_far: str, expected: list[str]) -> None:
    assert completed(typed, typed_so_far) == expected


@pytest.mark.parametrize("work", ["time.sleep(0.01)", "sum(range(1000))"])
def test_busy_ranks_complete(typed: Kernel, tmp_path: Path, work: str) -> None:
    flag = tmp_path / "flag"
    typed.ok(f"%%distributed --noblock --out t_job\n{WAIT.format(path=str(flag), work=work)}")
    expect_completed(typed, "%%distributed\nt_net.he", "t_net.head")
    flag.touch()
    typed.ok("_ = t_job.result(100)")


def test_kernel_replies_while_waiting_for_ranks(typed: Kernel, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    request = typed.submit(f"%%distributed\nprint('on')\n{WAIT.format(path=str(flag), work='time.sleep(0.01)')}")
    typed.wait_for_output(request, "on")
    expect_completed(typed, "%%distributed\nt_net.he", "t_net.head")
    expect_help(typed, "%%distributed\nt_scale", "Multiply the values.")
    expect_completed(typed, "t_noteb", "t_notebook")
    flag.touch()
    assert typed.collect(request).ok
    assert typed.ok("1 + 1").result == "2"


def test_unresponsive_rank_completes_from_the_last_snapshot(typed: Kernel) -> None:
    typed.ok(KNOWN)
    # C code that keeps Python's lock, for some seconds: whether it is over when the answer is due changes nothing.
    typed.ok("%%distributed --noblock --out t_job\nimport ctypes\nctypes.PyDLL(None).usleep(3_000_000)")
    expect_completed(typed, "%%distributed\nt_net.he", "t_net.head")
    expect_completed(typed, "%%distributed\nt_sca", "t_scale")
    assert until(
        lambda: any("first" in found for found in completed(typed, '%%distributed\nt_weights["fi')), timeout=100
    )
    typed.ok("_ = t_job.result(100)")


def test_help_describes_the_object_on_the_rank(typed: Kernel) -> None:
    expect_help(typed, "%%distributed\nt_scale", "factor=2.0", "Multiply the values.")
    expect_help(typed, "%%distributed\nt_scale", "return values * factor", detail=1)
    expect_help(typed, "%%distributed\nt_net", "Sequential")
    expect_help(typed, "t_net", "of the notebook")


def test_colabs_page_gets_help_in_the_form_that_it_reads(typed: Kernel) -> None:
    """Only the name of the kernel's class is Colab's here; `make platforms` drives the real class."""
    module = typed.value("(kernel := type(get_ipython().kernel)).__module__")
    typed.ok("kernel.__module__ = 'google.colab._kernel'")
    found: list[dict[str, Any]] = []

    def right() -> bool:
        found.append(help_on(typed, "%%distributed\nt_scale").get("application/json", {}))
        return "Multiply the values." in str(found[-1].get("docstring"))

    assert until(right, timeout=100), found[-1]
    typed.ok(f"kernel.__module__ = {module!r}")
    assert (found[-1]["found"], found[-1]["name"]) == (True, "t_scale")
    assert "\x1b" not in found[-1]["docstring"]


def test_a_question_mark_in_a_cell_shows_help(typed: Kernel) -> None:
    reply = typed.ok("%%rank 1\nt_scale?")
    assert reply.stdout.startswith("[rank 1] ")
    assert "ipykernel" not in reply.stdout
    assert "Multiply the values." in reply.stdout
    assert "return values * factor" in plain(typed.ok("%%rank 0\nt_scale??").stdout)


def test_names_are_completed_in_arguments_of_magics(typed: Kernel) -> None:
    typed.ok(KNOWN)
    expect_completed(typed, "%shards t_ne", "%shards t_net")
    expect_completed(typed, "%distributed diff t_wei", "%distributed diff t_weights")


def answered_while(kernel: Kernel, flag: Path, *, wait: bool) -> list[str]:
    """What the kernel answers, in its order: a completion asked for in a cell, which ends after it if `wait`."""
    flag.unlink(missing_ok=True)
    request = kernel.submit(f"%%distributed\nprint('on')\n{WAIT.format(path=str(flag), work='time.sleep(0.01)')}")
    kernel.wait_for_output(request, "on")
    kernel.client.complete("%%distributed\nt_sca")
    answers = [kernel.client.get_shell_msg(timeout=60)["msg_type"]] if wait else []
    flag.touch()
    answers += [kernel.client.get_shell_msg(timeout=60)["msg_type"] for _ in range(2 - len(answers))]
    kernel.settle()
    return answers


def test_missing_hook_keeps_help_and_delays_completions(typed: Kernel, tmp_path: Path) -> None:
    change = "%unload_ext axon_nb\nfrom axon_nb.magics import extension as front_end\n{}\n%load_ext axon_nb"
    lacking = "front_end.missing_hooks = lambda group, **_: ['gone'] if group == 'front_end.requests' else []"
    typed.ok(change.format(lacking))
    assert answered_while(typed, tmp_path / "flag", wait=False) == ["execute_reply", "complete_reply"]
    expect_help(typed, "%%distributed\nt_net", "Sequential")
    expect_completed(typed, "%%distributed\nt_sca", "t_scale")
    typed.ok(change.format("from axon_nb.records.hooks import missing_hooks\nfront_end.missing_hooks = missing_hooks"))
    assert answered_while(typed, tmp_path / "flag", wait=True) == ["complete_reply", "execute_reply"]


def test_unload_restores_jupyters_completion(typed: Kernel) -> None:
    typed.ok("%unload_ext axon_nb")
    assert completed(typed, "%%distributed\nt_sca") == []
    expect_help(typed, "%%distributed\nt_net", "of the notebook")
    typed.ok("%load_ext axon_nb")
    expect_completed(typed, "%%distributed\nt_sca", "t_scale")
