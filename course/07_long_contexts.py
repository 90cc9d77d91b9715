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
# # 7. Long contexts: ring attention
#
# **A very long text does not fit on one rank. Can its words look at each other if no rank ever sees them all?**
#
# So far the ranks have shared the batch, the weights, or a matrix. Now they share the *text itself*: each rank has a
# part of one long document. That is easy for most of a model, which works on each word alone. But there is one
# layer in which every word looks at all words before it: **attention**. You will teach it to work in parts, and then
# send the parts round a ring. At the end you will find that your ranks were idle for almost half of the time, and cure
# it in three lines.
#
# It takes about 75 minutes, of which your computer works for one or two. You need notebooks 1 and 2.

# %%
# %load_ext axon_nb
import math

import torch
import torch.distributed as dist

from axon_course import check, hint, measured, predict, progress, solution

# %% [markdown]
# ## Attention on half a page
#
# A *token* is a piece of a word. In attention each token has three rows of numbers: a **query** (what am I looking
# for?), a **key** (what can be found here?) and a **value** (what do you get?). A query times a key is a *score*. A
# softmax turns a token's scores into weights that add up to 1, and its result is the mean of all values with these
# weights. In a text that is written from left to right, a token may look at itself and at those before it.
#
# Here is all of it. The function also returns the `lse` of each query, the *logarithm of the sum of the exponentials*
# of its scores. We shall need that soon.


# %%
def attend(q, k, v, mask=None):
    """Return attention of each query to these keys, and its lse. `mask`: which query may look at which key."""
    scores = q @ k.T / math.sqrt(q.shape[1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    lse = scores.logsumexp(dim=1)  # -inf for a query that may look at nothing
    weights = (scores - lse[:, None]).exp().nan_to_num(0.0)
    return weights @ v, lse


torch.manual_seed(0)
q, k, v = torch.randn(3, 1024, 64)
positions = torch.arange(1024)
whole, _ = attend(q, k, v, positions[:, None] >= positions)

# %% [markdown]
# Look at `scores`: it has a number for each pair of tokens. For 1,024 tokens that is 4 MB. Models read contexts of
# 32,768 tokens and more. **Guess** the size of their table of scores, in gigabytes. (Per head, and a layer has dozens.)

# %%
predict("7.a", gigabytes=...)

# %%
tokens = 32_768
scores = torch.empty(tokens, tokens, device="meta")  # a tensor that only pretends: it has a size, and no numbers
measured("7.a", gigabytes=round(scores.nbytes / 1e9, 1))

# %% [markdown]
# 32 times the tokens, 1,000 times the table. And while keys and values grow only with the length of the text, there are
# two of them in every layer. So we want two things: never make the whole table, and never have all keys in one place.
#
# ## Two halves
#
# Let us cut the keys in two halves, and attend to each half separately. Can we get the whole from the two results? A
# mean is tempting. **Guess**: how far off is it, at most? (The values are about as large as 1.)

# %%
predict("7.b", off_by=...)

# %%
mask = positions[:, None] >= positions
first, first_lse = attend(q, k[:512], v[:512], mask[:, :512])
second, second_lse = attend(q, k[512:], v[512:], mask[:, 512:])
measured("7.b", off_by=round(((first + second) / 2 - whole).abs().max().item(), 2))

# %% [markdown]
# Quite far. A token that has found what it looks for in one half has nearly all of its weight there, and the other
# half should hardly count. (And the first 512 tokens may not look at the second half at all.) But each half *knows* its
# total weight: the sum of the exponentials of its scores, before they were divided to add up to 1. Its logarithm is
# `lse`.
#
# ### Exercise 7.1: two parts make a whole
#
# Write `merge(out, lse, out2, lse2)`. It gets the results of two parts of the keys, of shape (queries, width), and
# their `lse`, of shape (queries,). It returns the result of both parts together, and its `lse`: so that you can merge
# it again. A query that may look at nothing in a part has zeros there, and an `lse` of -inf.
#
# Careful: scores may be in the thousands, and exp(1000) is more than a computer can hold. Only differences count.

# %%
import torch


def merge(out, lse, out2, lse2):
    """Return attention to two parts of the keys together, and its lse."""
    ### BEGIN SOLUTION 7.1
    share = torch.sigmoid(lse2 - lse)[:, None]  # of the second part: exp(lse2) / (exp(lse) + exp(lse2))
    return out + share * (out2 - out), torch.logaddexp(lse, lse2)
    ### END SOLUTION


# %%
check("7.1")

# %% [markdown]
# Now the two halves make the whole, but for rounding. And it works for any number of parts, in any order, one after
# the other. That is the trick behind FlashAttention, too, which never writes the table of scores down. There the parts
# are in one GPU's memory. Here they will be on other ranks.
#
# ## The ring
#
# Each of four ranks has a quarter of the tokens: their queries, keys and values. Queries stay where they are. **Keys
# and values go round**, as in the ring of notebook 2: in each step, a rank attends to the block of keys that it has,
# merges the result, and passes the block on to the right. After four steps, all queries have met all keys, and nobody
# has ever had more than two blocks: the one it works on, and the one that is arriving.
#
# And it can be done *at the same time*. The block that you work on can already travel to your neighbour, as you only
# read it. So begin to send, begin to receive, compute, and only then wait. If computing takes longer than the journey,
# the journey is free.
#
# ### Exercise 7.2: keys go round
#
# Write `ring_attention(attend, q, k, v, positions)`. On each rank it gets
#
# - `attend`, a function as above: `attend(q, k, v, mask)` returns a result and its lse;
# - `q`, `k`, `v` of this rank's tokens, of shape (tokens, width), equally many on each rank;
# - `positions`, the places of this rank's tokens in the text: whole numbers, in any order.
#
# It returns the result of this rank's tokens. A token may look at those whose position is not greater than its own.
# When a block of keys arrives, how do you know their positions? They have to travel, too.
#
# `dist.irecv(tensor, src=...)` *begins* to receive into a tensor, as `dist.isend` begins to send. Both return something
# to `.wait()` for. You may copy your `merge` into the cell.

# %%
import torch
import torch.distributed as dist


def ring_attention(attend, q, k, v, positions):
    """Return attention of this rank's tokens to the tokens of all ranks, up to their own position."""
    ### BEGIN SOLUTION 7.2
    rank, n = dist.get_rank(), dist.get_world_size()
    key_positions = positions
    for step in range(n):
        if step < n - 1:  # begin to pass the block on, and to receive the next
            incoming = [torch.empty_like(tensor) for tensor in (k, v, key_positions)]
            works = [dist.isend(tensor, (rank + 1) % n) for tensor in (k, v, key_positions)]
            works += [dist.irecv(tensor, (rank - 1) % n) for tensor in incoming]
        new, new_lse = attend(q, k, v, positions[:, None] >= key_positions)
        if step == 0:
            out, lse = new, new_lse
        else:
            share = torch.sigmoid(new_lse - lse)[:, None]
            out, lse = out + share * (new - out), torch.logaddexp(lse, new_lse)
        if step < n - 1:
            for work in works:
                work.wait()
            k, v, key_positions = incoming
    return out
    ### END SOLUTION


# %%
check("7.2")

# %% [markdown]
# (And training? Backward goes round the ring once more, and the gradients of keys and values travel with them until
# they are home. Libraries do that for you, such as PyTorch's `context_parallel`. The ring is the same.)
#
# ## On real ranks

# %%
# %distributed start -n 4
# %push ring_attention attend

# %%
check("7.2", on="ranks")

# %% [markdown]
# A text of 1,024 tokens, 256 on each rank. First the plain way of dealing them out: the first quarter for rank 0, the
# second for rank 1. A last `barrier` makes all ranks wait until everybody is done, as the next layer would.
#
# Four ranks on few cores get in each other's way, so a small `attend` would not show what happens on four GPUs. So ours
# also rests: for each pair of tokens that look at each other, two millionths of a second. Pairs behind the mask cost
# nothing, as in the fast versions for GPUs.
#
# **Guess**: for how much of the time do the ranks have nothing to do, on average and in percent?

# %%
predict("7.c", percent_idle=...)

# %%
# %%distributed
import time

from torch import nn


class SlowAttend(nn.Module):
    """Attends, and rests; counts the seconds in which it was busy."""

    def __init__(self):
        super().__init__()
        self.busy = 0.0

    def forward(self, q, k, v, mask):
        start = time.perf_counter()
        time.sleep(2e-6 * mask.sum().item())
        found = attend(q, k, v, mask)
        self.busy += time.perf_counter() - start
        return found


def share_idle(positions):
    """Run ring attention on a text of 1,024 tokens; return the share of the time in which this rank did not attend."""
    slow_attend = SlowAttend()
    text = torch.randn(3, 1024, 64, generator=torch.Generator().manual_seed(0)).to(device)
    positions = positions.to(device)
    q, k, v = (tensor[positions] for tensor in text)
    dist.barrier()
    start = time.perf_counter()
    ring_attention(slow_attend, q, k, v, positions)
    dist.barrier()
    return 1 - slow_attend.busy / (time.perf_counter() - start)


_ = share_idle(torch.arange(8).chunk(world_size)[rank])  # once without looking: PyTorch loads what it needs


# %%
# %%distributed --watch --out idle
share_idle(torch.arange(1024).chunk(world_size)[rank])

# %%
measured("7.c", percent_idle=round(25 * sum(idle[rank] for rank in range(4))))

# %% [markdown]
# Look at the timeline: it is a staircase. Rank 0 has the beginning of the text, and its tokens may look at nobody but
# each other. One step, and it is done. Rank 3 has the end, and its tokens look at everything: it works in all four
# steps, and all wait for it. (By hand: rank 0 has half a block of pairs, then 1½, 2½, and 3½ for rank 3. The mean is 2,
# and it takes 3½.)
#
# Look at the lower part of a row, too: those are the blocks that travel, and they do it while the rank computes.
# *Hidden* in the table says how much of their journey cost nothing.
#
# ## What goes wrong
#
# Before we cure it, a mistake that everybody makes once. This text has 1,022 tokens, which four ranks do not divide, so
# `chunk` gives 256 to ranks 0, 1 and 2, and 254 to rank 3.

# %% tags=["raises-exception"]
# %%distributed
positions = torch.arange(1022).chunk(world_size)[rank].to(device)
q, k, v = torch.randn(3, len(positions), 64, device=device)
ring_attention(attend, q, k, v, positions)

# %% [markdown]
# Read the report: who sent what to whom, and what did the other expect? In a ring, everybody's block takes everybody's
# place once, so **all blocks need one size**. In practice, texts are filled up with empty tokens until they divide.
#
# ## Fair pieces
#
# So all ranks need equally many tokens, and still equally much *work*. Nobody says that a rank's tokens must be
# neighbours: your ring takes them in any order. Which tokens would you give to whom?
#
# ### Exercise 7.3, a puzzle: deal out the tokens
#
# Write `my_tokens(length)`. It returns the positions of this rank's tokens, as a tensor. Together the ranks have each
# of the positions 0 … `length` - 1 once, and all have equally many. `length` can be divided by twice the number of
# ranks. The check counts who looks at how many: the busiest rank may have 10 % more work than the average.
#
# Then comes the score. The ranks of a ring wait for each other in *every step*, so it is not enough that the work is
# equal in the end. 1 is perfect. Two ideas come to mind, and only one of them reaches it.

# %%
import torch
import torch.distributed as dist


def my_tokens(length):
    """Return the positions of this rank's tokens, so that all ranks have equally much to do."""
    ### BEGIN SOLUTION 7.3
    rank, n = dist.get_rank(), dist.get_world_size()
    pieces = torch.arange(length).chunk(2 * n)
    return torch.cat([pieces[rank], pieces[2 * n - 1 - rank]])
    ### END SOLUTION


# %%
check("7.3")

# %% [markdown]
# The same text, the same ring, and your way of dealing it out. **Guess** again.

# %%
predict("7.d", percent_idle=...)

# %%
# %push my_tokens

# %%
# %%distributed --watch --out idle
share_idle(my_tokens(1024))

# %%
measured("7.d", percent_idle=round(25 * sum(idle[rank] for rank in range(4))))

# %% [markdown]
# The staircase is gone: all rows end together. Nobody computes faster, and nothing has been sent that was not sent
# before. It is the same work, spread differently. (What is left is mostly the price of few cores.)
#
# ## What you know now
#
# - Attention can be computed **in parts**: each part's result and its **lse** are enough to merge them.
# - In **ring attention** queries stay, and keys and values go round. No rank ever has more than two blocks. This is
#   **context parallelism**.
# - Sending hides behind computing, if you begin to send before you compute.
# - A mask makes work **uneven**. First and last together are fair: **zig-zag**.
# - All blocks need one size.

# %%
progress()

# %%
# %distributed stop

# %% [markdown]
# **Next:** in `08_pipelines` the ranks share the layers, and the question is who waits.
