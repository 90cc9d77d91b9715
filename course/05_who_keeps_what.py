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
# # 5. Who keeps what
#
# **Data parallelism keeps the same bytes four times. What is lost if it does not?**
#
# Four ranks, four equal copies of a model: large models do not fit like that. Here the ranks share the work of
# *keeping*. Each holds a part, and lends it to the others for the moment in which they need it. This idea is called
# **ZeRO**, and its best-known form **FSDP**, fully sharded data parallelism. You will build the heart of both.
#
# It takes about 75 minutes, of which your computer works for three. You need notebooks 2 to 4.

# %%
# %load_ext axon_nb
from axon_course import check, hint, measured, predict, progress, solution

# %%
# %distributed start -n 4

# %% [markdown]
# ## A quarter each
#
# A small GPT with Adam keeps 16 bytes for each weight, as you know from notebook 3, and with data parallelism *every*
# rank keeps them. Now we cut all of it: rank 0 keeps the first quarter of every tensor, rank 1 the second, and so on.
# **Guess**: how many bytes does one rank keep for each weight?

# %%
predict("5.a", bytes_per_weight=...)

# %%
# %%distributed --out kept
import axon_nb
from axon_nb.parallel import FSDP, ShardingStrategy
from axon_nb.parallel.models import GPT, GPTConfig, next_byte_loss, standard_library, windows

text = standard_library(1 << 18)  # the source code of Python itself: our text to learn
config = GPTConfig(context=64, hidden=64, heads=4, blocks=4)
reader = torch.Generator().manual_seed(rank)  # each rank reads other places


def make(strategy):
    torch.manual_seed(0)
    model = FSDP(GPT(config).to(device), strategy=strategy)
    return model, model.optimizer(torch.optim.AdamW, lr=3e-3)


def backward(model):
    inputs, targets = windows(text, batch=4, seq=config.context, generator=reader, device=device)
    next_byte_loss(model(inputs), targets).backward()


def step(model, optimizer):
    backward(model)
    optimizer.step()
    optimizer.zero_grad()


num_weights = sum(weight.numel() for weight in GPT(config).parameters())


def bytes_per_weight(model, optimizer):
    step(model, optimizer)  # Adam makes its moments in the first step
    backward(model)  # and now there are gradients, too
    return model.memory_stats().total_bytes / num_weights


copies, copies_optimizer = make(ShardingStrategy.NO_SHARD)  # nothing is cut: data parallelism as in notebook 4
model, optimizer = make(ShardingStrategy.FULL_SHARD)
bytes_per_weight(copies, copies_optimizer), bytes_per_weight(model, optimizer)

# %%
measured("5.a", bytes_per_weight=round(kept[0][1], 1))

# %% [markdown]
# From 16 bytes to 4: a quarter of everything. Look at who has what, in one layer of each of the four blocks: each box
# is one rank's piece, a **shard**. (`%shards model` shows all layers. Layers that look alike share a row.)

# %%
# %%distributed
widest = torch.nn.ModuleList([block.up for name, block in model.module.named_children() if name.startswith("block")])

# %%
# %shards widest

# %% [markdown]
# ## Borrowed for a moment
#
# How can a rank compute with a quarter of a matrix? It cannot. Just before a layer computes, all ranks **gather** its
# pieces, so that each has the whole layer. Just after, they drop what is not theirs. At any moment, only a layer or two
# are whole.
#
# The next cell runs one slow forward: it rests for three seconds inside each block. **Watch the picture
# above** while it runs: one block after the other gets a row of its own, in which every rank has the whole layer, and
# then goes back to its pieces.

# %%
# %%distributed
import time

rests = [
    layer.register_forward_hook(lambda *_: time.sleep(3))
    for name, layer in model.module.named_modules()
    if name.endswith("norm2")  # inside a block
]
backward(model)
optimizer.zero_grad()
for rest in rests:
    rest.remove()

# %% [markdown]
# ## What it costs
#
# Nothing is free. With copies, the ranks average their gradients (an `all_reduce`), and that is all. With shards they
# gather each layer in forward, gather it again in backward, and send gradients to the rank that keeps them. **Guess**:
# how many times as many bytes does the sharded step send as the step with copies?

# %%
predict("5.b", times_as_many_bytes=...)

# %%
# %%distributed --out sent
with axon_nb.calls() as with_copies:
    step(copies, copies_optimizer)
with axon_nb.calls() as with_shards:
    step(model, optimizer)
if rank == 0:
    print(f"with copies:\n{with_copies}\n\nwith shards:\n{with_shards}")
with_shards.sent / with_copies.sent

# %%
measured("5.b", times_as_many_bytes=round(sent[0], 2))

# %% [markdown]
# One and a half times. An `all_reduce` is a `reduce_scatter` and an `all_gather` in one, so it counts as two. Sharding
# needs two `all_gather` and one `reduce_scatter`: three. (`sent` is what each rank sends in a ring.)
#
# That is the whole trade: a quarter of the memory, for half as many bytes again. You can also choose less of it:
#
# | | cut among ranks | bytes per weight, 4 ranks | sent, in `all_reduce`s |
# |---|---|---|---|
# | data parallelism | nothing | 16 | 1 |
# | **ZeRO-1** | moments | 10 | 1 |
# | **ZeRO-2** | moments and gradients | 7 | 1 |
# | **ZeRO-3**, FSDP | moments, gradients and weights | 4 | 1.5 |
#
# ZeRO-1 saves a lot and sends nothing extra. So let us build it.
#
# ### Exercise 5.1: Adam, shared
#
# Write `ZeroAdam`, an optimizer for data parallelism. Weights and gradients stay whole on every rank, but each keeps
# Adam's moments for its own part of the weights only. In `step()`, ranks average their gradients, each steps the part
# that it owns, and then all get the new weights of all parts.
#
# How you cut is up to you: whole tensors ("rank 2 owns tensors 2, 6, 10, …"), or one long row of numbers, cut in equal
# pieces. You may use `torch.optim.Adam` for the part that a rank owns.

# %%
import torch
import torch.distributed as dist


class ZeroAdam:
    """Adam whose moments are shared among ranks. Weights and gradients are whole on every rank."""

    def __init__(self, parameters, lr=1e-3):
        ### BEGIN SOLUTION 5.1
        self.parameters = list(parameters)
        flat = torch.cat([weight.detach().flatten() for weight in self.parameters])
        self.length = -(-len(flat) // dist.get_world_size())  # rounded up: the last pieces may be filled with zeros
        self.mine = torch.nn.Parameter(self.piece_of(flat))
        self.adam = torch.optim.Adam([self.mine], lr=lr)
        ### END SOLUTION

    def step(self):
        """Average gradients, step the weights that this rank owns, and share all new weights."""
        ### BEGIN SOLUTION 5.1
        flat = torch.cat([weight.grad.flatten() for weight in self.parameters])
        dist.all_reduce(flat)
        self.mine.grad = self.piece_of(flat / dist.get_world_size())
        self.adam.step()
        pieces = [torch.empty_like(self.mine) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, self.mine.detach())
        new = torch.cat(pieces)
        self.mine.grad = None
        with torch.no_grad():
            for weight in self.parameters:
                weight.copy_(new[: weight.numel()].view_as(weight))
                new = new[weight.numel() :]

    def piece_of(self, flat):
        first = dist.get_rank() * self.length
        piece = flat[first : first + self.length]
        return torch.cat([piece, piece.new_zeros(self.length - len(piece))])
        ### END SOLUTION


# %%
check("5.1")

# %%
check("5.1", on="ranks")

# %% [markdown]
# ## Whole for a moment
#
# Now the heart of FSDP: a layer is whole only while it computes.
#
# ### Exercise 5.2: gather, compute, drop
#
# `sharded_forward` computes a small network of several layers: `x = relu(x @ weight.T)`, one after the other. But no
# rank has a whole `weight`. It gets `shards`, a list with one tensor for each layer: this rank's piece of that layer's
# numbers, in a row. All pieces of a layer are equally long; if the numbers could not be divided, zeros fill the last
# pieces. `shapes` lists the shapes of the whole weights.
#
# Return what the whole network returns, and drop what you borrowed: at no moment may a rank hold more than the numbers
# of three whole layers. (The pieces that it has just gathered are one, and the weight made of them is another.)

# %%
import torch
import torch.distributed as dist


def sharded_forward(shards, shapes, x):
    """Return relu(… relu(x @ weight_0.T) @ weight_1.T …), with the pieces of each weight spread over ranks."""
    ### BEGIN SOLUTION 5.2
    for shard, shape in zip(shards, shapes, strict=True):
        pieces = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, shard)
        weight = torch.cat(pieces)[: shape.numel()].view(shape)
        x = torch.relu(x @ weight.T)
        del pieces, weight  # they would live on while the next layer is gathered
    return x
    ### END SOLUTION


# %%
check("5.2")

# %%
check("5.2", on="ranks")

# %% [markdown]
# ## Saving what nobody has
#
# Training is done, and you want to save the weights. With data parallelism you would let one rank do it, as all have
# the same. So somebody writes this, and it looks perfectly sensible:

# %% tags=["raises-exception"]
# %%distributed
if rank == 0:
    weight = model.module.block0.up.weight.full_tensor()  # the whole matrix
    print(f"saving {tuple(weight.shape)}")

# %% [markdown]
# Read the report before you read on: who waited, in which call, and for whom?
#
# Nobody has the whole matrix, so `full_tensor()` must gather it: it is a meeting, although it does not look like one.
# With sharded models, *everything that makes something whole is a meeting*: `full_tensor()`, a full state dictionary,
# even the length of all gradients together, by which you clip them.
#
# ### Exercise 5.3: one saves, all take part
#
# Write `whole_weights`. It gets `shards`, a dictionary from names to this rank's pieces, one row of numbers each. On
# rank 0 it returns a dictionary with the same names and the whole rows, and on all others `None`.
#
# Only rank 0 needs them, so the other ranks send their pieces and receive nothing. (In real life rank 0 would pass each
# tensor on to the disk, or every rank would save its own pieces.)

# %%
import torch
import torch.distributed as dist


def whole_weights(shards):
    """Return the whole rows by name on rank 0, None on the others; `shards` are this rank's pieces by name."""
    ### BEGIN SOLUTION 5.3
    whole = {}
    for name, shard in shards.items():
        is_saver = dist.get_rank() == 0
        pieces = [torch.empty_like(shard) for _ in range(dist.get_world_size())] if is_saver else None
        dist.gather(shard, pieces, dst=0)
        if is_saver:
            whole[name] = torch.cat(pieces)
    return whole if dist.get_rank() == 0 else None
    ### END SOLUTION


# %%
check("5.3")

# %%
check("5.3", on="ranks")

# %% [markdown]
# ## What you know now
#
# - **ZeRO** cuts what all ranks have in common. Moments first: that sends nothing extra.
# - **FSDP** cuts the weights, too. Before a layer computes it is gathered, and dropped after: a fraction of the memory,
#   and one and a half times the bytes.
# - Whatever makes a cut tensor whole is a **meeting**.

# %%
progress()

# %%
# %distributed stop

# %% [markdown]
# **Next:** in `06_one_matrix`, ranks compute with a matrix that nobody ever makes whole.
