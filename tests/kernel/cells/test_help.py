"""What is said of the magics: completion, help, and one sentence for bad input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from axon_nb.magics.arguments import EXAMPLES
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

CASES = [
    ("%%distributed --rank 0\n1", "did you mean --ranks?"),
    ("%%distributed --frobnicate\n1", "has no '--frobnicate'"),
    ("%%distributed --ranks 7\n1", "rank 7 does not exist: ranks are 0 to 3."),
    ("%%distributed --ranks x\n1", "ranks"),
    ("%%rank\n1", "RANKS"),
    ("%%rank 9\n1", "rank 9 does not exist: ranks are 0 to 3."),
    ("%%distributed --timeout 0\n1", "must be a number of seconds above 0"),
    ("%%distributed --timeout soon\n1", "--timeout"),
    ("%%distributed --out 3x\n1", "not a valid variable name"),
    ("%%distributed --out 'a\n1", "No closing quotation"),
    ("%distributed start", "is running. Run `%distributed stop` to stop it"),
    ("%distributed status now", "has no 'now'"),
    ("%distributed config keepalive=5", "has no setting 'keepalive': did you mean keep_alive?"),
    ("%distributed config warm_up=maybe", "warm_up must be on or off; got 'maybe'."),
    ("%push nothing_of_that_name", "The notebook has no variable 'nothing_of_that_name'"),
    ("%push", "NAME"),
    ("%pull nothing_of_that_name --ranks 0", "Rank 0 cannot send 'nothing_of_that_name': NameError"),
    ("%pull rank --as 1x", "is not a valid variable name"),
]


def _commands(kernel: Kernel) -> list[str]:
    return list(kernel.value("list(get_ipython().magics_manager.registry['DistributedMagics'].commands())"))


def _magics(kernel: Kernel, kind: str) -> dict[str, str]:
    """The docstrings of our magics, by name."""
    found = kernel.value(
        f"{{name: magic.__doc__ or '' for name, magic in get_ipython().magics_manager.magics['{kind}'].items()"
        " if getattr(magic, '__module__', '').startswith('axon_nb.')}"
    )
    assert isinstance(found, dict)
    return found


def test_help_has_no_side_effects(kernel: Kernel) -> None:
    for name in _commands(kernel):
        reply = kernel.ok(f"%distributed {name} --help")
        assert reply.stdout.startswith(f"usage: %distributed {name}"), name
        assert name in EXAMPLES, f"magics/arguments.py has none for {name}"
        assert f"example:\n  {EXAMPLES[name]}" in reply.stdout
        assert f"%distributed {name}" in EXAMPLES[name]
    assert kernel.ok("%%distributed\n1").lines() == ["[ranks 0-3] 1"]


def test_every_magic_lists_its_options_and_an_example(kernel: Kernel) -> None:
    for name in _magics(kernel, "line").keys() - {"distributed"}:
        reply = kernel.ok(f"%{name} --help")
        assert reply.stdout.startswith(f"usage: %{name}"), name
        assert f"example:\n  {EXAMPLES[f'%{name}']}" in reply.stdout
    for name in _magics(kernel, "cell").keys() - {"local"}:
        reply = kernel.ok(f"%%{name} --help\n1")
        assert ("--memory" if name == "plan" else "--repeat") in reply.stdout
        assert f"example:\n  {EXAMPLES[f'%%{name}']}" in reply.stdout
    assert "Example: `%distributed start -n 4`" in kernel.ok("%distributed --help").stdout


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("%distributed start?", "%distributed start -n 4"),
        ("%distributed start ?", "%distributed start -n 4"),
        ("%distributed start -n 4??", "number of ranks"),
        ("%pull losses?", "%pull losses --ranks 0"),
    ],
)
def test_question_mark_shows_help(kernel: Kernel, code: str, said: str) -> None:
    assert said in kernel.ok(code).stdout


def test_help_lists_each_command_in_one_of_five_groups(kernel: Kernel) -> None:
    lines = kernel.ok("%distributed help").stdout.splitlines()
    assert [line for line in lines if line and " " not in line] == ["Run", "Look", "Repair", "Move", "Set"]
    listed = [line.split()[0] for line in lines if line.startswith("  ")]
    assert sorted(listed) == sorted({*_commands(kernel), "help"})
    assert listed[0] == "start"


def test_every_magic_has_a_docstring_with_an_example(kernel: Kernel) -> None:
    line, cell = _magics(kernel, "line"), _magics(kernel, "cell")
    assert {"distributed", "gather", "memory", "pull", "push", "scatter", "shards", "timeline", "watch"} <= set(line)
    assert {"distributed", "local", "plan", "rank"} <= set(cell)
    for sign, found in (("%", line), ("%%", cell)):
        for name, text in found.items():
            example = text.partition("Example: ")[2]
            assert f"`{sign}{name}" in example, name


@pytest.mark.parametrize(
    ("typed", "sentence"),
    {
        "%distributed statsu": "has no command 'statsu': did you mean `%distributed status`?",
        "%distributed repiar": "did you mean `%distributed repair`?",
        "%distributed xyzzy": "has no command 'xyzzy': `%distributed help` lists all.",
        "%distributed start --devcies cpu": "%distributed start has no '--devcies'; did you mean --devices?",
        "%distributed seed 0 --per-ranks": "did you mean --per-rank?",
        "%push t_x --rank 0": "%push has no '--rank'; did you mean --ranks?",
        "%pull t_x --shard": "did you mean --shards?",
        "%timeline --sav x.json": "did you mean --save?",
        "%%distributed --tiem\n1": "%%distributed has no '--tiem'; did you mean --time?",
        "%%rank 0 --quite\n1": "did you mean --quiet?",
    }.items(),
    ids=lambda value: value.partition("\n")[0],
)
def test_typo_suggests_the_nearest_name(kernel: Kernel, typed: str, sentence: str) -> None:
    reply = kernel.run(typed)
    assert reply.ename == "UsageError"
    assert sentence in reply.traceback


def test_no_command_shows_the_status_and_what_to_type(kernel: Kernel, new_kernel: Callable[..., Kernel]) -> None:
    reply = kernel.ok("%distributed")
    assert reply.stdout == "`%%distributed` runs a cell on all ranks; `%distributed help` lists all commands.\n"
    assert "running, 4 ranks" in reply.result
    other = new_kernel()
    assert other.ok("%load_ext axon_nb\n%distributed").lines() == [
        "No cluster is running. `%distributed start -n 4` starts one; `%distributed help` lists all commands."
    ]


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


@pytest.mark.parametrize(("code", "sentence"), CASES, ids=[code.splitlines()[0] for code, _ in CASES])
def test_bad_input_is_reported_in_one_sentence(kernel: Kernel, code: str, sentence: str) -> None:
    reply = kernel.run(code)
    assert reply.status == "error"
    assert sentence in reply.traceback
    assert len(reply.traceback.splitlines()) == 1
    assert reply.ename == "UsageError"


START_CASES = [
    ("%distributed start -n many", "must be an integer"),
    ("%distributed start -n 2 --backend nccl", "NCCL"),
    ("%distributed start --devices 99", "is not visible here"),
    (
        "%distributed start --engines nowhere",
        "must be axon or local; got nowhere. For ranks on other hosts, use `--hosts",
    ),
    ("%distributed start --interface lo", "Several hosts need `-n`"),
    ("%distributed start -n 2 --interface lo", "all ranks are on this host; use `--hosts"),
    ("%distributed start -n 2 --hosts join --interface none0", "this host has no such interface or address"),
    ("%distributed status", "`%distributed status` needs a cluster, but none is running"),
    ("%distributed stop", "needs a cluster, but none is running"),
    ("%distributed restart", "needs a cluster, but none is running"),
    ("%distributed attach nobody", "No cluster 'nobody' is running"),
    ("%push x", "%push"),
]


@pytest.fixture(scope="module")
def bare_kernel() -> object:
    """A kernel with the extension and no cluster."""
    with Kernel(env={"AXON_NB_WARM_UP": "0"}) as kernel:
        kernel.ok("%load_ext axon_nb\nx = 1")
        yield kernel


@pytest.mark.parametrize(("code", "sentence"), START_CASES, ids=[code for code, _ in START_CASES])
def test_bad_input_without_a_cluster_is_reported_in_one_sentence(bare_kernel: Kernel, code: str, sentence: str) -> None:
    reply = bare_kernel.run(code)
    assert reply.status == "error"
    assert sentence in reply.traceback
    assert len(reply.traceback.splitlines()) == 1


def test_code_that_does_not_parse_starts_no_ranks(bare_kernel: Kernel) -> None:
    reply = bare_kernel.run("%%distributed\nx = (1")
    assert "No rank has run the cell." in reply.traceback
    assert "needs a cluster, but none is running" in bare_kernel.run("%distributed status").traceback


def test_rank_cannot_start_a_cluster(kernel: Kernel) -> None:
    for command in ("start -n 2", "attach"):
        reply = kernel.run(f"%%distributed --ranks 1\n%load_ext axon_nb\n%distributed {command}")
        assert reply.traceback.startswith("[rank 1]"), "as any error of a rank"
        assert f"`%distributed {command.split()[0]}` was run on rank 1, inside a cell of the cluster" in reply.traceback
    assert kernel.ok("%%distributed\ndist.barrier()\n1").lines() == ["[ranks 0-3] 1"]
