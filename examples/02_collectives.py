# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Collectives, drawn
#
# Each rank of a distributed program has its own memory: no rank sees what another computes. A *collective* is a call
# that all ranks make together and that moves numbers between them. There are only a few of them, and everything else
# (data parallelism, sharded models, pipelines) is built on them.
#
# This notebook needs no cluster. `World.mock(4)` runs four ranks inside this process, one at a time, with real
# semantics: a rank that waits for a call that never comes gets an error. The same calls run unchanged on real ranks, in
# a `%%distributed` cell or under `torchrun`.

# %%
import torch

from axon_nb.comm import (
    ReduceOp,
    World,
    all_gather,
    all_reduce,
    all_reduce_mean,
    all_reduce_sum,
    barrier,
    broadcast,
    gather_tensor,
    recv,
    reduce_scatter_sum,
    scatter_tensor,
    send,
)

world = World.mock(4)

# %% [markdown]
# `run` calls a function once per rank, with that rank's view of the world. The results come back in rank order.


# %%
def hello(world):
    return f"rank {world.rank()} of {world.world_size()}"


world.run(hello)

# %% [markdown]
# ## A picture of memory
#
# Each row below is one rank, and each box is one element of its tensor: before the call on the left, after it on the
# right. The colour shows which rank a number comes from; a number computed from several ranks is dark.

# %%
from IPython.display import HTML

COLOURS = ["#3b6ea5", "#b8551b", "#3c7f35", "#90598a"]
TOGETHER = "#6b6b6b"


def draw(title, before, after, owner):
    """A table with a row for each rank; `owner(rank, position)` is the rank a number after the call comes from."""

    def cell(value, colour):
        box = "display:inline-block;min-width:2.6em;padding:2px 4px;margin:1px;border-radius:4px;text-align:center"
        return f'<span style="{box};color:#fff;background:{colour}">{value:g}</span>'

    def cells(values, colour):
        if values is None:
            return '<span style="opacity:.5">nothing</span>'
        return "".join(cell(value, colour(position)) for position, value in enumerate(values))

    rows = ""
    for rank, (had, has) in enumerate(zip(before, after, strict=True)):
        left = cells(had, lambda position, rank=rank: COLOURS[rank])
        right = cells(has, lambda position, rank=rank: TOGETHER if (o := owner(rank, position)) is None else COLOURS[o])
        tds = "".join(
            f'<td style="text-align:left;padding:2px 12px">{part}</td>' for part in (f"rank {rank}", left, right)
        )
        rows += f"<tr>{tds}</tr>"
    head = "".join(f'<th style="text-align:left;padding:2px 12px">{name}</th>' for name in ("", "before", "after"))
    return HTML(f"<h4>{title}</h4><table><tr>{head}</tr>{rows}</table>")


def show(title, make, call, owner):
    """Run `call` on four mock ranks, each with its own `make(rank)`, and draw both sides."""

    def work(world):
        tensor = make(world.rank())
        before = None if tensor is None else tensor.clone()
        after = call(world, tensor)
        return [None if item is None else item.tolist() for item in (before, after)]

    before, after = zip(*world.run(work), strict=True)
    return draw(title, before, after, owner)


def numbers(rank, count=4):
    """On rank 0: 0 1 2 3, on rank 1: 10 11 12 13."""
    return torch.arange(count, dtype=torch.float32) + 10 * rank


# %% [markdown]
# ## One to all: broadcast
#
# Rank `src` has something that all ranks need, such as a model's initial weights or a random seed. It arrives in place
# on every rank.

# %%
show("broadcast(tensor, src=1)", numbers, lambda world, t: broadcast(t, src=1), lambda rank, position: 1)

# %% [markdown]
# ## All to all, combined: all_reduce
#
# Every rank ends with the sum (mean, minimum, maximum, product) over all ranks. Data-parallel training does this: each
# rank has gradients from its part of the batch, and all step with the mean.

# %%
show("all_reduce_sum(tensor)", numbers, lambda world, t: all_reduce_sum(t), lambda rank, position: None)

# %%
show("all_reduce_mean(tensor)", numbers, lambda world, t: all_reduce_mean(t), lambda rank, position: None)

# %%
show(
    "all_reduce(tensor, ReduceOp.MAX)", numbers, lambda world, t: all_reduce(t, ReduceOp.MAX), lambda rank, position: 3
)

# %% [markdown]
# ## All to all, concatenated: all_gather
#
# Every rank ends with the tensors of all ranks, concatenated in rank order. A sharded model does this before it
# computes: each rank holds a shard of a weight, and for a moment all need the full weight.

# %%
show(
    "all_gather(tensor)", lambda rank: numbers(rank, 1), lambda world, t: all_gather(t), lambda rank, position: position
)

# %% [markdown]
# ## Combined, then split: reduce_scatter
#
# Computes the sum over ranks, and each rank keeps only its own part. Followed by `all_gather` it is an `all_reduce`;
# that is how sharded data parallelism saves memory without sending more.

# %%
show("reduce_scatter_sum(tensor)", numbers, lambda world, t: reduce_scatter_sum(t), lambda rank, position: None)


# %%
def both_halves(world):
    tensor = numbers(world.rank())
    whole = all_gather(reduce_scatter_sum(tensor))
    return torch.equal(whole, all_reduce_sum(tensor))


world.run(both_halves)

# %% [markdown]
# ## One and the others: scatter, gather
#
# `scatter_tensor` splits one rank's tensor into parts; `gather_tensor` concatenates the parts on one rank.

# %%
show(
    "scatter_tensor(tensor, src=2)",
    lambda rank: numbers(2) if rank == 2 else None,
    lambda world, t: scatter_tensor(t, src=2),
    lambda rank, position: 2,
)

# %%
show(
    "gather_tensor(tensor, dst=0)",
    lambda rank: numbers(rank, 1),
    lambda world, t: gather_tensor(t, dst=0),
    lambda rank, position: position,
)

# %% [markdown]
# ## One to one: send, recv
#
# Pipelines pass activations on this way. `recv` needs no shape, because a small header is sent first.


# %%
def pass_on(world, tensor):
    right, left = (world.rank() + 1) % 4, (world.rank() - 1) % 4
    handle = send(tensor, right, async_op=True)
    received = recv(left)
    handle.wait()
    return received


show(
    "send to the right, recv from the left",
    lambda rank: numbers(rank, 2),
    pass_on,
    lambda rank, position: (rank - 1) % 4,
)

# %% [markdown]
# ## Groups
#
# Any call can run on a subset of ranks. Every rank creates the group, whether it is a member or not; only members use
# it.


# %%
def in_groups(world, tensor):
    even, odd = world.new_group(range(0, 4, 2)), world.new_group(range(1, 4, 2))
    return all_reduce_sum(tensor, group=even if even.contains(world.rank()) else odd)


show("all_reduce_sum among even and among odd ranks", numbers, in_groups, lambda rank, position: None)

# %% [markdown]
# ## What goes wrong, and what you see
#
# The classic mistake: a collective inside `if rank == 0`. The others never call it. On real ranks without axon_nb this
# is a silent hang of half an hour; a mock world notices at once that no rank can continue.

# %%
from axon_nb.comm import CommError


def forgetful(world):
    if world.rank() == 0:
        barrier()


try:
    world.run(forgetful)
except CommError as error:
    print(f"{type(error).__name__}: {error}")


# %%
def different_shapes(world):
    all_reduce_sum(torch.ones(3 if world.rank() == 2 else 4))


try:
    world.run(different_shapes)
except CommError as error:
    print(f"{type(error).__name__}: {error}")

# %% [markdown]
# ## The same on real ranks
#
# Nothing above is specific to mock worlds. In a cell that begins with `%%distributed`, `all_reduce_sum(t)` is the same
# call on real processes. `03_data_parallel` trains with them.
