"""What modules take and give is recorded whole, and changed alike, however the model is split."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from axon_nb import inside
from axon_nb.comm import World
from axon_nb.errors import UsageError
from axon_nb.parallel import TensorParallelBlock, parallelize
from axon_nb.parallel.models import GPT, GPTConfig
from tests.support.ranks import RankWorld
from tests.support.training.hugging_face import config_of

PLACES = (
    *("layers.*", "layers.*:input", "layers.*.mlp", "layers.*.mlp:input", "layers.*.mlp.*", "layers.*.self_attn"),
    *("layers.*.self_attn.*_proj", "layers.*.self_attn.*_proj:input", "layers.*.self_attn:heads", "embed_tokens"),
    *("layers.*.self_attn:attention", "layers.*.*_layernorm", "norm", "lm_head"),
)
HEAD_NORMS = ("layers.*.self_attn.?_norm", "layers.*.self_attn.?_norm:input")
MODELS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "Llama": ("Llama 3 8B", {}, ("layers.*.mlp.act_fn",)),
    "Qwen": ("Qwen 3", {}, HEAD_NORMS),
    "Gemma": ("Gemma 3", {}, HEAD_NORMS),
    "Qwen with experts": ("Qwen 3 MoE", {}, (*HEAD_NORMS, "layers.*.mlp.experts:input")),
    "Mixtral": ("Mixtral", {}, ("layers.*.mlp.experts:input", "layers.*.mlp.experts.act_fn")),
    "fused projections": ("Phi 3", {"eos_token_id": None}, ()),
}


def _config(family: str, more: dict[str, Any]) -> Any:
    if family == "Mixtral":
        import transformers

        llama = config_of("Llama 3 8B", num_key_value_heads=4)
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
        sizes = {name: getattr(llama, name) for name in names}
        return transformers.MixtralConfig(**sizes, intermediate_size=256, num_local_experts=4)
    return config_of(family, num_key_value_heads=4, **more)


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[int, RankWorld]]:
    made = {size: RankWorld(size, limit_s=400) for size in (2, 4)}
    yield made
    for world in made.values():
        world.end()


def _both(folder: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Load a model whole and split."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    torch.set_num_threads(1)
    split = DistributedConfig(tp_size=torch.distributed.get_world_size(), tp_plan="auto")
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager"}
    return (
        AutoModelForCausalLM.from_pretrained(folder, **options),
        AutoModelForCausalLM.from_pretrained(folder, **options, distributed_config=split),
    )


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    return float((a - b).abs().max() / a.abs().max()) if a.numel() else 0.0


def _recorded(world: World, folder: str, dtype: torch.dtype, places: tuple[str, ...], positions: int) -> Any:
    models = _both(folder, dtype)
    tokens = torch.randint(1, 512, (2, positions), generator=torch.Generator().manual_seed(3))
    found = {}
    for with_gradients in (False, True):
        seen = []
        for model in models:
            with (
                torch.set_grad_enabled(with_gradients),
                inside.record(model, *places, gradients=with_gradients, dtype=torch.float32) as recording,
            ):
                logits = model(tokens).logits
                if with_gradients:
                    logits.float().square().mean().backward()
            seen.append(recording)
        one, split = seen
        assert list(one) == list(split)
        for name, values in one.items():
            found[name, with_gradients] = max(map(_apart, values, split[name]))
        assert list(one.gradients) == list(split.gradients)
        for name, values in one.gradients.items():
            found[name, "gradient"] = max(map(_apart, values, split.gradients[name]))
    return found


def _changed(world: World, folder: str, inner_place: str, inner_input: str, size: int) -> Any:
    models = _both(folder, torch.float32)
    tokens = torch.randint(1, 512, (2, 6), generator=torch.Generator().manual_seed(4))
    found = []
    for model in models:
        results = []
        with inside.record(model, "layers.0.mlp", "layers.1.self_attn:heads") as patch:
            model(tokens.flip(0))
        steer = torch.full((128,), 0.3, requires_grad=True)
        heads = torch.full((8, 16), 0.2, requires_grad=True)
        inner = torch.full((size,), 0.1, requires_grad=True)

        def without_head(value: torch.Tensor) -> None:
            value[:, :, 5] = 0

        changes: list[tuple[Any, dict[str, Any]]] = [
            (inside.replace, {"layers.1.self_attn:heads": without_head}),
            (inside.replace, {"layers.0.mlp": patch["layers.0.mlp"][0]}),
            (inside.replace, {"layers.1.self_attn:heads": patch["layers.1.self_attn:heads"][0]}),
            (inside.add, {"layers.1": steer}),
            (inside.add, {"layers.*.self_attn:heads": heads, inner_place: inner}),
            (inside.replace, {inner_input: lambda value, by=inner: value * by}),
        ]
        for change, values in changes:
            model.zero_grad()
            with change(model, values), inside.record(model, *values) as seen:
                logits = model(tokens).logits
                logits.square().mean().backward()
            results += [logits.detach(), *(value for each in seen.values() for value in each)]
        results += [each.grad for each in (steer, heads, inner)]
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        found.append(results)
    return max(map(_apart, *found))


def _saved(tmp_path: Path, name: str) -> str:
    transformers = pytest.importorskip("transformers")
    family, more, _ = MODELS[name]
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(_config(family, more)).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_those_of_one_process(
    worlds: dict[int, RankWorld], tmp_path: Path, name: str, size: int
) -> None:
    folder, places = _saved(tmp_path, name), (*PLACES, *MODELS[name][2])
    for positions in (7, 4):  # as many positions as heads on a rank, too
        for found in worlds[size].run(_recorded, folder, torch.float32, places, positions):
            assert len(found) > 100
            assert {key: apart for key, apart in found.items() if apart > 1e-5} == {}
    for found in worlds[size].run(_recorded, folder, torch.bfloat16, places, 7):
        assert {key: apart for key, apart in found.items() if apart > 0.05} == {}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "fused projections"])
def test_changes_and_their_gradients_are_those_of_one_process(
    worlds: dict[int, RankWorld], tmp_path: Path, name: str, size: int
) -> None:
    inner: tuple[str, str, int] = ("layers.1.mlp.act_fn", "layers.1.mlp.down_proj:input", 256)
    if name in ("Mixtral", "Qwen with experts"):
        inner = ("layers.1.self_attn.q_proj", "layers.1.self_attn.o_proj:input", 128)
    assert max(worlds[size].run(_changed, _saved(tmp_path, name), *inner)) < 1e-5


GPT_PLACES = ("block*", "block*.attention", "block*.attention:heads", "block*.attention.*", "block*.up", "block*.norm*")


def _parallelized(world: World, sequence: bool) -> float:
    torch.manual_seed(0)
    one = GPT(GPTConfig(vocab=64, hidden=32, heads=4, blocks=2, context=8))
    split = copy.deepcopy(one)
    parallelize(split, mesh=world, sequence=sequence)
    tokens = torch.arange(16).reshape(2, 8)
    worst = 0.0
    vector = torch.full((32,), 0.5)
    for change in (
        {},
        {"block1.attention": vector},
        {"block0.attention:heads": torch.ones(4, 8), "block0.down": vector},
    ):
        logits, seen = [], []
        for model in (one, split):
            with inside.add(model, change), inside.record(model, *GPT_PLACES) as recording:
                logits.append(model(tokens).detach())
            seen.append(recording)
        worst = max(worst, _apart(*logits))
        for name, values in seen[0].items():
            worst = max(worst, *map(_apart, values, seen[1][name]))
    return worst


@pytest.mark.parametrize("sequence", [False, True])
def test_parallelized_models(worlds: dict[int, RankWorld], sequence: bool) -> None:
    assert max(worlds[2].run(_parallelized, sequence)) < 1e-5


def _layers(world: World, sequence: bool) -> float:
    torch.manual_seed(0)
    alone = [torch.distributed.new_group([rank]) for rank in range(world.world_size())][world.rank()]
    blocks = [TensorParallelBlock(32, 4, sequence=sequence, group=group) for group in (alone, None)]
    blocks[1].load_state_dict(_parts(blocks[0], blocks[1]))
    x = torch.randn(2, 8, 32)
    x.requires_grad_()
    places = (
        "attention",
        "attention:heads",
        "mlp",
        "mlp.up",
        "mlp.up:input",
        "mlp.down:input",
        "norm_1",
        "attention.out",
    )
    seen = []
    for block, part in zip(blocks, (x, x.chunk(world.world_size(), 1)[world.rank()] if sequence else x), strict=True):
        with inside.record(block, *places, gradients=True) as recording:
            block(part).square().sum().backward()
        seen.append(recording)
    assert len(seen[0]) == len(places)
    assert len(seen[0].gradients) == len(places)
    return max(
        *(_apart(value[0], seen[1][name][0]) for name, value in seen[0].items()),
        *(_apart(value[0], seen[1].gradients[name][0]) for name, value in seen[0].gradients.items()),
    )


def _parts(whole: nn.Module, split: nn.Module) -> dict[str, torch.Tensor]:
    """Return this rank's parts of a layer's parameters."""
    found = {}
    for name, _ in split.named_parameters():
        owner: Any = split.get_submodule(name.rpartition(".")[0])
        dim = getattr(owner, "shard_dims", {}).get(name.rpartition(".")[2])
        value = whole.get_parameter(name).detach()
        found[name] = value if dim is None else value.chunk(owner.group.size(), dim)[owner.group.rank()]
    return found


@pytest.mark.parametrize("sequence", [False, True])
def test_layers_of_ours(worlds: dict[int, RankWorld], sequence: bool) -> None:
    assert max(worlds[2].run(_layers, sequence)) < 1e-5


def _data_parallel(world: World) -> None:
    for wrap in (DistributedDataParallel, fully_shard, lambda model: model):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        model = wrap(copy.deepcopy(plain))
        x = torch.full((3, 4), float(world.rank()))
        with inside.add(model, {"1": 1.0}), inside.record(model, "0", "2:input", "2") as seen:
            model(x)
        assert torch.allclose(seen["0"][0], plain[0](x)), "each rank has its own"
        assert torch.allclose(seen["2:input"][0], nn.functional.gelu(plain[0](x)) + 1)


def test_data_parallel_ranks_record_their_own_values(worlds: dict[int, RankWorld]) -> None:
    worlds[2].run(_data_parallel)


def _other_ways(world: World, folder: str) -> None:
    """Stages of a pipeline, FSDP2, and torch's own styles, against the model on one process."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    torch.set_num_threads(1)
    one = AutoModelForCausalLM.from_pretrained(folder)
    staged = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(pp_size=world.world_size())
    )
    sharded = AutoModelForCausalLM.from_pretrained(folder)
    for layer in (*sharded.model.layers, sharded):
        fully_shard(layer)
    register_fsdp_forward_method(sharded, "generate")
    styled = AutoModelForCausalLM.from_pretrained(folder)
    mesh = init_device_mesh("cpu", (world.world_size(),))
    for layer in styled.model.layers:
        plan = {
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(),
        }
        parallelize_module(layer, mesh, plan)
    tokens = torch.randint(1, 512, (2, 6), generator=torch.Generator().manual_seed(4))
    places = ("layers.*", "layers.*.mlp", "layers.*.mlp.act_fn", "layers.*.mlp.down_proj:input", "embed_tokens")
    vector = torch.linspace(-1, 1, 256)
    found: list[tuple[inside.Recording, torch.Tensor]] = []
    for model in (one, staged, sharded, styled):
        changes = {"layers.0.mlp.act_fn": vector, "layers.2": 0.5}
        with torch.no_grad(), inside.add(model, changes), inside.record(model, *places) as seen:
            logits = model(tokens, use_cache=False).logits
        found.append((seen, logits))
    (wanted, logits), *others = found
    for seen, theirs in others:
        assert _apart(logits, theirs) < 1e-5, "the changes have reached the logits"
        assert max(_apart(value[0], seen[name][0]) for name, value in wanted.items() if name in seen) < 1e-5
    own, rest = others[0][0], [name for name in wanted if name not in others[0][0]]
    assert own.keys() | rest == wanted.keys()
    assert any(name.endswith("layers.0") for name in own) == (world.rank() == 0)
    with pytest.raises(UsageError, match=rf"^{rest[-1]} has no values here: it runs on rank {1 - world.rank()}\.$"):
        own[rest[-1]]
    with (
        pytest.raises(UsageError, match=r"no module of this rank is named 'layers.9'"),
        inside.record(staged, "layers.9"),
    ):
        pass
    with pytest.raises(UsageError, match="lens needs the last norm"):
        inside.lens(staged, own)
    read = inside.lens(one, wanted)
    for model, (seen, _) in ((sharded, others[1]), (styled, others[2])):
        assert all(torch.equal(read[name][0], tokens) for name, (tokens, _) in inside.lens(model, seen).items())
    answers = [model.generate(tokens, max_new_tokens=3, do_sample=False) for model in (one, staged, sharded)]
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])
    more = {"max_new_tokens": 2 + world.rank(), "do_sample": False}
    assert torch.equal(sharded.generate(tokens, synced_gpus=True, **more), one.generate(tokens, **more))


@pytest.mark.timeout(600)
def test_stages_and_shards_and_styles_of_torch(worlds: dict[int, RankWorld], tmp_path: Path) -> None:
    worlds[2].run(_other_ways, _saved(tmp_path, "Llama"))


def _int8(world: World, folder: str) -> None:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig
    from transformers.distributed import DistributedConfig

    seen = []
    split = {"distributed_config": DistributedConfig(tp_size=world.world_size(), tp_plan="auto")}
    for more in ({}, split):
        config = TorchAoConfig(Int8WeightOnlyConfig())
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, **more)
        with torch.no_grad(), inside.record(model, "layers.*", "layers.*.self_attn:heads", "layers.*.mlp.*") as values:
            model(torch.arange(7).reshape(1, 7))
        seen.append(values)
    assert list(seen[0]) == list(seen[1])
    assert max(_apart(value[0], seen[1][name][0]) for name, value in seen[0].items()) < 0.1, "each part has its scales"


def test_int8_weights_are_joined(worlds: dict[int, RankWorld], tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    worlds[2].run(_int8, _saved(tmp_path, "Llama"))


def test_one_process(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(_saved(tmp_path, "Llama"))
    tokens = torch.arange(6).reshape(1, 6)
    with torch.no_grad(), inside.record(model, "layers.*") as seen:
        logits = model(tokens).logits
    assert torch.equal(inside.lens(model, seen, str)["model.layers.2"][0], logits.argmax(-1))
    assert seen.words[5] == "5"
    with torch.no_grad(), inside.replace(model, {"layers.2": seen["layers.2"][0].flip(1)}):
        assert torch.allclose(model(tokens).logits, logits.flip(1), atol=1e-6)
    with inside.record(model, "mlp") as few:
        pass
    with pytest.raises(UsageError, match="none was recorded"):
        inside.lens(model, few)


@pytest.mark.parametrize("way", ["model", "blocks", "function"])
def test_compiled_models_are_seen_and_changed(way: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    model: Any = torch.compile(plain, backend="eager") if way == "model" else plain
    if way == "blocks":
        plain[1].compile(backend="eager")

    def calling(x: torch.Tensor) -> torch.Tensor:
        return model(x) + 0

    call = torch.compile(calling, backend="eager") if way == "function" else model
    x = torch.ones(1, 4)
    before = call(x)
    with inside.record(model, "1.0") as seen:
        call(x)
    with inside.replace(model, {"1.0": 2.0}):
        assert torch.equal(call(x), torch.full((1, 4), 2.0))
    assert torch.equal(seen["1.0"][0].relu(), before)
    assert torch.equal(call(x), before)


def test_module_with_two_names_is_one_place() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    x = torch.ones(1, 4)
    with inside.record(model, "*") as seen, inside.record(model, "2") as second:
        model(x)
    assert [(name, len(values)) for name, values in seen.items()] == [("0", 2), ("1", 1)]
    assert len(second["2"]) == 2
    wanted = shared((shared(x) + 1).relu() + 1) + 1
    with inside.add(model, {"*": 1.0}):
        assert torch.allclose(model(x), wanted)


def _on_one_rank(world: World) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=64, hidden=32, heads=4, blocks=2, context=8))
    parallelize(model, mesh=world)
    tokens = torch.arange(8).reshape(1, 8)
    with inside.record(model, "block*.up", to=1, dtype=torch.bfloat16) as seen:
        for _ in range(3):
            model(tokens)
    if world.rank() == 1:
        assert list(seen) == ["block0.up", "block1.up"]
        assert [(tuple(value.shape), value.dtype) for value in seen["block1.up"]] == [((1, 8, 128), torch.bfloat16)] * 3
        assert seen.nbytes == 2 * 3 * 8 * 128 * 2
    else:
        with pytest.raises(UsageError, match=r"^block0.up has no values here: they are on rank 1\.$"):
            seen["block0.up"]
    with pytest.raises(UsageError, match="to=2 must be a rank, 0 to 1, or None"), inside.record(model, "up", to=2):
        pass
    wanted = "recording 2 places takes about 4 KiB for each call of the model, 6 KiB so far, and limit= is 5000 B;"
    with pytest.raises(UsageError, match=wanted), inside.record(model, "block*.up", limit=5000, dtype=torch.bfloat16):
        _call_often(model, tokens)
    model(tokens)


def _call_often(model: Any, x: torch.Tensor) -> None:
    for _ in range(3):
        model(x)


def test_one_rank_has_the_values_and_memory_is_bounded(worlds: dict[int, RankWorld]) -> None:
    worlds[2].run(_on_one_rank)


def test_bad_input_is_explained() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.TransformerEncoderLayer(8, 2) for _ in range(2)])})
    wrong: dict[Any, str] = {
        "layers.*.self_atn": r"no module of this rank is named 'layers.\*.self_atn'; there are layers.\d.self_attn",
        "layers.*.linear1:inputs": r"'layers.\*.linear1:inputs': 'inputs' must be output, input, heads or attention\.",
        "layers.*:heads": r"layers.0 is not known as an attention: it needs a linear layer named o_proj, ",
        3: r"a place is the name of a module, or a pattern of names; got 3\.",
    }
    for place, message in wrong.items():
        with pytest.raises(UsageError, match=message), inside.record(model, place):
            pass
    for dtype in (torch.int8, "bfloat16"):
        with pytest.raises(UsageError, match="must be a floating-point dtype"), inside.record(model, dtype=dtype):
            pass
    layer: Any = model["layers"]
    x = torch.zeros(3, 1, 8)
    with (
        pytest.raises(
            UsageError, match=r"linear1 has shape \(3, 1, 2048\) in this call; got a value of shape \(7,\)\."
        ),
        inside.add(model, {"layers.0.linear1": torch.ones(7)}),
    ):
        layer[0](x)
    with (
        pytest.raises(UsageError, match="linear1: a value is a number or a tensor; got '3'"),
        inside.replace(model, {"linear1": lambda value: "3"}),
    ):
        layer[0](x)
    with inside.record(model, "linear1", "linear2") as seen:
        with pytest.raises(
            UsageError, match=r"layers.0.linear1 has no values here: its context has not ended, or fail"
        ):
            seen["0.linear1"]
        layer[0](x)
    assert (seen.get("0.linear3"), len(seen.get("0.linear1"))) == (None, 1)
    with pytest.raises(UsageError, match=r"'linear1' must be one recorded place; recorded were layers.0.linear1, "):
        seen["linear1"]
    with pytest.raises(UsageError, match=r"layers.1.linear1 has no values here: the module was not called in the con"):
        seen["1.linear1"]
    assert repr(seen) == "<Recording of 2 places, 24.1 KiB>"
    assert not layer[0].linear1._forward_hooks
