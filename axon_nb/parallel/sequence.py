"""Context parallelism: attention over a sequence whose positions are split over ranks.

Two exchanges compute the same attention. In a ring, keys and values travel from rank to rank, and each rank merges what
its queries find in each part by its log-sum-exp (Liu et al., Ring Attention with Blockwise Transformers, 2023). With
all_to_all, each rank gets all positions of some heads (Jacobs et al., DeepSpeed Ulysses, 2023).

Causal attention is balanced: the sequence is cut into 2N chunks, and rank r of N holds chunks r and 2N - 1 - r, so that
all ranks compute about the same. torch's own `context_parallel` is experimental, needs equal parts and computed wrong
gradients with balanced parts before 2.14 (https://github.com/pytorch/pytorch/pull/185493).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from axon_nb.comm.collectives.movement import all_gather, all_to_all
from axon_nb.comm.errors import InvalidArgumentError, TensorError
from axon_nb.comm.group import GroupLike, resolve
from axon_nb.records.hooks import missing_hooks

Chunk = tuple[int, int]
"""First position, and the one after the last."""
_EXCHANGES = ("ring", "all_to_all")
_ROWS = 1024
"""Queries whose scores are held at a time where no fused kernel returns the log-sum-exp."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Which queries of this rank meet which keys of another, and how."""

    own: slice
    other: slice
    triangle: bool
    """Whether each query meets only keys up to its own position."""
    mask: torch.Tensor | None
    """Which scores count, shape (batch or 1, 1, queries, keys); None: all, but for `triangle`."""
    scale: float


class ContextParallel:
    """The positions of a sequence, split over the ranks of a group, and attention over all of them.

        context = ContextParallel(tokens.shape[1], group=mesh["cp"])
        with context:  # scaled_dot_product_attention now attends to the positions of all ranks
            logits = model(context.split(tokens), position_ids=context.positions()[None])
            loss = context.mean(cross_entropy(logits.transpose(1, 2), context.split(targets), reduction="none"))
            loss.backward()

    Every rank computes on its positions alone; parameters are replicated, or sharded by FSDP2, over these ranks as over
    those of data parallelism, which average the gradients. Backward communicates, too, so all ranks of the group run
    it. It belongs into the block if it computes activations again (checkpointing).

    Args:
        length: Positions of the whole sequence, at least one for each chunk; parts need not be equal.
        group: The ranks that share the sequence; None means all.
        balanced: Whether a rank holds a chunk from the head and one from the tail of the sequence, as causal attention
            wants; otherwise one chunk.
        exchange: ``ring`` sends keys and values; ``all_to_all`` sends queries, keys, values and outputs, and needs
            numbers of heads that are divisible by the number of ranks.
        documents: The number of the document that each position of the whole sequence belongs to, shape (length,) or
            (batch, length), the same on all ranks: positions attend to their own document only. None: one document.

    Raises:
        InvalidArgumentError: the exchange does not exist, or the sequence is too short for the group.
        TensorError: `documents` has another shape.
    """

    def __init__(
        self,
        length: int,
        *,
        group: GroupLike = None,
        balanced: bool = True,
        exchange: str = "ring",
        documents: torch.Tensor | None = None,
    ) -> None:
        self.group = resolve(group)
        self.length, self.balanced, self.exchange = length, balanced, exchange
        size = self.group.size()
        pieces = 2 * size if balanced else size
        if exchange not in _EXCHANGES:
            raise InvalidArgumentError(f"exchange must be one of {', '.join(_EXCHANGES)}; got {exchange!r}.")
        if length < pieces:
            raise InvalidArgumentError(
                f"length must be at least {pieces} positions for {size} ranks, one per chunk; got {length}."
            )
        if documents is not None and (documents.ndim not in (1, 2) or documents.shape[-1] != length):
            raise TensorError(
                f"documents must have shape ({length},) or (batch, {length}), one number for each position of the "
                f"whole sequence; got {tuple(documents.shape)}."
            )
        self.documents = documents
        edges = [length * piece // pieces for piece in range(pieces + 1)]
        chunks = list(itertools.pairwise(edges))
        self._chunks: list[list[Chunk]] = [
            [chunks[rank], chunks[-1 - rank]] if balanced else [chunks[rank]] for rank in range(size)
        ]
        self._mode = _Attention(self)

    def chunks(self, rank: int | None = None) -> list[Chunk]:
        """Return the chunks of a rank of the group (this one): first position, and the one after the last."""
        return self._chunks[self.group.rank() if rank is None else rank]

    def size(self, rank: int | None = None) -> int:
        """Return how many positions a rank of the group (this one) holds."""
        return sum(stop - start for start, stop in self.chunks(rank))

    def positions(self, rank: int | None = None, *, device: torch.device | str | None = None) -> torch.Tensor:
        """Return the positions in the whole sequence that a rank of the group (this one) holds, shape (positions,)."""
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in self.chunks(rank)])

    def split(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Return this rank's positions of a tensor with all of them along `dim`; its gradient is this rank's alone.

        Raises:
            TensorError: the dimension has another length than the sequence.
        """
        if x.shape[dim] != self.length:
            raise TensorError(f"dimension {dim} must have the sequence's {self.length} positions; got {x.shape[dim]}.")
        return torch.cat([x.narrow(dim, start, stop - start) for start, stop in self.chunks()], dim)

    @torch.no_grad()
    def gather(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Return all positions of a tensor of which each rank has its own along `dim`, without gradients. Collective.

        Raises:
            TensorError: the dimension has another length than this rank's part.
        """
        self._check_part(x, dim)
        joined = all_gather(x.movedim(dim, 0).contiguous(), uneven=True, group=self.group)
        return joined.index_select(0, self._in_order(x.device)).movedim(0, dim)  # type: ignore[no-any-return]

    def mean(self, losses: torch.Tensor) -> torch.Tensor:
        """Return a loss whose mean over ranks, as DDP and FSDP2 take it of gradients, is that of all positions.

        Args:
            losses: One per sample and position of this rank, shape (batch, positions).
        """
        return losses.mean() * (self.size() * self.group.size() / self.length)

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        causal: bool = True,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Attend from this rank's positions to those of all ranks. Collective, and so is its backward.

        Args:
            query: Shape (batch, heads, this rank's positions, head size).
            key: The same; may have fewer heads, each of which then serves several heads of `query`.
            value: Like `key`; its head size may differ with the exchange ``all_to_all``.
            causal: Whether a position attends only to itself and earlier ones.
            scale: Factor of the scores; None: 1 / sqrt(head size).

        Returns:
            The same shape as `query`.

        Raises:
            TensorError: a shape does not fit.
        """
        for tensor in (query, key, value):
            self._check_part(tensor, -2)
        if query.ndim != 4 or query.shape[1] % key.shape[1]:
            raise TensorError(
                "attention needs shape (batch, heads, positions, head size), and heads of the query in multiples of "
                f"those of the key; got {tuple(query.shape)} and {tuple(key.shape)}."
            )
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        if self.exchange == "all_to_all":
            return self._by_heads(query, key, value, causal, scale)
        result: torch.Tensor = _Ring.apply(query, key, value, self, causal, scale)  # type: ignore[no-untyped-call]
        return result

    def __enter__(self) -> ContextParallel:
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def _check_part(self, x: torch.Tensor, dim: int) -> None:
        if x.shape[dim] != self.size():
            raise TensorError(
                f"dimension {dim} must have this rank's {self.size()} of {self.length} positions; got {x.shape[dim]}. "
                "Pass the model `context.split(…)` of each input."
            )

    def _in_order(self, device: torch.device) -> torch.Tensor:
        """Where each position of the sequence stands, once the parts of all ranks are joined."""
        return torch.cat([self.positions(rank, device=device) for rank in range(self.group.size())]).argsort()

    def _mask(self, rows: Chunk, columns: Chunk, causal: bool, device: torch.device) -> torch.Tensor | None:
        """Which of the rows' scores count, shape (batch or 1, 1, rows, columns); None if documents do not matter."""
        if self.documents is None:
            return None
        numbers = self.documents.to(device).reshape(-1, self.length)
        same = numbers[:, rows[0] : rows[1], None] == numbers[:, None, columns[0] : columns[1]]
        if causal:
            places = [torch.arange(*chunk, device=device) for chunk in (rows, columns)]
            same &= places[0][:, None] >= places[1]
        return same[:, None]

    def _blocks(self, owner: int, causal: bool, scale: float, device: torch.device) -> Iterator[_Block]:
        """Yield where this rank's queries meet keys of `owner`."""
        row = 0
        for rows in self.chunks():
            own = slice(row, row := row + rows[1] - rows[0])
            column = 0
            for columns in self.chunks(owner):
                other = slice(column, column := column + columns[1] - columns[0])
                if causal and columns[0] > rows[0]:
                    continue
                triangle = causal and rows == columns
                mask = self._mask(rows, columns, triangle, device)
                if mask is None or mask.any():
                    yield _Block(own, other, triangle and mask is None, mask, scale)

    def _pass_on(self, tensor: torch.Tensor, length: int) -> tuple[torch.Tensor, list[dist.Work]]:
        """Start to send a tensor to the next rank, and to receive the previous one's, of `length` positions."""
        rank, size, group = self.group.rank(), self.group.size(), self.group.torch_group
        received = tensor.new_empty((*tensor.shape[:-2], length, tensor.shape[-1]))
        operations = [
            dist.P2POp(dist.isend, tensor, self.group.ranks[(rank + 1) % size], group),
            dist.P2POp(dist.irecv, received, self.group.ranks[rank - 1], group),
        ]
        return received, dist.batch_isend_irecv(operations)

    def _by_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
    ) -> torch.Tensor:
        size = self.group.size()
        if query.shape[1] % size or key.shape[1] % size:
            raise TensorError(
                f"exchange='all_to_all' needs numbers of heads that are divisible by the {size} ranks; got "
                f"{query.shape[1]} and {key.shape[1]}. Use exchange='ring'."
            )
        whole = (0, self.length)
        mask = self._mask(whole, whole, causal, query.device)
        heads = [self._all_positions(x) for x in (query, key, value)]
        attended = functional.scaled_dot_product_attention(
            heads[0],
            heads[1],
            heads[2],
            attn_mask=mask,
            is_causal=causal and mask is None,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return self._all_heads(attended)

    def _all_positions(self, x: torch.Tensor) -> torch.Tensor:
        """Turn all heads of this rank's positions into this rank's heads of all positions."""
        batch, heads, positions, features = x.shape
        size = self.group.size()
        rows = x.permute(1, 2, 0, 3).reshape(heads * positions, batch, features)
        received = [heads // size * self.size(rank) for rank in range(size)]
        parts = all_to_all(rows, send_sizes=[len(rows) // size] * size, recv_sizes=received, group=self.group).split(
            received
        )
        joined = torch.cat([part.unflatten(0, (heads // size, -1)) for part in parts], dim=1)
        return joined.index_select(1, self._in_order(x.device)).permute(2, 0, 1, 3)

    def _all_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Turn this rank's heads of all positions into all heads of this rank's positions."""
        size = self.group.size()
        by_rank = [
            x.index_select(2, self.positions(rank, device=x.device)).permute(1, 2, 0, 3).flatten(0, 1)
            for rank in range(size)
        ]
        sent = [len(part) for part in by_rank]
        received: torch.Tensor = all_to_all(
            torch.cat(by_rank), send_sizes=sent, recv_sizes=[x.shape[1] * self.size()] * size, group=self.group
        )
        heads: torch.Tensor = received.unflatten(0, (x.shape[1] * size, -1)).permute(2, 0, 1, 3)
        return heads


class _Attention(TorchFunctionMode):
    """Replaces `scaled_dot_product_attention` in a block; torch's own calls it, so models need no change."""

    def __init__(self, context: ContextParallel) -> None:
        super().__init__()
        self._context = context
        self._inside = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.scaled_dot_product_attention or self._inside:
            return func(*args, **(kwargs or {}))
        self._inside = True  # by heads, attention is computed with torch's function
        try:
            return self._attend(*args, **(kwargs or {}))
        finally:
            self._inside = False

    def _attend(  # noqa: PLR0917 - as torch's function
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if attn_mask is not None or dropout_p:
            what = "mask: pass `documents` to ContextParallel" if attn_mask is not None else "dropout: set it to 0"
            raise InvalidArgumentError(f"Attention over a split sequence takes no {what}.")
        return self._context.attention(query, key, value, causal=is_causal, scale=scale)


class _Ring(torch.autograd.Function):
    """Keys and values go round once in forward and once in backward, together with their gradients."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes no keywords
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: ContextParallel,
        causal: bool,
        scale: float,
    ) -> torch.Tensor:
        pair = torch.stack([key, value])
        # Sums of many parts: at least in float32.
        wide = torch.promote_types(query.dtype, torch.float32)
        out = torch.zeros_like(query, dtype=wide, memory_format=torch.contiguous_format)
        total = torch.full(query.shape[:-1], -torch.inf, dtype=wide, device=query.device)
        for owner, held in _round(context, pair):
            for block in context._blocks(owner, causal, scale, query.device):
                part, logs = _attend(query, held, block)
                before = total[:, :, block.own]
                after = torch.logaddexp(before, logs.to(wide))
                # A row that has seen nothing yet keeps its zeros: exp(-inf - -inf) is NaN.
                keep, add = ((weight - after).nan_to_num(-torch.inf).exp()[..., None] for weight in (before, logs))
                out[:, :, block.own] = out[:, :, block.own] * keep + part * add
                total[:, :, block.own] = after
        out = out.to(query.dtype)
        ctx.save_for_backward(query, pair, out, total)
        ctx.context, ctx.causal, ctx.scale = context, causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, pair, out, total = ctx.saved_tensors
        context, gradient = ctx.context, gradients[0].contiguous()
        wide = torch.promote_types(query.dtype, torch.float32)
        of_query = torch.zeros_like(query, dtype=wide)
        of_pair = torch.zeros_like(pair, dtype=wide)
        rank, size = context.group.rank(), context.group.size()
        for owner, held in _round(context, pair):
            if owner != rank:  # what the previous ranks found for these keys
                received, works = context._pass_on(of_pair, context.size(owner))
                for work in works:
                    work.wait()
                of_pair = received
            for block in context._blocks(owner, ctx.causal, ctx.scale, query.device):
                found = _attend_backward(gradient, query, out, total, held, block)
                of_query[:, :, block.own] += found[0]
                of_pair[0][:, :, block.other] += _contract(found[1], pair)
                of_pair[1][:, :, block.other] += _contract(found[2], pair)
        if size > 1:
            of_pair, works = context._pass_on(of_pair, context.size())
            for work in works:
                work.wait()
        of_key, of_value = of_pair.to(pair.dtype)
        return of_query.to(query.dtype), of_key, of_value, None, None, None


def _round(context: ContextParallel, pair: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the keys and values of each rank of the group, from this one backwards; the next travel meanwhile."""
    rank, size = context.group.rank(), context.group.size()
    for step in range(size):
        works: list[dist.Work] = []
        if step + 1 < size:
            following, works = context._pass_on(pair, context.size((rank - step - 1) % size))
        yield (rank - step) % size, pair
        for work in works:
            work.wait()
        if works:
            pair = following


def _expand(pair: torch.Tensor, query: torch.Tensor, block: _Block) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of a block, for each head of the query."""
    times = query.shape[1] // pair.shape[2]
    part = pair[..., block.other, :]
    key, value = part if times == 1 else part.repeat_interleave(times, 2)
    return key, value


def _contract(gradient: torch.Tensor, pair: torch.Tensor) -> torch.Tensor:
    """Sum the gradients of the heads that share keys and values."""
    return gradient if gradient.shape[1] == pair.shape[2] else gradient.unflatten(1, (pair.shape[2], -1)).sum(2)


def _is_fused(query: torch.Tensor) -> bool:
    return query.device.type == "cpu" and not missing_hooks("parallel.sequence")


def _added(mask: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(~mask, -torch.inf)


def _attend(query: torch.Tensor, pair: torch.Tensor, block: _Block) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention of one block, and the log-sum-exp of each row's scores: -inf for rows without any."""
    query, (key, value) = query[:, :, block.own], _expand(pair, query, block)
    if _is_fused(query):
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        added = _added(block.mask, query)
        out, logs = fused(query, key, value, 0.0, block.triangle, attn_mask=added, scale=block.scale)
        # The kernel returns 0 for rows that see nothing.
        return out, logs if block.mask is None else logs.masked_fill(~block.mask.any(-1), -torch.inf)
    outs, sums = [], []
    for _, scores in _scores(query, key, block):
        logs = scores.logsumexp(-1)
        weights = (scores - logs[..., None]).nan_to_num(-torch.inf).exp()
        outs.append(weights.to(value.dtype) @ value)
        sums.append(logs)
    return torch.cat(outs, -2), torch.cat(sums, -1)


def _attend_backward(  # noqa: PLR0917 - what an attention kernel takes
    gradient: torch.Tensor,
    query: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
    pair: torch.Tensor,
    block: _Block,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a block's gradients of query, key and value, given the output and log-sum-exp over all blocks."""
    key, value = _expand(pair, query, block)
    gradient, query, out, total = (x[:, :, block.own] for x in (gradient, query, out, total))
    if _is_fused(query):
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = fused(
            gradient,
            query,
            key,
            value,
            out,
            total,
            0.0,
            block.triangle,
            attn_mask=_added(block.mask, query),
            scale=block.scale,
        )
        return found
    of_query = []
    of_key, of_value = torch.zeros_like(key, dtype=total.dtype), torch.zeros_like(value, dtype=total.dtype)
    wide_key, wide_value = key.to(total.dtype), value.to(total.dtype)
    for rows, scores in _scores(query, key, block):
        above, of_rows = gradient[..., rows, :].to(total.dtype), query[..., rows, :].to(total.dtype)
        weights = (scores - total[..., rows, None]).exp()
        of_value += weights.transpose(-1, -2) @ above
        inner = (above * out[..., rows, :]).sum(-1, keepdim=True)
        of_scores = weights * (above @ wide_value.transpose(-1, -2) - inner) * block.scale
        of_query.append(of_scores @ wide_key)
        of_key += of_scores.transpose(-1, -2) @ of_rows
    return torch.cat(of_query, -2), of_key, of_value


def _scores(query: torch.Tensor, key: torch.Tensor, block: _Block) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield the scores of some rows at a time, in float32 or wider."""
    wide = torch.promote_types(query.dtype, torch.float32)
    count, columns = query.shape[-2], torch.arange(key.shape[-2], device=query.device)
    for start in range(0, count, _ROWS):
        rows = slice(start, min(count, start + _ROWS))
        scores = query[..., rows, :].to(wide) @ key.to(wide).transpose(-1, -2) * block.scale
        seen = None if block.mask is None else block.mask[..., rows, :]
        if block.triangle:
            seen = torch.arange(rows.start, rows.stop, device=query.device)[:, None] >= columns
        yield rows, scores if seen is None else scores.masked_fill(~seen, -torch.inf)
