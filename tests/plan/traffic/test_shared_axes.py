"""Plans of ranks that share experts or a sequence: what real layers send, and what a rank holds and computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from axon_nb import plan
from axon_nb.comm import World
from axon_nb.errors import UsageError
from axon_nb.parallel import DDP, ContextParallel, Experts, axis_group, make_mesh
from axon_nb.plan.traffic.plan import count_calls
from tests.plan.recording import begin, calls_of, recording

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(900)
SEQ, HIDDEN, HEADS = 16, 8, 2
RATES = plan.Rates(1e9, 1e9)


class Attends(nn.Module):
    """One attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend to earlier positions."""
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        made: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return made


class Stacked(nn.Module):
    """Experts as transformers has them, all of whose tokens one expert computes."""

    def __init__(self, count: int, inner: int) -> None:
        super().__init__()
        self.num_experts = count
        self.gate, self.up = (nn.Parameter(torch.zeros(count, HIDDEN, inner)) for _ in range(2))
        self.down = nn.Parameter(torch.zeros(count, inner, HIDDEN))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Compute each token."""
        made: torch.Tensor = (x @ self.gate[0] * (x @ self.up[0])) @ self.down[0]
        return made


class Routed(nn.Module):
    """A router and its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(HIDDEN, 4, bias=False), Stacked(4, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute each token by two experts."""
        weight, chosen = self.router(x).softmax(-1).topk(2)
        made: torch.Tensor = self.experts(x, chosen) * weight.sum(-1, keepdim=True)
        return made


def _qwen(**more: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 88, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return transformers.Qwen3MoeConfig(
        **{**sizes, "num_hidden_layers": 2, "vocab_size": 64, "max_position_embeddings": 64} | more
    )


def _deepseek() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 88, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
    sizes |= {"n_group": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 8}
    sizes |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
    return transformers.DeepseekV3Config(
        **sizes, num_hidden_layers=2, vocab_size=64, max_position_embeddings=64, tie_word_embeddings=False
    )


def _ring_step(world: World) -> dict[tuple[str, str], tuple[int, int]]:
    mesh = make_mesh(dp=2, cp=2)
    torch.manual_seed(0)
    model, x = DDP(Attends()), torch.ones(2, SEQ, HIDDEN)
    context = ContextParallel(SEQ, group=axis_group(mesh, "cp"))
    begin()
    with context:
        model(context.split(x)).sum().backward()
    everyone = dist.group.WORLD
    assert everyone is not None
    return count_calls(
        calls_of(dist.get_rank()), {mesh["cp"].get_group().group_name: "cp", everyone.group_name: "dp+cp"}
    )


def test_a_ring_sends_what_the_plan_says() -> None:
    x = torch.ones(2, SEQ, HIDDEN)
    expected = plan.communication(Attends, mesh={"dp": 2, "cp": 2}, strategy="ddp", inputs=x).by_operation()
    with recording():
        found = World.mock(4).run(_ring_step)
    assert all(calls == expected for calls in found)
    assert expected["cp", "send"][1] == 4 * (2 * 2 * SEQ // 2 * HIDDEN * 4), (
        "two parts, and both gradients on their way"
    )


def _experts_step(world: World) -> dict[tuple[str, str], tuple[int, int]]:
    mesh = make_mesh(ep=2)
    layer = Experts(HIDDEN, 16, 4, seed=0, group=axis_group(mesh, "ep"))
    x = torch.randn(12, HIDDEN, generator=torch.Generator().manual_seed(world.rank())).requires_grad_()
    begin()
    layer(x).sum().backward()
    return count_calls(calls_of(dist.get_rank()), {mesh["ep"].get_group().group_name: "ep"})


def test_experts_send_what_the_plan_says() -> None:
    x = torch.ones(12, HIDDEN, requires_grad=True)
    planned = plan.communication(Routed, mesh={"ep": 2}, strategy="ddp", inputs=x)
    with recording():
        found = World.mock(2).run(_experts_step)
    calls, size = planned.by_operation()["ep", "all_to_all"]
    assert [made["ep", "all_to_all"][0] for made in found] == [calls, calls]
    assert sum(made["ep", "all_to_all"][1] for made in found) == 2 * size, "ranks differ as their experts' loads do"
    (row,) = planned.select(operation="all_reduce")
    assert row.bytes == HIDDEN * 4 * 4, "the router's gradient alone: ranks hold different experts"


@pytest.mark.parametrize("config", [_qwen(), _deepseek()], ids=["qwen", "deepseek"])
def test_each_rank_holds_its_experts_and_shards_of_them(config: Any) -> None:
    parameters = list(transformers.AutoModelForCausalLM.from_config(config).parameters())
    stacked = sum(p.numel() for p in parameters if p.ndim == 3)
    rest = sum(p.numel() for p in parameters) - stacked
    for mesh, shared, split in (({"ep": 4}, 4, 4), ({"dp": 2, "ep": 4}, 8, 8), ({"ep": 2, "cp": 2}, 4, 4)):
        simulated, formula = (
            plan.memory(config, mesh=mesh, seq=32, batch=2, fragmentation=0.0, method=method)
            for method in ("simulate", "closed_form")
        )
        assert simulated.num_parameters == stacked + rest
        held = simulated.worst.persistent
        assert held.model_states == formula.worst.persistent.model_states
        # Rows are padded where a dimension is not divisible by the ranks.
        assert held.parameters == pytest.approx(4 * (rest / shared + stacked / split), rel=0.02)
        assert held.optimizer == 2 * held.parameters


def test_a_split_sequence_divides_activations_and_work() -> None:
    config = _qwen(max_position_embeddings=2048)
    whole, half = (
        plan.memory(config, mesh=mesh, seq=2048, fragmentation=0.0).worst.peak for mesh in ({"dp": 2}, {"cp": 2})
    )
    assert half.activations == pytest.approx(whole.activations / 2, rel=0.05)
    assert half.optimizer == whole.optimizer
    times = [
        plan.step_time(config, mesh=mesh, seq=2048, rates=RATES, links="nvlink4").parts
        for mesh in ({"dp": 2}, {"cp": 2})
    ]
    for part in ("compute, forward", "compute, backward"):
        assert times[1][part] == pytest.approx(times[0][part] / 2)
    assert times[1]["compute, optimizer"] == times[0]["compute, optimizer"]


def test_experts_and_a_ring_are_part_of_a_pipelines_stages() -> None:
    mesh = {"pp": 2, "ep": 4, "cp": 2}
    options: dict[str, Any] = {"seq": 32, "batch": 4, "num_microbatches": 4, "rates": RATES}
    found, fast = (
        plan.step_time(_qwen(tie_word_embeddings=False), mesh=mesh, links=links, **options)
        for links in ("ethernet-1g", {"all": "ethernet-1g", "ep": "nvlink5", "cp": "nvlink5"})
    )
    assert found.schedule is not None
    assert fast.schedule is not None
    assert found.schedule.step_s > fast.schedule.step_s
    assert found.parts["communication, within stages"] > fast.parts["communication, within stages"]
    rows = found.communication.select(operation="all_to_all", pp_rank=1)
    assert {(row.axis, row.num_ranks) for row in rows} == {("ep", 4)}
    tokens = 4 * 32 // 2
    visits = sum(row.bytes for row in rows if row.phase == "backward")
    assert visits == 2 * tokens * 2 * 32 * 4, "there and back, two experts for each of 32 features in float32"


def test_groups_along_several_axes_have_a_link_of_their_own() -> None:
    found = plan.step_time(_qwen(), mesh={"dp": 2, "ep": 8}, seq=32, rates="h100", links="h100").communication
    assert found.links["ep"].name == "nvlink4"
    assert found.links["dp"].name == "ib-ndr", "one rank of each host has the same experts"
    assert found.links["dp+ep"].name == "8 x ib-ndr"


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Attends, {"mesh": {"ep": 2}}, "has no module with num_experts"),
        (Routed, {"mesh": {"ep": 3}}, "has 4 experts, which ep=3 does not divide"),
        (Routed, {"mesh": {"cp": 2}}, "does not call: leave cp out"),
        (
            Routed,
            {"mesh": {"replicate": 2, "shard": 2, "ep": 2}, "strategy": "hybrid_shard"},
            "hybrid_shard does not work with ep",
        ),
    ],
)
def test_misuse(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan.communication(model, inputs=torch.ones(1, 12, HIDDEN), **options)


def test_a_sequence_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(UsageError, match=r"seq \(31\) must be divisible by cp \(2\)"):
        plan.memory(_qwen(), mesh={"cp": 2}, seq=31)
    with pytest.raises(UsageError, match="inputs= must say which dimension it is"):
        plan.memory(Attends, mesh={"cp": 2}, inputs=plan.TensorSpec((2, SEQ, HIDDEN)))


def test_a_search_tries_experts_and_a_split_sequence_where_the_model_has_them() -> None:
    options: dict[str, Any] = {"seq": 64, "global_batch": 16, "max_tp": 1, "strategies": "full_shard"}
    found = plan.search(_qwen(), 4, 80, max_cp=2, simulate=4, **options)
    tried = [(one.dp, one.ep, one.cp, one.pp) for one in found.candidates]
    assert all(dp * ep * cp * pp == 4 for dp, ep, cp, pp in tried)
    assert {(4, 1, 1, 1), (1, 4, 1, 1), (2, 1, 2, 1), (1, 2, 2, 1), (1, 1, 2, 2)} <= set(tried)
    best = found.candidates[0]
    assert found.to_frame()[["ep", "cp"]].iloc[0].tolist() == [best.ep, best.cp]
    assert "dp  tp  pp  ep  cp  strategy" in str(found)
    simulated = [one for one in found.candidates if one.simulated]
    assert {(one.ep > 1, one.cp > 1) for one in simulated} > {(True, False), (False, True)}
    guessed = plan.search(_qwen(), 4, 80, max_cp=2, **options).candidates
    for one in simulated:
        (guess,) = (other for other in guessed if other.layout(16) == one.layout(16))
        assert guess.memory_bytes == pytest.approx(one.memory_bytes, rel=0.15)


def test_limits_of_a_search() -> None:
    options: dict[str, Any] = {"seq": 64, "global_batch": 16, "max_tp": 1, "strategies": "optimizer_state"}
    found = plan.search(_qwen(), 4, 80, max_ep=2, **options)
    assert {one.ep for one in found.candidates} == {1, 2}
    assert {one.cp for one in found.candidates} == {1}, "64 positions are few"
    assert not any(one.ep > 1 and one.strategy == "optimizer_state" for one in found.candidates)


def test_a_search_without_experts_or_attention_leaves_their_axes_out() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    sequence = plan.TensorSpec(("batch", "seq", 8))
    found = plan.search(make, 4, 80, inputs=sequence, seq=8192, max_cp=4, global_batch=16, rates=RATES, links="nvlink4")
    assert {(one.ep, one.cp) for one in found.candidates} == {(1, 1)}
    assert "ep" not in str(found).splitlines()[1].split()
    long = plan.search(
        Attends,
        4,
        80,
        inputs=plan.TensorSpec(("batch", "seq", HIDDEN)),
        seq=8192,
        global_batch=4,
        rates=RATES,
        links="nvlink4",
    )
    assert {one.cp for one in long.candidates} == {1, 2}, "4,096 positions for each of two ranks"


def _program() -> None:
    layer = Experts(HIDDEN, 16, 8, top_k=2, capacity=1.0, device="cuda")
    context = ContextParallel(4 * SEQ)
    x = torch.randn(2, HEADS, SEQ, 4, device="cuda", requires_grad=True)
    with context:
        functional.scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()
    layer(torch.randn(32, HIDDEN, device="cuda", requires_grad=True)).sum().backward()


def test_a_program_with_experts_and_a_ring_runs_without_values() -> None:
    (rank,) = plan.run(_program, 4).ranks
    sent = {row.operation: (row.calls, row.bytes) for row in rank.calls}
    visits, pair = 32 * 2 * HIDDEN * 4, 2 * x_bytes()
    assert sent["all_to_all"] == (5, 4 * visits + 8 * 8), "numbers of tokens, then there and back, twice"
    assert sent["send"] == (10, 10 * pair), "three times in forward, and seven in backward"


def x_bytes() -> int:
    """Bytes of the program's queries."""
    return 2 * HEADS * SEQ * 4 * 4
