"""The models of published runs: decoder-only transformers, as the traces that the planner makes of them.

A step of one block is traced on tensors without data; the other blocks of a model are equal to it by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from axon_nb.plan.hardware import Work
from axon_nb.plan.tracing.subject import ModelSource
from axon_nb.plan.tracing.trace import ModelTrace, trace_model

TP_PLAN = {
    "embedding.table": "column",
    "block*.attention.[qkv]": "column",
    "block*.attention.out": "row",
    "block*.mlp.up*": "column",
    "block*.mlp.down": "row",
    "head.logits": "column",
}


@dataclass(frozen=True)
class Sizes:
    """A transformer: ``gated`` ones are Llamas, the others GPTs."""

    blocks: int
    hidden: int
    heads: int
    inner: int
    vocab: int
    kv_heads: int = 0
    gated: bool = False
    flash: bool = True
    """Whether attention is one kernel; else it writes its scores."""
    head: int = 0
    """Features of a head; 0: hidden / heads."""
    latent: tuple[int, int] = (0, 0)
    """Features of the compressed queries, and of the compressed keys and values; DeepSeek's attention has both."""
    experts: int = 0
    """Experts in a block, each of `inner` features; 0: the block has an MLP."""
    top_k: int = 0
    """Experts for each token."""
    shared: int = 0
    """Features of the expert that all tokens share; 0: there is none."""
    dense: tuple[int, int] = (0, 0)
    """Number of first blocks that have an MLP in place of experts, and its features."""

    @property
    def kinds(self) -> dict[str, Sizes]:
        """The sizes of each kind of block, by a name for it."""
        plain = replace(self, experts=0, inner=self.dense[1] or self.inner)
        return ({"dense": plain} if self.dense[0] or not self.experts else {}) | (
            {"experts": self} if self.experts else {}
        )

    def kind_of(self, number: int) -> str:
        """The kind of a block."""
        return "experts" if self.experts and number >= self.dense[0] else "dense"


def _gpt(blocks: int, hidden: int, heads: int, vocab: int = 51200) -> Sizes:
    return Sizes(blocks, hidden, heads, 4 * hidden, vocab)


def _megatron(blocks: int, hidden: int, heads: int) -> Sizes:
    """A model of Megatron's papers of 2021 and 2022, before FlashAttention."""
    return replace(_gpt(blocks, hidden, heads), flash=False)


MODELS = {
    "Llama 3.1 8B": Sizes(32, 4096, 32, 14336, 128256, 8, gated=True),
    "Llama 3.1 70B": Sizes(80, 8192, 64, 28672, 128256, 8, gated=True),
    "Llama 3.1 405B": Sizes(126, 16384, 128, 53248, 128256, 8, gated=True),
    "Llama 3 8B": Sizes(32, 4096, 32, 14336, 128256, 8, gated=True),
    "Llama 3 70B": Sizes(80, 8192, 64, 28672, 128256, 8, gated=True),
    "Llama 2 7B": Sizes(32, 4096, 32, 11008, 32000, gated=True),
    "Llama 2 13B": Sizes(40, 5120, 40, 13824, 32000, gated=True),
    "Llama 2 70B": Sizes(80, 8192, 64, 28672, 32000, 8, gated=True),
    "GPT 1.7B": _megatron(24, 2304, 24),
    "GPT 3.6B": _megatron(30, 3072, 32),
    "GPT 7.5B": _megatron(36, 4096, 32),
    "GPT 18.4B": _megatron(40, 6144, 48),
    "GPT 39.1B": _megatron(48, 8192, 64),
    "GPT 76.1B": _megatron(60, 10240, 80),
    "GPT 145.6B": _megatron(80, 12288, 96),
    "GPT 310.1B": _megatron(96, 16384, 128),
    "GPT 529.6B": _megatron(105, 20480, 128),
    "GPT 1T": _megatron(128, 25600, 160),
    "GPT 22B": _megatron(48, 6144, 64),
    "GPT 175B": _megatron(96, 12288, 96),
    "GPT-3 175B": _gpt(96, 12288, 96),
    "GPT-3 5B": _gpt(24, 4096, 32),
    "GPT-3 20B": _gpt(44, 6144, 48),
    "MPT 1B": _gpt(24, 2048, 16, 50368),
    "MPT 3B": _gpt(32, 2560, 20, 50368),
    "MPT 7B": _gpt(32, 4096, 32, 50368),
    "MPT 13B": _gpt(40, 5120, 40, 50368),
    "MPT 30B": _gpt(48, 7168, 56, 50368),
    "MPT 70B": _gpt(80, 8192, 64, 50368),
    "Nemotron 8B": _gpt(32, 4096, 32, 256000),
    "Nemotron 22B": _gpt(40, 6144, 48, 256000),
    "Nemotron 340B": Sizes(96, 18432, 96, 4 * 18432, 256000, 8),
    "Code Llama 34B": Sizes(48, 8192, 64, 22016, 32000, 8, gated=True),
    "OLMo 7B": Sizes(32, 4096, 32, 11008, 100352, gated=True),
    "OLMo 13B": Sizes(40, 5120, 40, 13824, 100352, gated=True),
    "Mixtral 8x7B": Sizes(32, 4096, 32, 14336, 32000, 8, gated=True, experts=8, top_k=2),
    "Qwen3 30B-A3B": Sizes(48, 2048, 32, 768, 151936, 4, gated=True, head=128, experts=128, top_k=8),
    "DeepSeek-V3": Sizes(
        61, 7168, 128, 2048, 129280, gated=True, latent=(1536, 512), experts=256, top_k=8, shared=2048, dense=(3, 18432)
    ),
    "Kimi K2": Sizes(
        61, 7168, 64, 2048, 163840, gated=True, latent=(1536, 512), experts=384, top_k=8, shared=2048, dense=(1, 18432)
    ),
}


class Embedding(nn.Module):
    """Tokens to vectors."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.table = nn.Embedding(sizes.vocab, sizes.hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Integers (batch, seq) to (batch, seq, hidden)."""
        found: torch.Tensor = self.table(tokens)
        return found


class Attention(nn.Module):
    """Causal attention, with rotary positions and grouped heads in Llamas."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.size = sizes.head or sizes.hidden // sizes.heads
        self.rotates, self.flash = sizes.gated, sizes.flash
        self.q = nn.Linear(sizes.hidden, sizes.heads * self.size, bias=not sizes.gated)
        kv = (sizes.kv_heads or sizes.heads) * self.size
        self.k = nn.Linear(sizes.hidden, kv, bias=not sizes.gated)
        self.v = nn.Linear(sizes.hidden, kv, bias=not sizes.gated)
        self.out = nn.Linear(sizes.heads * self.size, sizes.hidden, bias=not sizes.gated)

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        return _rotated(x) if self.rotates else x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend to earlier positions."""
        q, k, v = (made.unflatten(-1, (-1, self.size)).transpose(1, 2) for made in (self.q(x), self.k(x), self.v(x)))
        q, k = self._rotated(q), self._rotated(k)
        times = q.shape[1] // k.shape[1]
        if times > 1:
            k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        if self.flash:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:  # the mask and the scale are in the softmax's kernel
            mixed = functional.dropout(functional.softmax(q @ k.transpose(-1, -2), -1), 0.1) @ v
        made: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return made


def _rotated(x: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, -1)
    angle = torch.zeros(x.shape[-2], x.shape[-1] // 2)
    pair = (first * angle - second * angle, second * angle + first * angle)
    return torch.cat(pair, -1).to(x.dtype)


class LatentAttention(nn.Module):
    """Causal attention of DeepSeek-V2 and later: queries, and keys with values, come from a few latent features.

    Heads have 128 features and 64 rotated ones, which all heads' keys share; values have 128, padded as kernels pad
    them.
    """

    PLAIN, ROTATED = 128, 64

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, (queries, keys) = sizes.heads, sizes.latent
        self.q_down = nn.Linear(sizes.hidden, queries, bias=False)
        self.q_norm, self.kv_norm = nn.RMSNorm(queries), nn.RMSNorm(keys)
        self.q_up = nn.Linear(queries, sizes.heads * (self.PLAIN + self.ROTATED), bias=False)
        self.kv_down = nn.Linear(sizes.hidden, keys, bias=False)
        self.k_rotated = nn.Linear(sizes.hidden, self.ROTATED, bias=False)
        self.kv_up = nn.Linear(keys, sizes.heads * 2 * self.PLAIN, bias=False)
        self.out = nn.Linear(sizes.heads * self.PLAIN, sizes.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend to earlier positions."""
        q = self.q_up(self.q_norm(self.q_down(x))).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        plain, rotated = q.split([self.PLAIN, self.ROTATED], -1)
        q = torch.cat([plain, _rotated(rotated)], -1)
        kv = self.kv_up(self.kv_norm(self.kv_down(x))).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = kv.chunk(2, -1)
        shared = _rotated(self.k_rotated(x)[:, None]).expand(-1, self.heads, -1, -1)
        k = torch.cat([k, shared], -1)
        v = functional.pad(v, (0, self.ROTATED))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)[..., : self.PLAIN]
        made: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return made


class Experts(nn.Module):
    """Gated experts whose weights are stacked."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.num_experts = sizes.experts
        self.up = nn.Parameter(torch.empty(sizes.experts, sizes.hidden, 2 * sizes.inner))
        self.down = nn.Parameter(torch.empty(sizes.experts, sizes.inner, sizes.hidden))

    def forward(self, tokens: torch.Tensor, chosen: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Compute each token (tokens, hidden) by its experts, (tokens, top_k) numbers and weights."""
        order = chosen.flatten().argsort()
        ends = torch.zeros(self.num_experts, dtype=torch.int32)
        visits = tokens[order // chosen.shape[1]]
        gate, up = functional.grouped_mm(visits, self.up, offs=ends).chunk(2, -1)
        made = functional.grouped_mm(functional.silu(gate) * up, self.down, offs=ends)
        made = made * weight.flatten()[order, None].to(made.dtype)
        return torch.zeros_like(tokens).index_add(0, order // chosen.shape[1], made)


class ExpertMlp(nn.Module):
    """A router and its experts, beside a shared one."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.top_k = sizes.top_k
        self.router = nn.Linear(sizes.hidden, sizes.experts, bias=False)
        self.experts = Experts(sizes)
        self.shared = Mlp(replace(sizes, inner=sizes.shared)) if sizes.shared else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what a token's experts make of it."""
        tokens = x.flatten(0, 1)
        weight, chosen = self.router(tokens).float().softmax(-1).topk(self.top_k)
        made: torch.Tensor = self.experts(tokens, chosen, weight).view_as(x)
        return made if self.shared is None else made + self.shared(x)


class Mlp(nn.Module):
    """SwiGLU in Llamas, GELU in GPTs."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.up = nn.Linear(sizes.hidden, sizes.inner, bias=not sizes.gated)
        self.up_gate = nn.Linear(sizes.hidden, sizes.inner, bias=False) if sizes.gated else None
        self.down = nn.Linear(sizes.inner, sizes.hidden, bias=not sizes.gated)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Widen and narrow."""
        inner = functional.gelu(self.up(x)) if self.up_gate is None else functional.silu(self.up_gate(x)) * self.up(x)
        made: torch.Tensor = self.down(inner)
        return made


class Block(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        norm = nn.RMSNorm if sizes.gated else nn.LayerNorm
        self.first, self.second = norm(sizes.hidden), norm(sizes.hidden)
        self.attention = LatentAttention(sizes) if sizes.latent[0] else Attention(sizes)
        self.mlp = ExpertMlp(sizes) if sizes.experts else Mlp(sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add both to the residual stream."""
        x = x + self.attention(self.first(x))
        made: torch.Tensor = x + self.mlp(self.second(x))
        return made


class Head(nn.Module):
    """Logits."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm = (nn.RMSNorm if sizes.gated else nn.LayerNorm)(sizes.hidden)
        self.logits = nn.Linear(sizes.hidden, sizes.vocab, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, seq, vocab)."""
        made: torch.Tensor = self.logits(self.norm(x))
        return made


def model_of(sizes: Sizes, block: Callable[[Sizes], nn.Module] = Block) -> nn.Sequential:
    """Return a model, from embedding to logits.

    Args:
        sizes: Its sizes.
        block: Makes a block.
    """
    model = nn.Sequential()
    model.add_module("embedding", Embedding(sizes))
    for number in range(sizes.blocks):
        model.add_module(f"block{number}", block(sizes.kinds[sizes.kind_of(number)]))
    model.add_module("head", Head(sizes))
    return model


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of logits (batch, seq, vocab) and tokens (batch, seq)."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


class _Tokens:
    """A batch of tokens, described."""

    def __init__(self, batch: int, seq: int) -> None:
        self.shape, self.dtype = (batch, seq), torch.int64


@cache
def _short_trace(sizes: Sizes, batch: int, seq: int) -> ModelTrace:
    tokens: Any = _Tokens(batch, seq)
    one_of_each = replace(sizes, blocks=len(sizes.kinds), dense=(len(sizes.kinds) - 1, sizes.dense[1]))
    source = ModelSource(partial(model_of, one_of_each), tokens, tokens, loss_of)
    return trace_model(source, optimizer=partial(torch.optim.AdamW, fused=True), dtype=torch.bfloat16)


@cache
def _whole(sizes: Sizes) -> nn.Module:
    with torch.device("meta"):
        return model_of(sizes)


@cache
def trace_of(sizes: Sizes, batch: int, seq: int) -> ModelTrace:
    """Return the trace of a step of a whole model on one rank.

    Args:
        sizes: The model.
        batch: Samples of one rank.
        seq: Tokens in each.
    """
    short, model = _short_trace(sizes, batch, seq), _whole(sizes)
    elements = sum(p.numel() for p in model.parameters()) / sum(p.numel() for p in short.model.parameters())
    found = replace(short, model=model, cache={})
    kinds = list(sizes.kinds)
    names = {number: kinds.index(sizes.kind_of(number)) for number in range(sizes.blocks)}
    found.inputs, found.outputs = _repeated(short.inputs, names), _repeated(short.outputs, names)
    found.ready = list(_expanded(short.ready, names))
    found.saved, found.attention = {}, _repeated(short.attention, names)
    found.work = {phase: _repeated(work, names) for phase, work in short.work.items() if phase != "optimizer"}
    step = short.total("optimizer")
    found.work["optimizer"] = {"": Work(step.flops * elements, step.bytes * elements, step.ops * elements)}
    return found


def _repeated(values: dict[str, Any], names: dict[int, int]) -> dict[str, Any]:
    """Copy what belongs to a traced block to all of its kind: `names` has the traced one's number for each."""
    found = {}
    for name, value in values.items():
        block, dot, rest = name.partition(".")
        if block.startswith("block"):
            found |= {f"block{number}{dot}{rest}": value for number, one in names.items() if block == f"block{one}"}
        else:
            found[name] = value
    return found


def _expanded(ready: list[str], names: dict[int, int]) -> Iterable[str]:
    yield from (name for name in ready if name.startswith("head."))
    for number in reversed(names):
        first = f"block{names[number]}."
        yield from (f"block{number}.{name.removeprefix(first)}" for name in ready if name.startswith(first))
    yield from (name for name in ready if name.startswith("embedding."))
