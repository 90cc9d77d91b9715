"""Blocks are extrapolated only where they are proven alike: with and without, memory is the same."""

from __future__ import annotations

from functools import partial
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

from axon_nb.parallel.models import GPT, GPTConfig
from axon_nb.plan.footprint.plan import MemoryPlan, MemoryRequest
from axon_nb.plan.models import TensorSpec
from axon_nb.plan.process import run_in_process
from axon_nb.plan.repetition import ProvenRuns, signatures
from tests.plan.footprint.irregular import KINDS, WIDTH, Irregular, Layer, random_model
from tests.plan.many import plans

pytestmark = pytest.mark.timeout(900)


def _request(model: Any, **more: Any) -> MemoryRequest:
    options = {"inputs": TensorSpec(("batch", 32, WIDTH)), "batch": 4, "device": "cpu"} | more
    return MemoryRequest(model, options.pop("mesh", {"dp": 4}), options.pop("strategy", "full_shard"), **options)


def _both_ways(models: dict[str, Any], **more: Any) -> dict[str, tuple[MemoryPlan, MemoryPlan]]:
    """Plans with and without extrapolation."""
    requests = {(name, way): _request(make, extrapolate=way, **more) for name, make in models.items() for way in (1, 0)}
    found: Any = run_in_process(plans, cloudpickle.dumps(requests))
    assert all(isinstance(made, MemoryPlan) for made in found.values()), found
    return {name: (found[name, 1], found[name, 0]) for name in models}


def _check(found: dict[str, tuple[MemoryPlan, MemoryPlan]]) -> None:
    for name, (short, whole) in found.items():
        assert whole.method == "simulated"
        assert short.worst.peak == whole.worst.peak, (name, short.method)
        assert short.worst.persistent == whole.worst.persistent, (name, short.method)
        assert (short.worst.phase, short.worst.module) == (whole.worst.phase, whole.worst.module), (name, short.method)
        assert {row.name: row for row in short.worst.modules} == {row.name: row for row in whole.worst.modules}, name


LOCAL_AND_GLOBAL = (4, 4, 4, 4, 4, 0) * 7
"""Gemma 3's groups: five local blocks and a global one."""


def test_blocks_differing_in_a_plain_attribute_only() -> None:
    mixed = (4, 0, 0, 4, 0, 4, 4, 4, 0, 0, 4)
    found = _both_ways({"groups": partial(Irregular, LOCAL_AND_GLOBAL, {}), "no order": partial(Irregular, mixed, {})})
    _check(found)
    assert found["groups"][0].method == "simulated with 4 and 5 of 7 equal groups of 6 blocks, scaled to all"
    assert found["no order"][0].method == "simulated"
    assert any("11 blocks of class Layer are not alike" in note for note in found["no order"][0].notes)


@pytest.mark.parametrize("kind", KINDS[2:])
def test_every_difference_between_blocks_is_detected(kind: str) -> None:
    """Of 9 blocks, the fifth or every second one differs: five equal blocks in a row are too few."""
    for places in ([4], range(1, 9, 2)):
        model = Irregular((0,) * 9, dict.fromkeys(places, kind))
        found = ProvenRuns(model, lambda made: made(torch.zeros(2, 8, WIDTH)).sum())
        short = partial(_shortened, (0,) * 9, dict.fromkeys(places, kind))
        assert found.find(least=6, make=short, depth=5) is None
        assert found.reason


def _shortened(windows: tuple[int, ...], special: dict[int, str], run: Any, depth: int) -> nn.Module:
    from axon_nb.plan.repetition import shorten

    made = Irregular(windows, special)
    shorten(made, run, depth)
    return made


def test_equal_blocks_are_proven() -> None:
    model = Irregular((0,) * 9, {})
    found = ProvenRuns(model, lambda made: made(torch.zeros(2, 8, WIDTH)).sum())
    run = found.find(least=6, make=partial(_shortened, (0,) * 9, {}), depth=5)
    assert run is not None
    assert run.names == tuple(f"layers.{number}" for number in range(9))


def test_signatures_cover_all_that_blocks_hold() -> None:
    def changed(change: Any) -> bool:
        layers = nn.ModuleList(Layer(0, 0) for _ in range(2))
        layer: Any = layers[1]
        change(layer)
        one, other = signatures(layers, list(layers))
        return one != other

    class Box:
        def __init__(self, value: int) -> None:
            self.value = value

    assert not changed(lambda layer: None)
    assert not changed(lambda layer: setattr(layer, "index", 1))  # it counts blocks
    for change in (
        lambda layer: setattr(layer, "window", 7),
        lambda layer: setattr(layer, "name", "x"),
        lambda layer: setattr(layer, "box", Box(1)),
        lambda layer: layer.register_full_backward_hook(lambda *_: None),
        lambda layer: layer.up.register_forward_pre_hook(lambda *_: None),
        lambda layer: layer.up.weight.register_hook(lambda gradient: gradient),
        lambda layer: layer.down.double(),
        lambda layer: layer.eval(),
        lambda layer: setattr(layer, "forward", partial(type(layer).forward, layer)),
    ):
        assert changed(change)
    pair = nn.ModuleList(Layer(0, 0) for _ in range(3))
    for number, layer in enumerate(pair):
        layer.box = Box(3 if number < 2 else 4)
    one, same, other = signatures(pair, list(pair))
    assert one == same != other


def test_units_and_styles_distinguish_blocks() -> None:
    config = GPTConfig(vocab=64, context=16, hidden=32, heads=2, blocks=8)
    mesh = {"dp": 2, "tp": 2}
    all_blocks = {"block*.up": "column", "block*.down": "row"}
    even_blocks = {"block[0246].up": "column", "block[0246].down": "row"}
    requests = {
        "all": MemoryRequest(config, mesh, "full_shard", tp_plan=all_blocks),
        "some": MemoryRequest(config, mesh, "full_shard", tp_plan=even_blocks),
        "units": _request(partial(Irregular, (0,) * 8, {}), wrap=_is_even),
    }
    found = run_in_process(plans, cloudpickle.dumps(requests))
    assert "4 and 5 of 8 equal blocks" in found["all"].method, found["all"]
    # Pairs of a sharded and an unsharded block are too few groups to leave any out.
    assert found["some"].method == found["units"].method == "simulated", found


def _is_even(module: nn.Module) -> bool:
    return isinstance(module, Layer) and module.index % 2 == 0


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 27), marks=pytest.mark.slow)])
def test_random_models(seeds: range) -> None:
    strategies = ("full_shard", "shard_grad_op", "ddp")
    for number, strategy in enumerate(strategies):
        models = {f"{strategy} {seed}": random_model(seed) for seed in seeds if seed % 3 == number}
        _check(_both_ways(models, strategy=strategy))


def test_gpt_blocks_are_alike() -> None:
    config = GPTConfig(vocab=64, context=16, hidden=32, heads=2, blocks=7)
    model = GPT(config)
    states = signatures(model, [block for name, block in model.named_children() if name.startswith("block")])
    assert all(state == states[0] for state in states)
