"""How failures read: deaths, lost devices, missing packages, and which ranks count as stuck."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import requires
from typing import Any

import pytest
from packaging.requirements import Requirement

from axon_nb.cluster.failures import (
    RankError,
    cell_error,
    context_hint,
    crash_location,
    describe_death,
    hint_for,
    interrupt_error,
    last_line,
    lost_contexts,
    missing_package,
)
from axon_nb.cluster.ranks.health import Health
from axon_nb.cluster.ranks.transitions import Died
from axon_nb.errors import ClusterLostError
from axon_nb.records.protocol.agent import Exit

CRASH = """Fatal Python error: {what}

Thread 0x00007fd8f6ffd6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

{head} 0x00007fd932aa3b80{name} (most recent call first):
{frames}  File "/x/site-packages/IPython/core/interactiveshell.py", line 3823 in run_code
  File "/x/site-packages/IPython/core/interactiveshell.py", line 3762 in run_ast_nodes

Extension modules: numpy._core._multiarray_umath, torch._C (total: 2)
"""
CELL = '  File "<ipython-input-3-9f2c61d0a1b4>", line 3 in <module>\n'
CTYPES = '  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at\n'
ELSEWHERE = ", in another thread (threading wait)"
POOL = '  File "/usr/lib/python3.11/multiprocessing/pool.py", line 364 in map\n'
REDUCE = (
    '  File "/home/me/axon_nb/engine/groups/work.py", line 81 in wait\n'
    '  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce\n'
    '  File "/x/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper\n'
)
STEP = '  File "<ipython-input-3-9f2c61d0a1b4>", line 9 in step\n'
GLOO = "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  [enforce fail] 8 vs 4.\n\n"

ASSERT = (
    "CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
FULL = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 15.00 GiB"


def test_several_equal_deaths_use_the_plural() -> None:
    errors = {rank: RankError(rank, "died", "", "was killed by SIGKILL") for rank in (1, 2)}
    assert str(cell_error(errors, first=[2, 1])) == "ranks 1-2 were killed by SIGKILL"
    assert str(cell_error({1: errors[1]}, first=[1])) == "rank 1 was killed by SIGKILL"


def test_several_stuck_ranks_use_the_plural() -> None:
    reason = "is still in C code at line 2 and does not react to interrupts"
    errors = {rank: RankError(rank, "stuck", "", reason) for rank in range(3)}
    lines = interrupt_error(errors, range(4))._render_traceback_()
    assert "[ranks 0-2] are still in C code at line 2 and do not react to interrupts" in lines
    lines = interrupt_error({0: errors[0]}, range(4))._render_traceback_()
    assert f"[rank 0] {reason}" in lines


def test_rank_errors_are_quoted_verbatim() -> None:
    errors = {0: RankError(0, "died", "", "was killed"), **{r: RankError(r, "raised", "", "is odd") for r in (1, 2)}}
    assert "[ranks 1-2] is odd" in cell_error(errors, first=[0])._render_traceback_()


def crash(frames: str, *, what: str = "Aborted", head: str = "Current thread", name: str = "") -> str:
    return CRASH.format(what=what, head=head, frames=frames, name=name)


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ({"code": 3}, "exited with code 3"),
        ({"code": 0}, "exited with code 0"),
        ({"code": -15}, "was killed by SIGTERM"),
        ({"code": -250}, "was killed by signal 250"),
        ({"code": -9, "out_of_memory": True}, "was killed by SIGKILL: out of memory"),
        ({"code": -9, "out_of_memory": None}, "was killed by SIGKILL (out of memory?)"),
        ({"code": -9, "out_of_memory": False}, "was killed by SIGKILL"),
        ({"code": -15, "out_of_memory": None}, "was killed by SIGTERM"),
        ({"code": -15, "host": "far"}, "was killed by SIGTERM on the host 'far'"),
        ({"code": 0, "host": "far", "host_lost": "it is off"}, "was lost with its host 'far': it is off"),
        ({"code": 1, "last_output": "a\nlast one  \n\n"}, "exited with code 1; last line: last one"),
        ({"code": -11, "crash": crash(CTYPES + CELL)}, "was killed by SIGSEGV at line 3 (ctypes string_at)"),
        (
            {"code": -6, "last_output": GLOO, "crash": crash(REDUCE + CELL)},
            "was killed by SIGABRT at line 3 (distributed_c10d all_reduce); last line: what():  [enforce fail] 8 vs 4.",
        ),
    ],
)
def test_death_is_worded(event: dict[str, Any], text: str) -> None:
    assert describe_death(Exit(rank=0, pid=1, time_ns=0, **event)) == text


@pytest.mark.parametrize(
    ("report", "place"),
    [
        (crash(CELL), " at line 3"),
        (crash(STEP + CELL), " at line 3"),
        (crash(CTYPES + STEP + CELL), " at line 3 (ctypes string_at)"),
        (crash(POOL + CTYPES + STEP + CELL), " at line 3 (ctypes string_at … pool map)"),
        (crash(CELL, head="Thread"), " at line 3, in a thread of C code"),
        (crash(CELL, head="Thread").replace("Thread", "Current thread", 1), f" at line 3{ELSEWHERE}"),
        (crash(CELL, name=" [python3]"), " at line 3"),
        ("Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n  <no Python frame>\n", ""),
        ("no report", ""),
        ("", ""),
    ],
)
def test_crash_line(report: str, place: str) -> None:
    assert crash_location(report) == place


def test_crash_report_is_not_the_last_output_line() -> None:
    assert last_line("before\n" + crash(CELL)) == "before"
    assert last_line(crash(CELL)) == ""
    assert len(last_line("x" * 10_000)) == 300


@dataclass
class Cell:
    """A cell after which ranks 1 and 2 were given up on, as `Health` sees it."""

    ranks: list[int] = field(default_factory=lambda: [0, 1, 2])
    unfinished: list[int] = field(default_factory=lambda: [1, 2])
    errors: dict[int, RankError] = field(
        default_factory=lambda: {rank: RankError(rank, "stuck", "", "is busy") for rank in (1, 2)}
    )
    on_late_reply: Callable[[int], object] = lambda rank: None

    def reply(self, rank: int) -> None:
        self.unfinished.remove(rank)
        self.on_late_reply(rank)

    def on_death(self, rank: int, reason: str) -> None: ...

    def on_lost(self, reason: str) -> None: ...

    def interrupt(self) -> None: ...


def refused(health: Health, ranks: list[int]) -> str:
    with pytest.raises(ClusterLostError) as refused:
        health.ensure_available(ranks)
    return str(refused.value)


def test_stuck_ranks_are_reported_with_the_repair_command() -> None:
    health, cell = Health("default", list, size=3), Cell()
    health.track_stuck(cell)
    assert "Ranks 1-2 are still stuck in an earlier cell" in refused(health, [0, 1, 2])
    assert "`%distributed repair --ranks 1-2`" in refused(health, [0, 1, 2])
    assert "`%distributed repair --ranks 2`" in refused(health, [2])
    health.ensure_available([0])


@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_late_reply_clears_the_stuck_rank(moment: str) -> None:
    """Ranks are recorded when the groups are rebuilt and again when the cell ends; replies come from another thread."""
    health, cell = Health("default", list, size=3), Cell()
    for step in ("before", "between", "after"):
        if step == moment:
            cell.reply(1)
        if step != "after":
            health.track_stuck(cell)
    health.ensure_available([0, 1])
    assert "Rank 2 is still stuck" in refused(health, [0, 1, 2])


def _raised(rank: int, text: str) -> RankError:
    return RankError(rank, "raised", "AcceleratorError", text, ("line 1",))


@pytest.mark.parametrize(
    "text", [ASSERT, "CUDA error: an illegal memory access was encountered", "CUDA error: unspecified launch failure"]
)
def test_lost_cuda_context_is_reported_with_ranks_to_repair(text: str) -> None:
    errors = {2: _raised(2, text), 0: RankError(0, "aborted", "AbortedError", "waited in barrier")}
    assert lost_contexts(errors) == [2]
    error = cell_error(errors, first=[2, 0], hint=context_hint(errors))
    assert "Rank 2 lost its CUDA context" in "\n".join(error._render_traceback_())
    assert "`%distributed repair --ranks 2`" in "\n".join(error._render_traceback_())
    both = {1: _raised(1, text), 2: _raised(2, text)}
    assert context_hint(both).startswith("Ranks 1-2 lost their CUDA context")


@pytest.mark.parametrize(
    "error",
    [
        _raised(0, FULL),
        _raised(0, "device-side assert triggered"),  # no word of CUDA: any code may say so
        RankError(0, "aborted", "AbortedError", ASSERT),
        RankError(0, "died", "", "was killed by SIGKILL"),
    ],
)
def test_other_errors_are_not_lost_contexts(error: RankError) -> None:
    assert lost_contexts({0: error}) == []
    assert context_hint({0: error}) == ""


NCCL = "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:90, unhandled system error\nLast error:\n"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (
            NCCL + "Error while creating shared memory segment /dev/shm/nccl-AbCd (size 9637888)",
            "Shared memory is full",
        ),
        (NCCL + "Cuda failure 217 'peer access is not supported between these two devices'", "NCCL_P2P_DISABLE=1"),
        (NCCL + "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000", "`--backend gloo`"),
        (NCCL + "socketStartConnect: Connect to 10.0.0.2<38117> failed", "`NCCL_DEBUG=WARN`"),
    ],
)
def test_nccl_errors_have_a_fix(text: str, hint: str) -> None:
    found = hint_for([RankError(0, "raised", "DistBackendError", text, ("line 1",))])
    assert hint in found
    assert found.count("NCCL_DEBUG") == ("NCCL_DEBUG" in hint)


def raised(text: str, name: str = "ModuleNotFoundError") -> RankError:
    """How a cell fails on a rank."""
    return RankError(0, "raised", name, text, ("line 1",))


@pytest.mark.parametrize("module", ["accelerate", "deepspeed", "transformers"])
def test_missing_framework_is_reported_with_fix(module: str) -> None:
    errors = {0: raised(f"No module named '{module}'"), 1: RankError(1, "aborted", "", "waited in barrier")}
    hint = hint_for(errors.values())
    assert hint == (
        f"`{module}` is not installed where the ranks run. Run `pip install {module}` there, then run the cell again."
    )
    assert hint in "\n".join(cell_error(errors, first=[0], hint=hint)._render_traceback_())


def test_fix_installs_a_package_of_an_extra() -> None:
    extras = {Requirement(text).name for text in requires("axon_nb") or [] if "extra" in text}
    for module in ("accelerate", "cupy", "deepspeed", "pynvml", "tensorboard", "transformers"):
        _, _, command = missing_package(module).partition("`pip install ")
        assert command.partition("`")[0] in extras, module


def test_horovod_is_replaced_by_its_api() -> None:
    assert "import axon_nb.compat.horovod as hvd" in missing_package("horovod.torch")


@pytest.mark.parametrize(
    "error",
    [
        raised("No module named 'numpie'"),
        raised("No module named 'accelerate.tools'"),  # the package is there, and has no such part
        raised("No module named 'accelerate'", "ImportError"),
    ],
)
def test_unknown_packages_get_no_hint(error: RankError) -> None:
    assert hint_for([error]) == ""


@pytest.mark.parametrize(
    "text",
    [
        "No working C++ compiler found in torch._inductor.config.cpp.cxx: (None, 'g++')",
        "Unable to JIT load the cpu_adam op due to ninja not being installed.",
        "Ninja is required to load C++ extensions (pip install ninja to get it)",
    ],
)
def test_missing_compiler_is_reported(text: str) -> None:
    assert hint_for([raised(text, "RuntimeError")]).startswith("This cell compiles C++: install a compiler")


def test_death_that_ends_a_cell_is_not_announced_as_that_of_an_idle_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """The cell may end as soon as it knows."""
    cell = Cell()
    running = [cell]
    cell.on_death = lambda rank, reason: running.clear()  # type: ignore[method-assign]
    health = Health("default", lambda: list(running), size=3)
    health.feed(Died(2, "was killed by SIGKILL"))
    assert not running
    assert capsys.readouterr().err == ""
    health.feed(Died(1, "exited with code 3"))
    assert "Idle rank 1 exited with code 3. Run `%distributed repair`" in capsys.readouterr().err
