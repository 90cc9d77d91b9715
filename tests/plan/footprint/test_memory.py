"""`plan.memory`: its arguments, its results and its errors, and a real step's memory from profiler events."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

from axon_nb import plan
from axon_nb.parallel import CPUOffload, ShardingStrategy
from axon_nb.parallel.models import GPT, Block, GPTConfig
from axon_nb.plan.footprint.plan import MemoryPlan, MemoryRequest
from axon_nb.plan.models import CapturedModel, TensorSpec
from axon_nb.plan.process import run_in_process
from tests.plan.footprint.allocator import blocks_of, in_step
from tests.plan.many import plans

pytestmark = pytest.mark.timeout(900)
SMALL = GPTConfig(vocab=64, context=16, hidden=32, heads=2, blocks=2)


def _plans(**requests: MemoryRequest) -> dict[str, Any]:
    found: dict[str, Any] = run_in_process(plans, cloudpickle.dumps(requests))
    return found


def _request(model: Any = SMALL, mesh: dict[str, int] | None = None, strategy: str = "full_shard", **more: Any) -> Any:
    return MemoryRequest(model, mesh or {"dp": 4}, strategy, **more)


def test_plan_has_the_memory_of_each_rank() -> None:
    heard: list[tuple[float, str]] = []
    made = plan.memory(SMALL, 4, batch=2, ranks="all", progress=lambda share, text: heard.append((share, text)))
    assert [rank.rank for rank in made.ranks] == [0, 1, 2, 3]
    assert [rank.coordinates for rank in made.ranks] == [{"dp": rank} for rank in range(4)]
    assert made.num_parameters == sum(p.numel() for p in GPT(SMALL).parameters())
    for rank, states in zip(made.ranks, made.model_states, strict=True):
        assert rank.peak.total > rank.persistent.total > states.total > 0
        assert rank.persistent.model_states == states.total
        assert rank.phase in ("forward", "backward", "optimizer")
        assert rank.persistent.fragmentation == pytest.approx(0.05 / 1.05 * rank.persistent.total, abs=2)
    assert made.simulator_bytes > 0
    assert made.seconds > 0
    shares = [share for share, _ in heard]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert plan.memory(SMALL, 4, batch=2, ranks="all") is made  # from memory
    low, high = made.interval_bytes
    assert low < made.peak_bytes < high < 1.2 * made.peak_bytes
    assert "Expected: " in str(made)
    assert made.fits(1.0)
    assert not made.fits(1e-6)

    table = made.to_frame()
    assert len(table) == 8
    assert list(table.columns[:3]) == ["rank", "dp", "moment"]
    assert table["total_gib"].max() == made.peak_bytes / 1024**3
    modules = made.to_frame(by="module")
    assert {"embedding.token", "block1.attention.query", "head.logits"} <= set(modules["module"])
    assert modules["parameters_gib"].sum() * 1024**3 <= made.worst.persistent.parameters
    figure = made.figure()
    assert {bar.name for bar in figure.data} >= {"parameters", "optimizer states", "activations"}
    assert figure.layout.yaxis.title.text == "KiB"
    for text in (str(made), made._repr_mimebundle_()["text/html"]):
        assert "GPT" in text
        assert "peak, KiB" in text
        assert "fragmentation allowance" in text
    with pytest.raises(plan.PlanError, match="by must be 'rank' or 'module'; got 'block'"):
        made.to_frame(by="block")


DEEP = GPTConfig(vocab=64, context=16, hidden=32, heads=2, blocks=8)
DEPTH_CASES: dict[str, Any] = {
    "full_shard": {},
    "shard_grad_op": {"strategy": "shard_grad_op"},
    "hybrid_shard": {"strategy": "hybrid_shard", "mesh": {"replicate": 2, "shard": 3}},
    "no_shard": {"strategy": "no_shard"},
    "mixed": {"mixed_precision": "bfloat16"},
    "again": {"activation_checkpointing": True, "batch": 8},
    "foreach": {"device": "cuda"},
    "large batch": {"batch": 64},
    "many ranks": {"mesh": {"dp": 1024}},
    "ddp": {"strategy": "ddp"},
    "tp": {"mesh": {"dp": 2, "tp": 2}, "batch": 8},
    "cpu_offload": {"cpu_offload": "params", "device": "cuda"},
}
QUICK = ("full_shard",)


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param(tuple(name for name in DEPTH_CASES if name not in QUICK), marks=pytest.mark.slow)]
)
def test_extrapolation_equals_full_simulation(names: tuple[str, ...]) -> None:
    cases = {name: DEPTH_CASES[name] for name in names}
    requests = {}
    for name, given in cases.items():
        options = {"device": "cpu"} | given
        requests[name] = _request(DEEP, **options)
        requests[f"{name}, whole"] = _request(DEEP, extrapolate=False, **options)
    found = _plans(**requests)
    for name in cases:
        short, whole = found[name], found[f"{name}, whole"]
        assert isinstance(short, MemoryPlan), short
        assert isinstance(whole, MemoryPlan), whole
        assert "4 and 5 of 8" in short.method, name
        assert whole.method == "simulated"
        assert short.worst.persistent == whole.worst.persistent, name
        assert short.worst.peak == whole.worst.peak, name
        assert (short.worst.phase, short.worst.host_bytes) == (whole.worst.phase, whole.worst.host_bytes), name
        assert {row.name: row for row in short.worst.modules} == {row.name: row for row in whole.worst.modules}, name


def test_gradients_that_fsdp_freed_stay_reserved() -> None:
    """They are reduced in a stream of their own, whose memory the peak's stream does not get."""
    sharded = plan.memory(SMALL, 4, batch=2)
    freed = sharded.worst.persistent.gradients - sharded.worst.peak.gradients
    assert sharded.reserved_bytes == sharded.peak_bytes + freed
    assert freed > 0
    for options in ({"strategy": "ddp"}, {"device": "cpu"}):
        other = plan.memory(SMALL, 4, batch=2, **options)  # type: ignore[arg-type]
        assert other.reserved_bytes == other.peak_bytes


def test_offloading_frees_the_device() -> None:
    kinds = [(kind, strategy) for kind in CPUOffload for strategy in ("full_shard",)]
    found = _plans(**{kind.value: _request(strategy=s, cpu_offload=kind.value, batch=2) for kind, s in kinds})
    states = found["none"].model_states[0]
    held = {kind: (made.worst.persistent.model_states, made.worst.host_bytes) for kind, made in found.items()}
    assert held["none"] == (states.total, 0)
    assert held["params"] == (states.total - states.parameters, states.parameters)
    assert held["optimizer_states"] == (states.total - states.optimizer, states.optimizer)
    assert held["full"][0] == 0
    assert found["full"].peak_bytes < found["none"].peak_bytes


def test_equivalent_requests_give_equal_plans() -> None:
    model = partial(nn.Linear, 8, 4)
    spec = TensorSpec(("batch", 8))
    given = [
        _request(model, inputs=spec),
        _request(model, inputs=lambda: torch.ones(1, 8)),
        _request(model, inputs=torch.ones(1, 8)),
        _request(CapturedModel("net", cloudpickle.dumps(model)), inputs=(spec,), loss=lambda output: output.sum()),
        _request(model, inputs=spec, target=TensorSpec(("batch", 4)), loss=nn.functional.mse_loss, optimizer="SGD"),
        _request(SMALL, activation_checkpointing="Block", wrap="Block", optimizer=torch.optim.AdamW),
        _request(SMALL, activation_checkpointing=lambda module: isinstance(module, Block), wrap=(Block,), seq=8),
        _request(SMALL, mesh={"dp": 1, "tp": 3}),
        _request(lambda: nn.Linear(8, 4, device="cuda").cuda(), inputs=lambda: torch.ones(1, 8, device="cuda")),
    ]
    found = _plans(**{str(number): request for number, request in enumerate(given)})
    assert all(isinstance(made, MemoryPlan) for made in found.values()), found
    first = found["0"].worst.peak
    assert found["1"].worst.peak == found["2"].worst.peak == first
    assert found["4"].worst.persistent.optimizer == 0
    assert found["6"].worst.peak.activations < found["5"].worst.peak.activations
    assert any("tp shards no layer" in note for note in found["7"].notes)
    assert found["8"].worst.peak == first
    enumerated = plan.memory(SMALL, 2, strategy=ShardingStrategy.FULL_SHARD, dtype=torch.bfloat16, method="closed_form")
    named = plan.memory(SMALL, 2, strategy="full_shard", dtype="bfloat16", method="closed_form")
    assert enumerated.ranks == named.ranks
    assert named.method == "model states only"
    with pytest.raises(plan.PlanError, match="model states only"):
        named.fits(80)


class Reads(nn.Module):
    """Reads a tensor's value in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Fails without data."""
        return self.linear(x) if x.sum().item() > 0 else x


def _broken() -> nn.Module:
    raise KeyError("weights")


def test_impossible_plans_get_one_sentence() -> None:
    linear = partial(nn.Linear, 8, 4)
    spec = TensorSpec((1, 8))
    cases = {
        "values": (_request(Reads, inputs=spec), "cannot be run on tensors without data because it reads their values"),
        "broken": (_request(_broken, inputs=spec), "cannot be built on tensors without data.*KeyError: 'weights'"),
        "no module": (_request(dict, inputs=spec), "must return a torch.nn.Module; it returned dict"),
        "no inputs": (_request(linear), "inputs= is required"),
        "shape": (_request(linear, inputs=TensorSpec((1, 7))), "cannot be run.*inputs=, target= and loss="),
        "size": (_request(linear, inputs=TensorSpec(("rows", 8))), "got 'rows'"),
        "seq": (_request(linear, inputs=TensorSpec(("seq", 8))), "needs a size for 'seq'"),
        "dtype": (_request(linear, inputs=TensorSpec((1, 8), "whole")), "'whole' is not a torch dtype"),
        "optimizer": (_request(optimizer="adamm"), "or one of .*adamw.*; got 'adamm'"),
        "options": (_request(optimizer_options={"speed": 1}), "speed"),
        "context": (_request(seq=17), "the model's context, 16 tokens"),
        "kinds": (
            _request(activation_checkpointing="Blok"),
            "activation_checkpointing='Blok' matches no module of GPT, which has",
        ),
        "no row": (_request(linear, inputs=spec, activation_checkpointing=True), "a row of equal blocks"),
        "tp": (_request(mesh={"dp": 1, "tp": 2}, tp_plan={"nothing*": "column"}), "matches no module"),
        "no parameters": (_request(nn.ReLU, inputs=spec), "ReLU has no trainable parameters"),
        "sparse": (_request(optimizer="SparseAdam"), "does not support dense gradients"),
        "wrap": (_request(wrap="Blok"), "wrap='Blok' matches no module of GPT, which has Attention, Block"),
        "num_microbatches": (
            _request(mesh={"pp": 2}, batch=3),
            r"batch \(3\) must be divisible by num_microbatches \(2\): use batch=4",
        ),
        "loss": (_request(lambda: nn.LSTM(8, 8), inputs=TensorSpec((1, 8))), "returns a tuple, so loss= is required"),
    }
    found = _plans(**{name: request for name, (request, _) in cases.items()})
    for name, (_, text) in cases.items():
        assert isinstance(found[name], str), (name, found[name])
        with pytest.raises(AssertionError, match=text):
            raise AssertionError(found[name])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "The number of ranks is missing"),
        ({"world_size": 0}, "world_size must be a whole number of ranks, 1 or more; got 0"),
        ({"world_size": 8, "mesh": {"dp": 2, "tp": 3}}, "dp=2 x tp=3 is 6 ranks, but world_size=8"),
        ({"mesh": {"dp": 2, "xp": 3}}, "'xp' is not a mesh axis"),
        ({"mesh": {"dp": 0}}, "dp must be a whole number of ranks, 1 or more; got 0"),
        ({"world_size": 8, "strategy": "zero3"}, "strategy must be one of full_shard"),
        ({"world_size": 8, "strategy": "hybrid_shard"}, "hybrid_shard needs both of its axes"),
        ({"mesh": {"replicate": 2, "shard": 2}}, "use the axis dp"),
        ({"world_size": 2, "dtype": "int8"}, "dtype must be one of float32"),
        ({"world_size": 2, "cpu_offload": "disk"}, "cpu_offload must be one of none"),
        (
            {"world_size": 2, "cpu_offload": "full", "strategy": "ddp"},
            "keeps all parameters on each device: use full_shard",
        ),
        ({"world_size": 2, "batch": 0}, "batch must be a whole number, 1 or more; got 0"),
        ({"world_size": 2, "ranks": [2]}, "ranks must be 0 to 1; got 2"),
        ({"world_size": 2, "ranks": "most"}, "ranks must be one of worst, all"),
        ({"world_size": 2, "method": "guess"}, "method must be one of simulate, closed_form"),
        ({"world_size": 2, "fragmentation": 5}, "fragmentation must be a fraction of everything else"),
        ({"world_size": 2, "device": "tpu"}, "device must be one of cpu, cuda"),
        ({"world_size": 2, "num_microbatches": 4}, "num_microbatches=4 requires a pipeline"),
        ({"mesh": {"dp": 1, "tp": 2}, "method": "closed_form"}, "does not work with tp or pp"),
    ],
)
def test_bad_options_are_rejected_before_anything_starts(options: dict[str, Any], text: str) -> None:
    with pytest.raises(plan.PlanError, match=text):
        plan.memory(SMALL, **options)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("a net", "a variable on the ranks"),
        (7, "model must be a function without arguments"),
    ],
)
def test_bad_models_are_rejected(model: Any, text: str) -> None:
    with pytest.raises(plan.PlanError, match=text):
        plan.memory(model, 2)


def test_unpicklable_models_are_reported() -> None:
    lock = threading.Lock()

    def made() -> nn.Module:
        with lock:
            return nn.Linear(2, 2)

    with pytest.raises(plan.PlanError, match="cannot be sent to another process"):
        plan.memory(made, 2, inputs=TensorSpec((1, 2)))


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, axon_nb.plan; assert not {'torch', 'pandas', 'plotly'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_peak_and_remainder() -> None:
    blocks = blocks_of([(1, 100, 8), (3, 200, 4), (4, 200, -4), (5, 300, 2), (9, 100, -8), (9, 300, -2)])
    assert in_step(blocks, 2, 6) == (12, 10)
    assert in_step(blocks, 4, 6) == (10, 10)
    assert in_step(blocks, 10, 12) == (0, 0)


def test_unrecorded_frees_end_when_the_address_is_reused() -> None:
    unseen = [(3, 100, 8), (5, 104, 2), (6, 104, -2)]
    assert in_step(blocks_of(unseen), 2, 7) == (8, 0)
    later = [(3, 100, 8), (22, 96, 16), (23, 96, -16)]
    assert in_step(blocks_of(later), 2, 7) == (8, 8)
    assert in_step(blocks_of(later), 12, 17) == (0, 0)
    assert in_step(blocks_of(later), 20, 27) == (16, 0)
    never = [(3, 100, 8), (13, 200, 1), (24, 200, -1)]
    assert in_step(blocks_of(never), 2, 7) == (8, 8)
    assert in_step(blocks_of(never), 12, 17) == (1, 1)


def test_adjacent_blocks_are_separate() -> None:
    blocks = blocks_of([(1, 100, 8), (2, 108, 8), (3, 92, 8), (4, 92, -8), (5, 108, -8), (6, 100, -8)])
    assert in_step(blocks, 0, 10) == (24, 0)
