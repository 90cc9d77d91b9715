"""Bad input gets one clear sentence with the fix, and no traceback of ours."""

from __future__ import annotations

import pytest

from tests.support.kernel import Kernel

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
    ("%distributed begin", "has no command 'begin': `%distributed help` lists all."),
    ("%distributed start", "is running. Run `%distributed stop` to stop it"),
    ("%distributed status now", "has no 'now'"),
    ("%distributed config colour=red", "has no setting 'colour': run `%distributed config` to see all"),
    ("%distributed config keepalive=5", "has no setting 'keepalive': did you mean keep_alive?"),
    ("%distributed config watch_numbers=often", "watch_numbers must be off, on or stop; got 'often'."),
    ("%distributed config keep_alive", "takes key=value, such as keep_alive=300s; got 'keep_alive'."),
    (
        "%distributed config keep_alive=long",
        "keep_alive must be a number of seconds, such as 300 or 5min; got 'long'.",
    ),
    ("%distributed config warm_up=maybe", "warm_up must be on or off; got 'maybe'."),
    ("%push nothing_of_that_name", "The notebook has no variable 'nothing_of_that_name'"),
    ("%push", "NAME"),
    ("%pull nothing_of_that_name --ranks 0", "Rank 0 cannot send 'nothing_of_that_name': NameError"),
    ("%pull rank --as 1x", "is not a valid variable name"),
]


@pytest.mark.parametrize(("code", "sentence"), CASES, ids=[code.splitlines()[0] for code, _ in CASES])
def test_bad_input_is_reported_in_one_sentence(kernel: Kernel, code: str, sentence: str) -> None:
    reply = kernel.run(code)
    assert reply.status == "error"
    assert sentence in reply.traceback
    assert len(reply.traceback.splitlines()) == 1
    assert reply.ename == "UsageError"


START_CASES = [
    ("%distributed start -n 0", "-n must be at least 1; got 0."),
    ("%distributed start -n many", "must be an integer"),
    ("%distributed start -n 2 --backend nccl", "NCCL"),
    ("%distributed start --backend mpi", "--backend must be one of auto, shm, gloo, nccl; got mpi."),
    ("%distributed start --devices left", "--devices must be `auto`, `cpu` or GPU numbers"),
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
