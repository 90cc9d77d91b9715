"""Experts over ranks: a layer that sends each token to a few of many small networks, and back.

Shazeer et al., Outrageously Large Neural Networks (2017); Fedus et al., Switch Transformers (2022) for capacity and the
balance loss; Wang et al., Auxiliary-Loss-Free Load Balancing (2024) for the bias.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from axon_nb.comm.collectives.movement import all_gather, all_to_all, broadcast
from axon_nb.comm.collectives.reduction import all_reduce_sum
from axon_nb.comm.errors import InvalidArgumentError, TensorError
from axon_nb.comm.group import Backend, GroupLike, ProcessGroup, resolve
from axon_nb.comm.placements import declare_placements
from axon_nb.parallel.data.ddp import prepare_torch_ddp
from axon_nb.records.units import aligned

if TYPE_CHECKING:
    import pandas as pd


class _Mean(torch.autograd.Function):
    """Forward: identity. Backward: divide, so that a sum over ranks becomes the mean that replicas have."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, size: int) -> torch.Tensor:
        ctx.size = size
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] / ctx.size, None


class Experts(nn.Module):
    """A mixture of experts, each a network of two linear layers with SiLU gate, of which each rank holds some.

    A router, replicated on all ranks, chooses `top_k` experts for each token. Tokens travel to the ranks of their
    experts and back by all_to_all, with gradients. Every rank passes tokens of its own, also no token at all; all ranks
    of the group call forward and backward together.

    Gradients are those of the mean over ranks of each rank's loss, as DDP and FSDP2 have it: average those of the
    router over all ranks that see other tokens; those of experts over the ranks that hold the same ones, if any
    (``sync_gradients(layer.expert_parameters(), group=mesh["dp"])``), and never over `group`. `DDP`, also torch's own,
    leaves them alone, `clip_grad_norm` counts each once, and `Checkpoints` loads them on another number of ranks.

    Args:
        hidden: Features of the input and the output.
        inner: Features within an expert.
        num_experts: Experts on all ranks together, divisible by the group size.
        top_k: Experts for each token. Their weights, a softmax over all experts, are scaled to a sum of 1; a single
            one keeps its weight, from which the router learns.
        capacity: Tokens that an expert takes from each rank, as a multiple of an even share; the rest pass by
            (their output lacks that expert's part) and are counted in `dropped`. None: every token is served.
        balance: ``loss``: `balance_loss` is to be added to the loss. ``bias``: `update_bias` after each step moves the
            choice, not the weights, towards experts with less load. None: neither.
        seed: Seed of the weights, the same for any number of ranks; None: rank 0 draws one.
        group: The ranks that share the experts, such as ``mesh["ep"]``; None means all.
        **kwargs: `device` and `dtype`.

    Attributes:
        load: Tokens for each expert in the last forward, from this rank, before any is dropped; shape (num_experts,).
        dropped: How many of those passed by because their expert was full.
        balance_loss: num_experts * sum over experts of (share of choices) * (mean probability), 1 if even; a scalar
            with gradient. None if `balance` is not ``loss``.

    Raises:
        InvalidArgumentError: a number does not fit.
    """

    bias: torch.Tensor

    def __init__(
        self,
        hidden: int,
        inner: int,
        num_experts: int,
        *,
        top_k: int = 2,
        capacity: float | None = None,
        balance: str | None = None,
        seed: int | None = None,
        group: GroupLike = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.group = resolve(group)
        size = self.group.size()
        if num_experts % size:
            raise InvalidArgumentError(f"num_experts must be divisible by the {size} ranks; got {num_experts}.")
        if not 1 <= top_k <= num_experts:
            raise InvalidArgumentError(f"top_k must be 1 to {num_experts}, the number of experts; got {top_k}.")
        if capacity is not None and not capacity > 0:
            raise InvalidArgumentError(f"capacity must be above 0, such as 1.25; got {capacity}.")
        if balance not in (None, "loss", "bias"):
            raise InvalidArgumentError(f"balance must be 'loss', 'bias' or None; got {balance!r}.")
        self.num_experts, self.top_k, self.capacity, self.balance = num_experts, top_k, capacity, balance
        self.hidden = hidden
        count = num_experts // size
        self.router = nn.Linear(hidden, num_experts, bias=False, **kwargs)
        self.gate, self.up = (nn.Parameter(torch.empty(count, hidden, inner, **kwargs)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(count, inner, hidden, **kwargs))
        self.register_buffer(
            "bias", torch.zeros(num_experts, device=kwargs.get("device")), persistent=balance == "bias"
        )
        self._initialize(seed)
        self._declare(group)
        self.load = torch.zeros(num_experts, dtype=torch.int64, device=kwargs.get("device"))
        self.dropped = 0
        self.balance_loss: torch.Tensor | None = None

    @torch.no_grad()
    def _initialize(self, seed: int | None) -> None:
        """Draw each expert from its own seed, so that no rank draws another's and no number of ranks matters."""
        first = torch.randint(2**31, (1,), device="cpu") if seed is None else torch.tensor([seed], device="cpu")
        base = int(broadcast(first.to(self._kind()), group=self.group))
        for key, weight, fan_in in self._drawn():
            generator = torch.Generator("cpu").manual_seed((base * 1_000_003 + key) % 2**63)
            drawn = torch.empty(weight.shape, device="cpu").uniform_(-1.0, 1.0, generator=generator) / math.sqrt(fan_in)
            weight.copy_(drawn)

    def _drawn(self) -> Iterator[tuple[int, torch.Tensor, int]]:
        """Yield a number, the tensor and its inputs for everything that is drawn."""
        yield 0, self.router.weight, self.hidden
        first = self.group.rank() * len(self.up)
        for index in range(len(self.up)):
            for part, weight in enumerate((self.gate, self.up, self.down)):
                yield 1 + 3 * (first + index) + part, weight[index], weight.shape[1]

    def _declare(self, group: Any) -> None:
        if self.group.size() == 1:
            return
        from torch.distributed.tensor import Shard

        prepare_torch_ddp()
        mesh = group if isinstance(group, DeviceMesh) else DeviceMesh.from_group(self.group.torch_group, self._kind())
        for weight in self.expert_parameters():
            declare_placements(weight, mesh, [Shard(0)])

    def _kind(self) -> str:
        return "cuda" if self.group.backend is Backend.NCCL else "cpu"

    def expert_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the experts that this rank holds; the router's are replicated."""
        return [self.gate, self.up, self.down]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map this rank's tokens (…, hidden) to (…, hidden). Collective.

        Raises:
            TensorError: the last dimension is not `hidden`.
        """
        if x.shape[-1] != self.hidden:
            raise TensorError(f"Experts need tokens of {self.hidden} features; got shape {tuple(x.shape)}.")
        tokens = x.reshape(-1, self.hidden)
        expert, weight = self._choose(tokens)
        order = expert.argsort(stable=True)
        order = self._within_capacity(order, expert, len(tokens))
        sent = _loads(expert[order], self.num_experts)
        travelled = self._travel(tokens[order // self.top_k], sent)
        served = torch.zeros_like(tokens).index_add(
            0, order // self.top_k, travelled * weight.flatten()[order, None].to(travelled.dtype)
        )
        return served.view_as(x)

    def _choose(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the expert of each visit, shape (tokens * top_k,), and its weight, shape (tokens, top_k)."""
        scores = self.router(tokens)
        probabilities = scores.softmax(-1, torch.promote_types(scores.dtype, torch.float32))
        chosen = (probabilities + self.bias if self.balance == "bias" else probabilities).topk(self.top_k).indices
        weight = probabilities.gather(-1, chosen)
        expert = chosen.flatten()
        self.load = _loads(expert, self.num_experts)
        if self.balance == "loss":
            share = self.load / max(1, len(expert))
            mean = probabilities.mean(0) if len(tokens) else probabilities.sum(0)
            self.balance_loss = self.num_experts * (share * mean).sum()
        return expert, weight if self.top_k == 1 else weight / weight.sum(-1, keepdim=True)

    def _within_capacity(self, order: torch.Tensor, expert: torch.Tensor, tokens: int) -> torch.Tensor:
        """Keep each expert's first visits; `order` is sorted by expert and then by token."""
        self.dropped = 0
        if self.capacity is None:
            return order
        most = math.ceil(self.capacity * tokens * self.top_k / self.num_experts)
        before = self.load.cumsum(0) - self.load
        place = torch.arange(len(order), device=order.device) - before[expert[order]]
        kept = order[place < most]
        self.dropped = len(order) - len(kept)
        return kept

    def _travel(self, visits: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
        """Send visits, sorted by expert, to their experts and return what these made of them, in the same order."""
        size, count = self.group.size(), len(self.up)
        # How many visits each of this rank's experts gets from each rank: shape (ranks, experts here).
        received = all_to_all(sent, group=self.group).view(size, count)
        to_ranks = _sizes(sent.view(size, count).sum(1), len(visits))
        from_ranks = _sizes(received.sum(1), len(visits))
        arrived = all_to_all(visits, send_sizes=to_ranks, recv_sizes=from_ranks, group=self.group)
        # They come sorted by rank and then by expert; experts want theirs together.
        labels = torch.arange(count, device=visits.device).repeat(size)
        labels = labels.repeat_interleave(received.flatten(), output_size=len(arrived))
        by_expert = labels.argsort(stable=True)
        made = self._compute(arrived[by_expert], _sizes(received.sum(0), len(arrived)))
        home = torch.empty_like(made).index_copy(0, by_expert, made)
        result: torch.Tensor = all_to_all(home, send_sizes=from_ranks, recv_sizes=to_ranks, group=self.group)
        return result

    def _compute(self, visits: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        gate, up, down = (_mean(weight, self.group) for weight in (self.gate, self.up, self.down))
        parts = [
            (nn.functional.silu(part @ gate[index]) * (part @ up[index])) @ down[index]
            for index, part in enumerate(visits.split(sizes))
        ]
        return torch.cat(parts)

    @torch.no_grad()
    def update_bias(self, rate: float = 0.001, *, group: GroupLike = None) -> None:
        """Move the choice by `rate` towards experts with less than the mean load, after a step. Collective.

        Args:
            rate: Change of each expert's bias, in units of probability.
            group: The ranks whose loads count; None means the layer's group.
        """
        load = all_reduce_sum(self.load.float(), group=self.group if group is None else group)
        self.bias += rate * (load.mean() - load).sign().to(self.bias)

    def extra_repr(self) -> str:
        """Describe the layer with the experts of this rank."""
        return (
            f"hidden={self.hidden}, inner={self.up.shape[2]}, num_experts={len(self.up)} of {self.num_experts}, "
            f"top_k={self.top_k}, capacity={self.capacity}"
        )


def _loads(expert: torch.Tensor, count: int) -> torch.Tensor:
    """Return how many visits each expert gets."""
    return torch.bincount(expert, minlength=count)


def _sizes(counts: torch.Tensor, expected: int) -> list[int]:
    """Return counts as numbers; plans, whose tensors have no values, divide the expected total evenly instead."""
    found: list[int] = counts.tolist()
    return found


def _mean(weight: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    if group.size() == 1:
        return weight
    mean: torch.Tensor = _Mean.apply(weight, group.size())  # type: ignore[no-untyped-call]
    return mean


@dataclass(frozen=True)
class ExpertLoad:
    """How many tokens went to each expert in the last forward, by layer; displays as a table with shades."""

    layers: tuple[str, ...]
    """Names of the layers."""
    tokens: torch.Tensor
    """Tokens for each expert, by layer and rank that they came from: shape (layers, ranks, experts), int64."""
    dropped: torch.Tensor
    """Tokens that passed by because their expert was full: shape (layers, ranks), int64."""
    ranks: tuple[int, ...]
    """Global ranks."""

    @property
    def imbalance(self) -> dict[str, float]:
        """The load of the busiest expert over the mean load, by layer: 1 if even. ``axon_nb.log`` takes it as it is."""
        loads = self.tokens.sum(1).double()
        ratios = loads.amax(-1) / loads.mean(-1).clamp(min=1e-300)
        return dict(zip(self.layers, ratios.tolist(), strict=True))

    def to_frame(self) -> pd.DataFrame:
        """Return the tokens as a table: a row for each layer and expert, a column for each rank they came from."""
        import pandas as pd

        count = self.tokens.shape[2]
        rows = pd.MultiIndex.from_product([self.layers, range(count)], names=["layer", "expert"])
        return pd.DataFrame(self.tokens.transpose(1, 2).reshape(-1, len(self.ranks)).tolist(), rows, self.ranks)

    def __repr__(self) -> str:
        lines = [["layer", *map(str, range(self.tokens.shape[2])), "dropped"]]
        for name, loads, dropped in zip(self.layers, self.tokens.sum(1).tolist(), self._dropped(), strict=True):
            lines.append([name, *map(str, loads), dropped])
        return "\n".join(aligned(lines, [at > 0 for at in range(len(lines[0]))]))

    def _dropped(self) -> list[str]:
        totals = self.tokens.sum((1, 2)).tolist()
        drops = self.dropped.sum(1).tolist()
        return [
            f"{drop} ({drop / max(1, total):.0%})" if drop else "0" for drop, total in zip(drops, totals, strict=True)
        ]

    def _repr_html_(self) -> str:
        per_rank = self.tokens.shape[2] // len(self.ranks)
        owners = "".join(f'<th colspan="{per_rank}">on rank {rank}</th>' for rank in self.ranks)
        numbers = "".join(f"<th>{expert}</th>" for expert in range(self.tokens.shape[2]))
        rows = []
        for name, loads, dropped in zip(self.layers, self.tokens.sum(1).tolist(), self._dropped(), strict=True):
            mean = sum(loads) / len(loads) or 1.0
            cells = "".join(
                # Half of the shade is the mean load; the text keeps the page's own colour.
                f'<td style="background:rgba(78,121,167,{min(0.7, 0.35 * load / mean):.2f})" '
                f'title="{load / mean:.2f} of the mean">{load:,}</td>'
                for load in loads
            )
            rows.append(f"<tr><th>{html.escape(name)}</th>{cells}<td>{dropped}</td></tr>")
        return (
            f"<table><thead><tr><th></th>{owners}<th></th></tr><tr><th>tokens for expert</th>{numbers}<th>dropped</th>"
            f"</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        )


def expert_load(model: nn.Module) -> ExpertLoad:
    """Return the load of all `Experts` of a model in their last forward, over their group's ranks. Collective.

    Raises:
        InvalidArgumentError: the model has no `Experts`, or they differ in number or group.
    """
    layers = {name or "experts": layer for name, layer in model.named_modules() if isinstance(layer, Experts)}
    kinds = {(layer.num_experts, layer.group.ranks) for layer in layers.values()}
    if len(kinds) != 1:
        what = (
            "has no Experts layer" if not layers else "has Experts that differ in number or group; ask for each alone"
        )
        raise InvalidArgumentError(f"{type(model).__name__} {what}.")
    group = next(iter(layers.values())).group
    own = torch.stack([torch.cat([layer.load, layer.load.new_tensor([layer.dropped])]) for layer in layers.values()])
    everyone = all_gather(own[None], group=group).cpu()
    return ExpertLoad(tuple(layers), everyone[..., :-1].transpose(0, 1), everyone[..., -1].T, group.ranks)
