"""`%distributed slow` on real ranks, a collective past its group's timeout, and a rank that lost its GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.script import Script

COMPUTE = """
import time
dist.barrier()
start, end = time.monotonic(), time.thread_time() + 0.2
while time.thread_time() < end: pass
work = dist.all_reduce(torch.ones(1), async_op=True)
taken = time.monotonic() - start
work.wait()
taken
"""
SEND = """
import time
message = torch.ones(125_000)  # 500 kB: 40 ms at 100 Mbit/s
dist.barrier()
start = time.monotonic()
work = dist.all_reduce(message, async_op=True) if {collective} else None
if work is None:
    dist.send(message, 1) if rank == 0 else dist.recv(message, 0)
free = time.monotonic() - start
if work is not None:
    work.wait()
(float(message.sum()), time.monotonic() - start)
"""
DDP = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
model(torch.full((2, 4), float(rank))).sum().backward()
float(model.module.weight.grad.sum())
"""
COMMAND = "from axon_nb.magics.distributed import SUBCOMMANDS\nslow = SUBCOMMANDS['slow']"

LATE = "all_reduce has been in progress for 1801 s, and its group's timeout is 1800 s"
# As a rank on NCCL reports it; groups on CPUs end at their timeout by themselves.
REPORT = f"""
from axon_nb.engine.groups.state import current_groups
from axon_nb.engine.groups import flight_recorder
class NoGroups:
    rebuilt_at_ns = 0
    def __getattr__(self, name):
        return lambda *arguments, **options: [] if name in ("all", "abort") else 0
if rank == 1:
    current_groups().native = NoGroups()
flight_recorder.overdue = lambda native, content: {LATE!r} if late else ""
late = False
"""

PROBLEM = "Rank 1 cannot use cuda:0 any more (a lost context). Run `%distributed repair --ranks 1`."
# As a rank on NCCL reports it; there is no GPU to lose here.
LOSE = f"""
from axon_nb.engine.groups import recovery
from axon_nb.records.protocol.recovery import RebuildReport
real, calls = recovery.recover, []
def recover(epoch, **options):
    calls.append(epoch)
    if len(calls) <= failures:
        raise RuntimeError("as planned")
    recovery.recover = real
    return RebuildReport(0, 0, 0, (), lost_device={PROBLEM!r} if rank == 1 else "")
recovery.recover = recover
"""
FAIL = "c.run('if rank == 0: raise ValueError(1)\\ndist.barrier()', quiet=True)"
SUM = "t = torch.ones(1); dist.all_reduce(t)\nt.item()"


@pytest.fixture(scope="module", params=["shm", "gloo"])
def slow_script(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    """A script with 2 ranks and the command."""
    with Script(tmp_path_factory.mktemp("slow")) as script:
        script.ok(f"import axon_nb\nc = axon_nb.start(2, devices='cpu', backend={request.param!r}, name='slow')")
        script.ok(COMMAND)
        yield script
        script.ok("c.stop()")


@pytest.fixture
def slowed(slow_script: Script) -> Iterator[Script]:
    """The script, with nothing slowed afterwards."""
    yield slow_script
    slow_script.ok("slow('off')")


def values(script: Script, code: str) -> dict[int, object]:
    """What a cell returns on each rank."""
    result: dict[int, object] = script.ok(f"c.run({code!r}, quiet=True).values").value
    return result


def test_slow_rank_computes_factor_times_as_long_and_every_view_says_so(slowed: Script) -> None:
    assert "Slowed: rank 1 × 3." in slowed.ok("slow('--ranks 1 --factor 3')").out
    taken = values(slowed, COMPUTE)[1]
    assert isinstance(taken, float)
    assert taken >= 0.59  # of 0.2 s of computing
    assert "slowed: rank 1 × 3" in str(slowed.ok("c._repr_mimebundle_()[0]['text/plain']").value)
    assert "Slowed: rank 1 × 3. `%distributed slow off` ends it." in slowed.ok("c.run('1')").out
    assert "Timeline, slowed: rank 1 × 3," in slowed.ok("_ = axon_nb.show.timeline(cluster=c)").out
    assert "Nothing is slowed." in slowed.ok("slow('off')").out
    assert "Slowed" not in slowed.ok("c.run('1')").out


def test_slow_link_delays_messages_and_collectives_as_said(slowed: Script) -> None:
    slowed.ok("slow('--link 0-1 --mbit 100 --latency 50ms')")
    sent, reduced = (values(slowed, SEND.format(collective=collective)) for collective in (False, True))
    assert sent[1][0] == 125_000  # type: ignore[index]
    assert sent[1][1] >= 0.09  # type: ignore[index]
    for rank in (0, 1):
        assert reduced[rank][0] == 250_000  # type: ignore[index]
        assert reduced[rank][1] >= 2 * 0.07  # type: ignore[index] # two rounds of half the message
    assert values(slowed, DDP) == {0: 16.0, 1: 16.0}


def test_cell_on_an_endless_link_can_be_aborted(slowed: Script) -> None:
    slowed.ok("slow('--all-links --latency 1h')")
    assert "CellTimeoutError" in slowed.run("c.run('dist.barrier()', timeout=2)").kinds
    slowed.ok("slow('off')")
    assert values(slowed, "dist.barrier(); rank") == {0: 0, 1: 1}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--ranks 5 --factor 2", "rank 5 does not exist: ranks are 0 to 1."),
        ("--ranks 1", "--ranks and --factor go together"),
        ("--link 0 --mbit 10", "--link: must name two ranks, such as 0-1; got '0'."),
        ("--mbit 10", "--mbit and --latency need --link A-B or --all-links."),
        ("--link 0-1 --latency soon", "--latency must be a number of seconds"),
    ],
)
def test_bad_input_of_slow_is_refused_in_one_sentence(slowed: Script, line: str, message: str) -> None:
    answer = slowed.run(f"slow({line!r})")
    assert answer.kinds[0] == "UsageError"
    assert message in answer.message
    assert "Nothing is slowed." in slowed.ok("slow('')").out


def test_cell_past_its_group_timeout_is_aborted(script: Script) -> None:
    script.ok(f"c.run({REPORT!r}, quiet=True)")
    answer = script.run("c.run('late = rank == 1\\nimport time\\nwhile late: time.sleep(0.1)', quiet=True)", timeout=60)
    assert f"rank 1: {LATE}. Nothing shows what it waits for." in answer.message
    script.ok("c.stop()\nc = axon_nb.start(2, devices='cpu', name='script')")


def test_rank_that_lost_its_device_is_reported_and_replaced(script: Script) -> None:
    script.ok(f"c.run({'failures = 0' + LOSE!r}, quiet=True)")
    assert PROBLEM in script.run(FAIL).err
    refused = script.run(f"c.run({SUM!r}, quiet=True)")
    assert "rank 1 is without a CUDA context; run `%distributed repair` to replace it" in refused.message
    assert script.value("c.repair().ranks") == (1,)
    assert script.value(f"dict(c.run({SUM!r}, quiet=True).values)") == {0: 2.0, 1: 2.0}


def test_repair_reports_lost_device_and_the_next_one_replaces_it(script: Script) -> None:
    script.ok(f"c.run({'failures = 3' + LOSE!r}, quiet=True)")
    assert "The process groups could not be rebuilt." in script.run(FAIL).err
    answer = script.run("c.repair()")
    assert answer.kinds[0] == "StartError"
    assert f"The process groups were not rebuilt. {PROBLEM}" in answer.message
    assert script.value("c.repair().ranks") == (1,)
    assert script.value(f"dict(c.run({SUM!r}, quiet=True).values)") == {0: 2.0, 1: 2.0}
