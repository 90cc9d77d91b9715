"""Planned communication and operations: what mock ranks do, what formulas say, and what functions cost in forks."""

from __future__ import annotations

import dataclasses
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from axon_nb import plan
from axon_nb.comm import World
from axon_nb.errors import NoClusterError, UsageError
from axon_nb.parallel.models import GPT, GPTConfig
from axon_nb.plan.process import fork_map, run_in_process
from axon_nb.plan.tracing.subject import ModelSource
from axon_nb.plan.tracing.trace import trace_model
from axon_nb.plan.traffic.parallelism import fill_buckets
from axon_nb.plan.traffic.plan import count_calls
from tests.plan.recording import begin, calls_of, recording
from tests.support.training.training_steps import CASES, odd, prepare, rows


def _recorded(world: Any, name: str) -> tuple[int, dict[tuple[str, str], tuple[int, int]]]:
    prepared = prepare(name)
    begin()
    prepared.step()
    return prepared.pp_rank, count_calls(calls_of(dist.get_rank()), prepared.axes)


@pytest.mark.parametrize("name", CASES)
def test_calls_and_bytes_match_a_mock_world(name: str) -> None:
    case = CASES[name]
    expected = case.plan()
    with recording():
        found = World.mock(case.ranks).run(_recorded, name)
    for pp_rank, operations in found:
        assert operations == expected.by_operation(pp_rank=pp_rank)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.sampled_from([torch.float32, torch.float64])), min_size=1, max_size=30),
    st.lists(st.integers(1, 300), min_size=1, max_size=3),
)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_buckets_match_torch(tensors: list[tuple[int, torch.dtype]], limits: list[int]) -> None:
    made = [torch.empty(count, dtype=dtype) for count, dtype in tensors]
    ours = fill_buckets([(tensor.nbytes, tensor.dtype) for tensor in made], limits)
    theirs, _ = dist._compute_bucket_assignment_by_size(made, limits)
    assert sorted(ours) == sorted(theirs)


def test_zero_paper() -> None:
    """Stage 2 sends 2 Psi as data parallelism does, stage 3 sends 3 Psi.

    Rajbhandari et al., ZeRO, 2020, sections 7.2.1 and 7.2.2.
    """

    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))

    x = torch.ones(2, 64)
    sent = {
        strategy: sum(row.sent_bytes for row in plan.communication(make, 8, strategy=strategy, inputs=x).rows)
        for strategy in ("ddp", "shard_grad_op", "full_shard")
    }
    psi = 4 * 64 * 64 * 4 * 7 / 8
    assert sent == {"ddp": 2 * psi, "shard_grad_op": 2 * psi, "full_shard": 3 * psi}


def test_megatron_paper() -> None:
    """Two all_reduces of b s h forward and two backward in each block; as many bytes with sequence parallelism.

    Shoeybi et al., Megatron-LM, 2019, section 3; Korthikanti et al., 2022, section 4.2.2.
    """
    config = GPTConfig(vocab=64, context=16, hidden=32, heads=8, blocks=5)
    found = plan.communication(config, mesh={"tp": 4}, batch=2)
    message = 2 * 16 * 32 * 4
    forward = found.select(operation="all_reduce", phase="forward")
    backward = found.select(operation="all_reduce", phase="backward")
    assert sum(row.calls for row in forward) == 2 * config.blocks
    assert sum(row.bytes for row in forward) == 2 * config.blocks * message
    assert sum(row.calls for row in backward) == 2 * config.blocks + 1, "and one for the logits"
    block = ("sum of the output", "positions of the input", "gradient of the input", "gradient of the output")
    parallel = plan.communication(config, mesh={"tp": 4}, batch=2, sequence=True, parallel_loss=True)
    inside = [row for row in parallel.rows if row.purpose in block]
    plain = [row for row in found.rows if row.purpose in block]
    # The embedding's output is gathered backward, and the last row is summed in parts, as it is without.
    assert sum(row.sent_bytes for row in inside) - sum(row.sent_bytes for row in plain) == message * 3 // 4


def test_pipeline_messages() -> None:
    """Each microbatch's b s h crosses a boundary once forward and once back: Narayanan et al., 2021, section 3.2."""
    config = GPTConfig(vocab=32, context=8, hidden=16, heads=4, blocks=6)
    found = plan.communication(config, mesh={"pp": 4}, batch=8, num_microbatches=8)
    message = 1 * 8 * 16 * 4
    for pp_rank in found.pp_ranks:
        ends = pp_rank in (0, 3)
        assert found.bytes("pp", "send", pp_rank=pp_rank) == (1 if ends else 2) * 8 * message
        assert found.calls("pp", "recv", pp_rank=pp_rank) == (1 if ends else 2) * 8


@pytest.mark.slow
def test_large_world_is_planned_quickly() -> None:
    config = GPTConfig(vocab=50304, context=2048, hidden=4096, heads=32, blocks=34)
    found = plan.communication(config, 1024, links="ib-ndr", wrap=None)
    elements = sum(p.numel() for p in _shapes(config))
    assert found.bytes("dp", "reduce_scatter") >= 4 * elements
    assert found.calls("dp", "all_gather") == 2 * (config.blocks + 2)
    assert found.seconds("dp") > 0


def _shapes(config: GPTConfig) -> list[nn.Parameter]:
    with torch.device("meta"):
        return list(GPT(config).parameters())


def test_without_inputs_bytes_are_the_same() -> None:
    known = plan.communication(odd, 2, strategy="ddp", inputs=rows())
    guessed = plan.communication(odd, 2, strategy="ddp")
    assert known.bytes() == guessed.bytes()
    assert "reverse parameter order" in guessed.notes[0]


def test_module_instance_is_not_modified() -> None:
    model = odd()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = plan.communication(model, 2, strategy="ddp", inputs=rows())
    assert found.by_operation() == plan.communication(odd, 2, strategy="ddp", inputs=rows()).by_operation()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_tp_that_shards_nothing_is_noted() -> None:
    found = plan.communication(odd, mesh={"tp": 2}, inputs=rows())
    assert found.rows == ()
    assert "tp shards no layer" in str(found)


def test_times_match_the_links() -> None:
    link = plan.Link("slow", 1e-3, 1e6)
    found = plan.communication(odd, 4, strategy="ddp", inputs=rows(), links=link)
    for row in found.rows:
        expected = sum(count * link.seconds(row.operation, size, 4) for size, count in row.messages)
        assert row.seconds == pytest.approx(expected)
    assert "slow" in str(found)


def test_frame_figure_and_texts() -> None:
    found = plan.communication(odd, mesh={"dp": 2}, inputs=rows())
    frame = found.to_frame()
    assert frame["calls"].sum() == found.calls()
    assert frame["mib"].sum() * 2**20 == pytest.approx(found.bytes())
    assert frame["ms"].isna().all()
    assert found.figure().layout.yaxis.title.text == "KiB sent per rank"
    timed = plan.communication(odd, 2, inputs=rows(), links="ethernet-10g")
    assert timed.figure().layout.yaxis.title.text == "ms"
    assert "<table" in timed._repr_mimebundle_()["text/html"]
    assert "IEEE" in timed._repr_mimebundle_()["text/html"]
    assert "all_gather" in str(timed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 4, "mesh": {"dp": 2}}, "leave one of the two out"),
        ({"mesh": {"dp": 2}, "strategy": "hybrid_shard"}, "use the axes replicate and shard"),
        ({"mesh": {"tp": 2}}, "inputs= is required"),
        ({"mesh": {"tp": 2}, "tp_plan": {"9.*": "column"}, "inputs": rows()}, "matches no module of Sequential"),
        ({"mesh": {"tp": 2}, "tp_plan": {"0": "diagonal"}, "inputs": rows()}, "must be one of .*; got 'diagonal'"),
        ({"mesh": {"tp": 2}, "tp_plan": {"0": "column"}, "inputs": rows()}, r"be divisible by the group size \(2\)"),
        (
            {"mesh": {"pp": 2}, "inputs": rows(), "num_microbatches": 3},
            r"8 samples\) must be divisible by num_microbatches \(3\)",
        ),
        ({"mesh": {"pp": 9}, "inputs": rows()}, "num_stages must be 1 to .*; got 9"),
        ({"world_size": 2, "inputs": torch.ones(2, 5)}, "cannot run a step on tensors without data"),
        ({"world_size": 2, "links": "carrier-pigeon"}, "or one of nvlink2"),
        ({"mesh": {"dp": 2}, "links": {"tp": "nvlink4"}}, "no entry for the axis 'dp'"),
        ({"world_size": 2, "mixed_precision": "half"}, None),
        ({"world_size": 2, "mixed_precision": "quarter"}, "must be a floating-point dtype"),
        ({"world_size": 2, "bucket_size_mb": 0}, "a number of MiB above 0"),
    ],
)
def test_bad_options_get_one_sentence(options: dict[str, Any], message: str | None) -> None:
    if message is None:
        plan.communication(odd, **options)
        return
    with pytest.raises(UsageError, match=message):
        plan.communication(odd, **options)


def test_unplannable_models_raise() -> None:
    def broken() -> nn.Module:
        raise OSError("no weights here")

    with pytest.raises(UsageError, match="no weights here"):
        plan.communication(broken, 2)
    with pytest.raises(UsageError, match="it returned int"):
        plan.communication(lambda: 3, 2)
    with pytest.raises(UsageError, match="a function without arguments"):
        plan.communication(3, 2)
    with pytest.raises(NoClusterError):
        plan.communication("gpt", 2)


CONFIG = GPTConfig(vocab=96, context=32, hidden=64, heads=4, blocks=3)


def test_small_model_is_bound_by_launch_time() -> None:
    small = GPTConfig(vocab=256, context=64, hidden=64, heads=4, blocks=4)
    found = plan.step_time(small, 1, rates="h100")
    trace = trace_model(ModelSource(small), optimizer=torch.optim.AdamW)
    ops = sum(trace.total(phase).ops for phase in ("forward", "backward", "optimizer"))
    assert found.total_s == pytest.approx(ops * 5e-6, rel=0.01)
    assert "the host issues an operation in 5 us (assumed)" in str(found)
    graphs = plan.step_time(small, 1, rates="h100", cuda_graphs=True)
    assert graphs.total_s < 0.1 * found.total_s
    assert all(seconds >= 5e-6 for part, seconds in graphs.parts.items() if part.startswith("compute"))
    assert "one CUDA graph per phase" in str(graphs)
    slow = plan.Rates(1e12, 1e12, launch_s=1e-3)
    saved = (
        plan.step_time(small, 1, rates=slow).total_s - plan.step_time(small, 1, rates=slow, cuda_graphs=True).total_s
    )
    assert saved == pytest.approx((ops - 3) * 1e-3)
    assert plan.step_time(small, 1, rates="h100", compiled=True).total_s < 0.7 * found.total_s
    large = GPTConfig(vocab=32_000, context=2048, hidden=4096, heads=32, blocks=2)
    free = dataclasses.replace(plan.GPUS["h100"], issue_s=0)
    times = [plan.step_time(large, 1, batch=4, rates=rates).parts["compute, backward"] for rates in ("h100", free)]
    assert times[0] == times[1]


def test_grouped_products_count_as_products() -> None:
    rows, wide, deep, groups = 24, 16, 32, 3

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(groups, wide, deep, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ends = torch.tensor([8, 16, 24], dtype=torch.int32)
            return torch.nn.functional.grouped_mm(x * 1, self.weight, offs=ends)

    for dtype in (torch.bfloat16, torch.float32):
        x = torch.zeros(rows, wide, dtype=dtype, requires_grad=True)
        trace = trace_model(ModelSource(lambda dtype=dtype: Experts().to(dtype), x))
        assert trace.total("forward").flops == 2 * rows * wide * deep
        assert trace.total("backward").flops == 2 * 2 * rows * wide * deep


def test_metadata_queries_and_allocations_are_free() -> None:
    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert not torch.ops.aten.is_pinned(x)
            torch.empty_like(x)
            return x.view(-1) if x.device.type == "cpu" else x

    x = torch.zeros(8, 4, requires_grad=True)
    trace = trace_model(ModelSource(Asks, x, loss=lambda y: y.sum()))
    work = trace.total("forward")
    assert work.ops == 1  # the sum
    assert work.bytes == 8 * 4 * 4 + 4


def test_operations_of_unknown_flops_are_reported() -> None:
    class Solver(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.solve(self.weight, x)

    found = plan.step_time(Solver, 1, inputs=torch.zeros(32, 4), rates=plan.Rates(1e12, 1e12))
    assert "only the bytes of aten._linalg_solve_ex" in str(found)
    assert "only the bytes" not in str(plan.step_time(CONFIG, 1, rates=plan.Rates(1e12, 1e12)))


def several(task: Any, report: Any) -> dict[str, Any]:
    """Run in a process without threads, like plans."""
    here = os.getpid()

    def dies() -> int:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return 7

    def refuses() -> int:
        raise UsageError("no")

    def nested() -> list[int]:
        return fork_map([os.getpid, os.getpid])

    found: dict[str, Any] = {"squares": fork_map([partial(pow, number, 2) for number in range(5)])}
    found["died"] = fork_map([dies, partial(int, 1)])
    found["nested"] = [len(set(numbers)) for numbers in fork_map([nested, nested])]
    for name, calls in {"first": [refuses, partial(int, 1)], "last": [partial(int, 1), refuses]}.items():
        try:
            fork_map(calls)
        except UsageError as error:
            found[name] = str(error)
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        found["left"] = 0
    return found


def test_all_calls_return_and_no_process_remains() -> None:
    found = run_in_process(several, cloudpickle.dumps(None))
    assert found == {
        "squares": [0, 1, 4, 9, 16],
        "died": [7, 1],
        "nested": [1, 1],
        "first": "no",
        "last": "no",
        "left": 0,
    }


def forks_that_die(task: Any, report: Any) -> dict[str, Any]:
    """Run in a process without threads: a function whose first fork dies, then one whose forks all die."""
    here, first = os.getpid(), Path(task)

    def dies_once() -> float:
        if not first.exists():
            first.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return backward()

    def dies() -> float:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return backward()

    return {
        "once": fork_map([dies_once, backward]),
        "forked": here not in fork_map([os.getpid, os.getpid]),
        "always": fork_map([dies, backward]),
        "later": fork_map([backward, backward]),
    }


def test_plans_continue_after_killed_forks(tmp_path: Path) -> None:
    """Also with CUDA builds of torch, whose forks refuse a backward once this process has made one."""
    found = run_in_process(forks_that_die, cloudpickle.dumps(str(tmp_path / "first")))
    assert found == {"once": [6.0, 6.0], "forked": True, "always": [6.0, 6.0], "later": [6.0, 6.0]}


def backward() -> float:
    """Compute a gradient; with CUDA builds of torch, later forks of the same process cannot compute another."""
    x = torch.ones(2, requires_grad=True)
    (x * 3).sum().backward()
    assert x.grad is not None
    return float(x.grad.sum())


def sequential_forks(task: Any, report: Any) -> list[list[float]]:
    """Run in a process without threads: one backward, then several at once."""
    return [fork_map([backward]), fork_map([backward, backward]), fork_map([])]


def test_single_backward_does_not_break_later_ones() -> None:
    found = run_in_process(sequential_forks, cloudpickle.dumps(None))
    assert found == [[6.0], [6.0, 6.0], []]
