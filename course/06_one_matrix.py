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
# # 6. One matrix on many ranks
#
# **Can four ranks compute one layer that none of them ever holds?**
#
# In notebook 5 the weights were cut, but a layer still had to be whole while it computed. What if a single layer is too
# large, even for a moment? Then the ranks must *compute* with their parts. This is **tensor parallelism**. It works
# because a product of matrices is made of many small products, and nobody cares who does which.
#
# It takes about 75 minutes, of which your computer works for one or two. You need notebooks 2 and 5.

# %%
# %load_ext axon_nb
import pandas as pd

from axon_course import check, hint, measured, predict, progress, solution

# %distributed start -n 4

# %% [markdown]
# ## Two ways to cut a matrix
#
# A linear layer has a matrix with one row for each number that comes out, its **output features**, and one column for
# each number that goes in, its **input features**. Here are four of each, small enough to check by hand.

# %%
# %%distributed
W = torch.arange(16.0, device=device).view(4, 4)
x = torch.tensor([1.0, 0.0, 2.0, -1.0], device=device)
if rank == 0:
    print(f"W =\n{W.int().cpu().numpy()}\n\nx = {x.int().tolist()}, W @ x = {(W @ x).int().tolist()}")

# %% [markdown]
# **Cut the outputs.** Each rank keeps one row, and computes one number of the result. It needs all of `x`, and nothing
# from the others.

# %%
# %%distributed
my_row = W[rank]
print(f"row {my_row.int().tolist()}, so I have number {rank} of the result: {(my_row @ x).int().item()}")

# %% [markdown]
# **Cut the inputs.** Each rank keeps one column. It needs only its own number of `x`, but what it gets is a *part of
# every sum*. An all-reduce adds the parts up.

# %%
# %%distributed
my_column = W[:, rank]
part = my_column * x[rank]
print(f"column {my_column.int().tolist()} times {x[rank].int().item()}: my part of the sums is {part.int().tolist()}")
dist.all_reduce(part)
print(f"all parts together: {part.int().tolist()}")

# %% [markdown]
# The books call the first way a **column layer** and the second a **row layer**, because they write the matrix the
# other way round than PyTorch does. Remember them like this: the column layer *leaves* its result cut, and the row
# layer *takes* its input cut.
#
# So they fit together. Most of a GPT's weights are in pairs of layers: one makes a token four times as wide, a
# function (GELU) is applied to each number, and the second layer makes it narrow again. **Guess**: if the first is a
# column layer and the second a row layer, how many times must the ranks communicate to compute both?

# %%
predict("6.a", calls=...)

# %%
# %%distributed --out counted
import axon_nb
from axon_nb.parallel import ParallelMLP

torch.manual_seed(0)
mlp = ParallelMLP(8, 32, device=device)  # a column layer, GELU, a row layer
tokens = torch.ones(3, 8, device=device, requires_grad=True)
with axon_nb.calls() as forward_calls:
    result = mlp(tokens)
with axon_nb.calls() as backward_calls:
    result.sum().backward()
if rank == 0:
    print(f"forward:\n{forward_calls}\n\nbackward:\n{backward_calls}")
forward_calls.num_calls

# %%
measured("6.a", calls=counted[0])

# %% [markdown]
# Once. GELU works number by number, so it does not mind that each rank has only some of them. The four ranks meet at
# the end, for one sum.
#
# And once in backward. Why there, too? All ranks started from the same `x`. If you change a number of `x` a little, the
# features of *all* ranks change, so its gradient is a sum over ranks. Backward is the mirror image of forward:
#
# | where | forward | backward |
# | --- | --- | --- |
# | **enter**: the same `x` goes to all ranks | nothing | all-reduce |
# | **leave**: each rank has a part of the sum | all-reduce | nothing |
#
# ### Exercise 6.1: two layers, one sum
#
# Build it. PyTorch cannot know what happens to a gradient on other ranks, so you say it, in an `autograd.Function`: a
# class with a `forward` and its `backward`. Write `Enter` and `Leave`, and with them `split_mlp`, which computes
# `gelu(x @ up.T + up_bias) @ down.T + down_bias`.
#
# A rank gets its part of the weights: `up` has some rows of the whole matrix, `up_bias` the numbers that belong to
# them, and `down` has some columns. `x` and `down_bias` are whole on every rank. Return the whole result. Mind that
# `all_reduce` works in place: do not change a tensor that belongs to others, and take care with `down_bias`.

# %%
import torch
import torch.distributed as dist
import torch.nn.functional as F


class Enter(torch.autograd.Function):
    """The same tensor goes to all ranks."""

    @staticmethod
    def forward(ctx, x):
        ### BEGIN SOLUTION 6.1
        return x.view_as(x)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        ### BEGIN SOLUTION 6.1
        total = gradient.clone()
        dist.all_reduce(total)
        return total
        ### END SOLUTION


class Leave(torch.autograd.Function):
    """Each rank has a part of the sum, and all get the whole."""

    @staticmethod
    def forward(ctx, part):
        ### BEGIN SOLUTION 6.1
        total = part.clone()
        dist.all_reduce(total)
        return total
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        ### BEGIN SOLUTION 6.1
        return gradient
        ### END SOLUTION


def split_mlp(x, up, up_bias, down, down_bias):
    """Return gelu(x @ up.T + up_bias) @ down.T + down_bias of the whole weights; use `Enter.apply`, `Leave.apply`."""
    ### BEGIN SOLUTION 6.1
    features = F.gelu(F.linear(Enter.apply(x), up, up_bias))
    return Leave.apply(F.linear(features, down)) + down_bias
    ### END SOLUTION


# %%
check("6.1")

# %%
check("6.1", on="ranks")

# %% [markdown]
# In the papers, `Enter` is called *f* and `Leave` is called *g*. From here on you may use the library's layers, which
# are made of the same two: `ColumnParallelLinear` and `RowParallelLinear`.
#
# ## Heads
#
# Attention is cut as if it were made for it. It works in **heads**: each has its own queries, keys and values, and
# looks at the text without asking the others. Give each rank some heads. Queries, keys and values are then column
# layers, and the layer behind them, which mixes what the heads have found, is a row layer.
#
# ### Exercise 6.2: attention by heads
#
# Here is whole attention, as our GPT has it.

# %%
import inspect

from axon_nb.parallel.models import Attention

print(inspect.getsource(Attention))

# %% [markdown]
# Write `SplitAttention`. It is made from a whole `Attention`, which all ranks have, and keeps only its rank's part. Its
# `forward` returns what the whole one returns. `ColumnParallelLinear.from_linear(layer)` and
# `RowParallelLinear.from_linear(layer)` keep the rank's part of a layer.
#
# One thing they cannot see: six heads of 4 features are 24 features, which four ranks can divide, but not the heads. If
# the ranks do not divide the heads, raise a `ValueError` that names both numbers.

# %%
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from axon_nb.parallel import ColumnParallelLinear, RowParallelLinear


class SplitAttention(nn.Module):
    """Causal attention; each rank has some of the heads."""

    def __init__(self, whole):
        super().__init__()
        ### BEGIN SOLUTION 6.2
        heads, n = whole.query.out_features // whole.head_size, dist.get_world_size()
        if heads % n:
            raise ValueError(f"{heads} heads cannot be shared by {n} ranks: use a number of heads that {n} divides.")
        self.head_size = whole.head_size
        self.query = ColumnParallelLinear.from_linear(whole.query)
        self.key = ColumnParallelLinear.from_linear(whole.key)
        self.value = ColumnParallelLinear.from_linear(whole.value)
        self.out = RowParallelLinear.from_linear(whole.out)
        ### END SOLUTION

    def forward(self, x):
        """Return what the whole attention returns; x has shape (batch, positions, hidden)."""
        ### BEGIN SOLUTION 6.2
        parts = (self.query(x), self.key(x), self.value(x))
        query, key, value = (part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))
        ### END SOLUTION


# %%
check("6.2")

# %%
check("6.2", on="ranks")

# %% [markdown]
# ## A whole model
#
# `parallelize` does to a GPT what you have done to its parts. Its report says how each layer is cut, and what stays
# whole.

# %%
# %%distributed
from axon_nb.parallel import parallelize
from axon_nb.parallel.models import GPT, GPTConfig, next_byte_loss, standard_library, windows

text = standard_library(1 << 18)  # the source code of Python itself
config = GPTConfig(context=64, hidden=64, heads=4, blocks=2)


def read(batch, seed=0):
    reader = torch.Generator().manual_seed(seed)
    return windows(text, batch=batch, seq=config.context, generator=reader, device=device)


torch.manual_seed(0)
model = GPT(config).to(device)
report = parallelize(model)
between = model.block0(model.embedding(read(2)[0])).detach()  # what travels from one block to the next
if rank == 0:
    print(report)

# %% [markdown]
# Each box is one rank's part of a matrix. `between`, the last one, is what the first block hands to the
# second: an **activation**. Is it cut?

# %%
# %shards model between

# %% [markdown]
# The matrices are cut, some by rows, some by columns. The activation is not cut: each rank has one of full size, and
# all four hold the same numbers. Keep that in mind.
#
# ## What it costs
#
# **Guess**: this GPT has two blocks, each with attention and two layers behind it. How many times do the ranks
# communicate in one step, forward and backward? (Two more are needed around the last layer.)

# %%
predict("6.b", calls=...)

# %%
# %%distributed --out counted
with axon_nb.calls() as step_calls:
    inputs, targets = read(8)
    next_byte_loss(model(inputs), targets).backward()
if rank == 0:
    print(step_calls)
step_calls.num_calls

# %%
measured("6.b", calls=counted[0])

# %% [markdown]
# Four per block: attention enters and leaves, and so do the two layers behind it. Data parallelism sends its gradients
# while backward still computes. Here the next layer cannot begin before the sum is there, so everybody waits, every
# time.
#
# And how much is it? Data parallelism sends gradients, as many as there are weights. Tensor parallelism sends
# activations, as many as there are tokens. **Guess**: with 32 texts per step instead of 2, how many times as many bytes
# does tensor parallelism send?

# %%
predict("6.c", times_as_many=...)

# %%
# %%distributed --quiet --out sent
from torch.nn.parallel import DistributedDataParallel

copies = DistributedDataParallel(GPT(config).to(device))


def sent_in_a_step(network, batch):
    inputs, targets = read(batch)
    with axon_nb.calls() as step_calls:
        next_byte_loss(network(inputs), targets).backward()
    return step_calls.sent


sent_in_a_step(copies, 2)  # its first step also sends the order of its buckets
{batch: (sent_in_a_step(model, batch), sent_in_a_step(copies, batch)) for batch in (2, 8, 32)}

# %%
measured("6.c", times_as_many=round(sent[0][32][0] / sent[0][2][0], 1))

# %%
pd.DataFrame(
    {f"{batch} texts": pair for batch, pair in sent[0].items()},
    index=["tensor parallelism, bytes per rank", "data parallelism, bytes per rank"],
)

# %% [markdown]
# That is why tensor parallelism stays inside one machine, where eight GPUs share very fast wires. Between machines it
# would wait most of the time. Data parallelism does not mind: its bytes do not grow with the batch, and they can hide.
#
# ## What goes wrong
#
# In notebook 4 each rank read its own samples. Somebody does the same here, out of habit, with the two layers from
# above, and rank 3 has a few tokens less than the others.

# %% tags=["raises-exception"]
# %%distributed
my_tokens = torch.rand(5 if rank == 3 else 8, 8, device=device)
result = mlp(my_tokens)

# %% [markdown]
# Read the report: who came to `all_reduce` with what? Then think of the worse case. Had all ranks had 8 tokens, there
# would have been *no error at all*: the ranks would have added up parts of different texts, and trained on nonsense.
# Ranks that share a matrix are *one* model, so they must all read **the same batch**.
#
# ## Each rank its positions
#
# You have seen that the activation between two blocks is whole on every rank. All four do the same norms on the same
# numbers, and all four keep them for backward. That is a waste of memory. But you also know from notebook 2 that
# **all-reduce = reduce-scatter + all-gather**. Do only the first half when you leave, and each rank has the sums for
# *some of the tokens*. It does norms and residuals for those, and the second half waits until the next layer needs all
# tokens. This is **sequence parallelism**: the same bytes, and less memory.
#
# ### Exercise 6.3: each rank its positions
#
# Write `sequence_mlp(x, up, down)`. `x` has shape (positions, hidden), and is only what this rank has: rank 0 has the
# first positions, rank 1 the next. `up` and `down` are this rank's parts, as in 6.1, without biases. The whole
# computation is `x + gelu(norm(x) @ up.T) @ down.T`, with `norm(x) = F.layer_norm(x, x.shape[-1:])`, and you return it
# for this rank's positions.
#
# Again, two autograd functions do the work. `Gather` collects the positions of all ranks, and `ScatterSum` adds up, and
# leaves each rank its positions. What is the mirror of each?
# This is a puzzle, too: the check counts what a rank keeps for backward. Notebook 3 knows how to keep even less.

# %%
import torch
import torch.distributed as dist
import torch.nn.functional as F


class Gather(torch.autograd.Function):
    """From some positions on each rank to all positions on all ranks."""

    @staticmethod
    def forward(ctx, mine):
        ### BEGIN SOLUTION 6.3
        return all_positions(mine)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        ### BEGIN SOLUTION 6.3
        return summed_positions(gradient)
        ### END SOLUTION


class ScatterSum(torch.autograd.Function):
    """From a part of every sum on each rank to the whole sums of some positions."""

    @staticmethod
    def forward(ctx, part):
        ### BEGIN SOLUTION 6.3
        return summed_positions(part)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        ### BEGIN SOLUTION 6.3
        return all_positions(gradient)


def all_positions(mine):
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine.contiguous())
    return torch.cat(parts)


def summed_positions(part):
    parts = [share.contiguous() for share in part.chunk(dist.get_world_size())]
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter(mine, parts)
    return mine
    ### END SOLUTION


def sequence_mlp(x, up, down):
    """Return x + gelu(norm(x) @ up.T) @ down.T for this rank's positions."""
    ### BEGIN SOLUTION 6.3
    entered = Gather.apply(F.layer_norm(x, x.shape[-1:]))
    return x + ScatterSum.apply(F.gelu(entered @ up.T) @ down.T)
    ### END SOLUTION


# %%
check("6.3")

# %%
check("6.3", on="ranks")

# %% [markdown]
# ## A whole block
#
# The library's block of a GPT can do both. Count the bytes that a rank sends in a step, and what it keeps for backward.
# **Guess** the two ratios: with its own positions, to all positions.

# %%
predict("6.d", bytes_sent=..., bytes_kept=...)

# %%
# %%distributed --out compared
from axon_course.memory import SavedBytes
from axon_nb.parallel import TensorParallelBlock

texts = torch.rand(8, 64, 64, device=device)  # 8 texts, 64 positions, 64 numbers for each
dist.broadcast(texts, src=0)  # the same on all ranks


def sent_and_kept(block, x):
    with axon_nb.calls() as step_calls, SavedBytes(block.parameters()) as saved:
        result = block(x)
        kept = saved.bytes
        result.sum().backward()
    return step_calls.sent, kept


torch.manual_seed(0)
whole_positions = TensorParallelBlock(64, 4, causal=True, device=device)
own_positions = TensorParallelBlock(64, 4, causal=True, sequence=True, device=device)
all_sent, all_kept = sent_and_kept(whole_positions, texts)
my_sent, my_kept = sent_and_kept(own_positions, texts.chunk(world_size, dim=1)[rank].contiguous())
my_sent / all_sent, my_kept / all_kept

# %%
measured("6.d", bytes_sent=round(compared[0][0], 2), bytes_kept=round(compared[0][1], 2))

# %% [markdown]
# Norms and residuals are cut; what is gathered in front of a layer is still whole, and so the saving is less than
# three quarters. (A few small messages more are needed for the gradients of norms and biases.) For a whole GPT, say
# `parallelize(model, sequence=True)`.
#
# ## The loss, too
#
# One matrix is left, often the largest: the last layer, with a row for each word of the vocabulary. Cut by rows, it
# gives each rank the **logits** of some words. For 4,096 tokens and 128,000 words, all logits together are two
# gigabytes in float32, more than anything else in the model. Nobody should ever have them all.
#
# But the loss needs them all. The cross entropy of a token is a difference: the logarithm of the sum of the
# exponentials of all its logits (PyTorch's `logsumexp`), less the logit of the right word.
#
# ### Exercise 6.4: a loss without all logits
#
# Write `split_loss(logits, targets)`. `logits` has shape (tokens, words), and is this rank's part: rank 0 has the first
# words, rank 1 the next, as many. `targets` are the numbers of the right words in the whole vocabulary, the same on all
# ranks. Return the mean cross entropy over the tokens, the same on all ranks. `backward` of it gives each rank the
# gradient of its own logits, and needs no communication. Logits may be large, and the exponential of 1,000 is infinite.
#
# The check counts the calls: this is a puzzle, too.

# %%
import torch
import torch.distributed as dist


def split_loss(logits, targets):
    """Return the mean cross entropy of all words' logits, of which this rank has some; the same on all ranks."""
    ### BEGIN SOLUTION 6.4
    rank, words = dist.get_rank(), logits.shape[1]
    place = targets - rank * words
    is_mine = (place >= 0) & (place < words)
    right = logits.gather(1, place.clamp(0, words - 1)[:, None])[:, 0]
    mine = torch.stack([logits.logsumexp(1), torch.where(is_mine, right, 0.0)])
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine.detach())
    parts[rank] = mine  # through this one, the gradient finds its way
    sums, rights = torch.stack(parts).unbind(1)
    return (sums.logsumexp(0) - rights.sum(0)).mean()
    ### END SOLUTION


# %%
check("6.4")

# %%
check("6.4", on="ranks")

# %% [markdown]
# ## What you know now
#
# - **Column, then row**: two layers, one sum. Enter and leave are mirrors of each other.
# - Attention is cut by **heads**; ranks must divide them.
# - Tensor parallelism communicates four times per block, and everybody waits: keep it on **fast wires**.
# - All ranks that share a matrix read **the same batch**.
# - **Sequence parallelism** cuts the activations between the layers, for the same bytes.
# - The **loss** does not need all logits in one place: two numbers per token and rank are enough.

# %%
progress()

# %%
# %distributed stop

# %% [markdown]
# **Next:** in `07_long_contexts` one text is too long for a rank, and attention itself goes round in a ring.
