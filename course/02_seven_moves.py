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
# # 2. The seven moves
#
# **Which few calls is everything made of, and what does each cost?**
#
# Training on a thousand GPUs sounds complicated. But whatever travels between ranks travels in one of seven moves, and
# you can draw each of them on a napkin. You will see all seven, build two of them yourself, and count what they cost.
#
# It takes about an hour, of which your computer works for one or two minutes. You need notebook 1.

# %%
# %load_ext axon_nb
import torch
import torch.distributed as dist

import axon_nb
from axon_course import check, hint, measured, predict, progress, solution
from axon_course.pictures import draw

# %% [markdown]
# ## How to read the pictures
#
# The first half needs no real ranks. `draw` runs a function in a mock world of four, and shows what each rank has
# before and after. Rank 0 starts with the numbers 0 1 2 3, rank 1 with 10 11 12 13, and so on: each number says where
# it comes from, and so does its colour.
#
# ## Move 1: broadcast, one to all
#
# One rank has something that all need: the first weights of a model, or the seed for random numbers.


# %%
def broadcast(tensor):
    dist.broadcast(tensor, src=1)
    return tensor


draw(broadcast)

# %% [markdown]
# ## Move 2: all_reduce, the sum for all
#
# You know this one. It works number by number: the first numbers of all ranks are added up, then the second ones, and
# so on. **Guess**: what is the first number afterwards?

# %%
predict("2.a", first_number=...)


# %%
def all_reduce(tensor):
    dist.all_reduce(tensor)
    return tensor


summed = draw(all_reduce)
summed

# %%
measured("2.a", first_number=summed.after[0][0])

# %% [markdown]
# Grey numbers come from several ranks. Instead of the sum you can also have the largest number, with
# `op=dist.ReduceOp.MAX`.
#
# ## Move 3: all_gather, everything for all
#
# Nothing is added up. Every rank goes home with a copy of what *all* brought, side by side.


# %%
def all_gather(tensor):
    everything = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everything, tensor)
    return torch.cat(everything)


draw(all_gather, count=2)

# %% [markdown]
# ## Move 4: reduce_scatter, add up and share out
#
# The sum again, but each rank keeps only its own part of it: rank 0 the first quarter, rank 1 the second.


# %%
def reduce_scatter(tensor):
    parts = list(tensor.chunk(dist.get_world_size()))
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter(mine, parts)
    return mine


draw(reduce_scatter)

# %% [markdown]
# Now look at moves 2, 3 and 4 together. What do you get if you do a `reduce_scatter` and then an `all_gather`?


# %%
def one_after_the_other(tensor):
    return all_gather(reduce_scatter(tensor))


draw(one_after_the_other)

# %% [markdown]
# The same as `all_reduce`. **All-reduce = reduce-scatter + all-gather**: keep this sentence. Notebook 5 saves most of a
# model's memory by doing only one half at a time.
#
# ## Move 5: scatter and gather, one and the others
#
# `scatter` deals out one rank's parts like cards. `gather` collects them again, on one rank.


# %%
def scatter(tensor):
    part = torch.empty(1)
    is_dealer = dist.get_rank() == 2
    dist.scatter(part, list(tensor.chunk(4)) if is_dealer else None, src=2)
    return part


draw(scatter)


# %%
def gather(tensor):
    is_collector = dist.get_rank() == 0
    parts = [torch.empty_like(tensor) for _ in range(4)] if is_collector else None
    dist.gather(tensor, parts, dst=0)
    return torch.cat(parts) if is_collector else None


draw(gather, count=1)

# %% [markdown]
# ## Move 6: all_to_all, everybody deals
#
# Every rank deals out its parts to all. Read the picture as a table: rows become columns. Models with *experts* live on
# this move (notebook 9).


# %%
def all_to_all(tensor):
    received = torch.empty_like(tensor)
    dist.all_to_all_single(received, tensor)
    return received


draw(all_to_all)

# %% [markdown]
# ## Move 7: send and recv, one to one
#
# One rank sends, another receives. All other moves can be built from this one, and you will build two.
#
# `dist.isend` *begins* to send and comes back at once; you go on with other work and call `.wait()` on what it returned
# before you touch the tensor again. `dist.recv` waits until the message is there.


# %%
def to_the_right(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    sending = dist.isend(tensor, dst=(rank + 1) % n)
    received = torch.empty_like(tensor)
    dist.recv(received, src=(rank - 1) % n)
    sending.wait()
    return received


draw(to_the_right)

# %% [markdown]
# ### Exercise 2.1: all-gather out of messages
#
# Build move 3 from move 7. `my_all_gather` gets this rank's tensor, of any shape, and returns the tensors of all ranks,
# stacked: row 0 is rank 0's tensor, row 1 is rank 1's, on every rank.

# %%
import torch
import torch.distributed as dist


def my_all_gather(tensor):
    """Return the tensors of all ranks, stacked in rank order; use only `isend`, `send` and `recv`."""
    ### BEGIN SOLUTION 2.1
    rank, n = dist.get_rank(), dist.get_world_size()
    rows = [torch.empty_like(tensor) for _ in range(n)]
    rows[rank].copy_(tensor)
    others = [other for other in range(n) if other != rank]
    sends = [dist.isend(tensor, dst=other) for other in others]
    for other in others:
        dist.recv(rows[other], src=other)
    for sending in sends:
        sending.wait()
    return torch.stack(rows)
    ### END SOLUTION


# %%
check("2.1")

# %% [markdown]
# ## What does it cost?
#
# Two things cost time: *that* a message travels, and *how large* it is. It is like the post: each letter needs a stamp,
# and each kilo has its price. So we count both.
#
# Take an all-reduce of 1,000 numbers with 4 bytes each, on 4 ranks. The simplest way: everybody sends everything to
# everybody, and each adds up. Every rank then sends 3 × 4,000 = 12,000 bytes, and with 1,000 ranks it would be 999
# times its tensor. There is a better way. **Guess** how few bytes per rank are enough.

# %%
predict("2.b", bytes_per_rank=...)

# %% [markdown]
# ### Exercise 2.2: a ring
#
# The n ranks stand in a circle. Each one talks only to its neighbours: it sends to the right, and receives from the
# left. The tensor is cut into n parts, and all parts travel at the same time.
#
# - **First lap**: each part goes round, and every rank adds its own numbers to it. After n - 1 steps each rank holds
#   one part that is finished. (Which move was that?)
# - **Second lap**: the finished parts go round, until everybody has all of them. (And which was this?)
#
# Write `ring_all_reduce`. It may change its input, and returns the sum over all ranks in the same shape. Mind lengths
# that n does not divide. This is the hardest exercise of the notebook: take paper and four coins, begin with the first
# lap, and use the hints.

# %%
import torch
import torch.distributed as dist


def ring_all_reduce(tensor):
    """Return the sum over all ranks; each message is one part of the tensor, and goes to the right neighbour."""
    ### BEGIN SOLUTION 2.2
    rank, n = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % n, (rank - 1) % n
    length = tensor.numel()
    size = -(-length // n)  # numbers per part, rounded up
    flat = torch.zeros(size * n, dtype=tensor.dtype)
    flat[:length] = tensor.flatten()
    parts = flat.chunk(n)
    incoming = torch.empty_like(parts[0])
    for step in range(n - 1):  # first lap: add
        sending = dist.isend(parts[(rank - step) % n], dst=right)
        dist.recv(incoming, src=left)
        sending.wait()
        parts[(rank - step - 1) % n].add_(incoming)
    for step in range(n - 1):  # second lap: hand round
        sending = dist.isend(parts[(rank + 1 - step) % n], dst=right)
        dist.recv(parts[(rank - step) % n], src=left)
        sending.wait()
    return flat[:length].view_as(tensor)
    ### END SOLUTION


# %%
check("2.2")

# %% [markdown]
# The rest of the notebook uses your ring. If it isn't finished yet, borrow the one that `solution("2.2")` shows: put it
# into the cell above, and come back to yours later.
#
# How many bytes does it send? `axon_nb.calls()` counts what a block of code sends, on each rank.

# %%
from axon_nb.comm import World


def count_bytes(world):
    with axon_nb.calls() as counted:
        ring_all_reduce(torch.ones(1000))
    return counted.of("send").bytes


measured("2.b", bytes_per_rank=World.mock(4).run(count_bytes)[0])

# %% [markdown]
# Two laps of three steps, 1,000 bytes each: 6,000, half of the simple way. And the best of it: with n ranks it is
# 2 (n - 1) / n times the tensor, so **less than twice the tensor, however many ranks there are**. This is why training
# on thousands of GPUs is possible at all.
#
# The price: 2 (n - 1) messages, one after the other. For a tiny tensor on many ranks, the stamps cost more than the
# letters.
#
# ## On real ranks
#
# Now your ring runs on four real processes (`%push` sends your function to them), and then `dist.all_reduce` on the
# same numbers. In the timeline below the cell, the light blue bars are the messages of your ring, and the dark blue
# ones are `dist.all_reduce`.

# %%
# %distributed start -n 4
# %push ring_all_reduce

# %%
# %%distributed --watch
numbers = torch.ones(4_000_000) * (rank + 1)
dist.barrier()  # so that all begin together
mine = ring_all_reduce(numbers.clone())
dist.all_reduce(numbers)
print("equal:", torch.equal(mine, numbers))

# %% [markdown]
# The same sums. Yours is probably slower: between two messages Python has its say, and neighbours wait for each other.

# %%
check("2.2", on="ranks")

# %% [markdown]
# ## Stamps and kilos
#
# How long does an all-reduce take, from 1 kB to 16 MB? Each size is tried 20 times, and we keep the median, which a
# single slow try does not move. **Guess**: 16 MB are 16,000 times as many bytes as 1 kB. How many times as long do they
# take?

# %%
predict("2.c", times_longer=...)

# %%
# %%distributed --quiet --out timed
import statistics
import time

for _ in range(20):
    dist.all_reduce(torch.ones(256))  # the first calls are slower
medians = {}
for kilobytes in (1, 16, 256, 1024, 4096, 16384):
    tensor = torch.ones(kilobytes * 256)
    seconds = []
    for _ in range(20):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        seconds.append(time.perf_counter() - start)
    medians[kilobytes] = statistics.median(seconds)
medians

# %%
import pandas as pd

medians = timed[0]
measured("2.c", times_longer=round(medians[16384] / medians[1], 1))

# %%
table = pd.DataFrame({"milliseconds": {f"{size:,} kB": 1000 * seconds for size, seconds in medians.items()}})
table.style.format("{:.2f}").bar(color="#2664B080", vmin=0, width=80)

# %% [markdown]
# For small tensors the time hardly grows: you pay for the stamp. For large ones it grows with the size: you pay per
# kilo. The price of a stamp is the **latency**, and how many bytes travel per second the **bandwidth**. These two
# numbers decide nearly everything in the notebooks that follow. Ten small tensors cost ten stamps; packed into one they
# cost one.
#
# ## What goes wrong
#
# A collective needs the same shape on all ranks. Here rank 2 brings three numbers, and the others bring four.

# %% tags=["raises-exception"]
# %%distributed
short = torch.ones(3 if rank == 2 else 4)
dist.all_reduce(short)

# %% [markdown]
# Read the report: who brought what? Elsewhere this may crash a process, hang, or, worst of all, add up the wrong
# numbers in silence.
#
# ### Exercise 2.3: pass to the right, and never wait for ever
#
# `dist.send` is the simpler sister of `isend`: it comes back when the message is *gone*. For a small message that is at
# once, as it can be stored on the way. For a large one it may only be when the receiver has asked for it. A program in
# which all ranks send first then works in the test, and hangs with the real model.
#
# Write `pass_right` with `dist.send` and `dist.recv` only: every rank passes its tensor to the right, and returns what
# came from the left. In the check, every `send` waits for its receiver.

# %%
import torch
import torch.distributed as dist


def pass_right(tensor):
    """Pass `tensor` to the right neighbour and return the left neighbour's; use only `send` and `recv`."""
    ### BEGIN SOLUTION 2.3
    rank, n = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(tensor)
    if rank % 2 == 0:
        dist.send(tensor, dst=(rank + 1) % n)
        dist.recv(received, src=(rank - 1) % n)
    else:
        dist.recv(received, src=(rank - 1) % n)
        dist.send(tensor, dst=(rank + 1) % n)
    return received
    ### END SOLUTION


# %%
check("2.3")

# %% [markdown]
# ## What you know now
#
# - Seven moves: **broadcast, all_reduce, all_gather, reduce_scatter, scatter and gather, all_to_all, send and recv**.
# - **All-reduce = reduce-scatter + all-gather.**
# - A ring sends less than **twice the tensor** per rank, however many ranks there are.
# - A move costs a **latency** per message, and time per byte. Few large messages beat many small ones.
# - If all ranks begin with the same waiting call, they wait for ever.

# %%
progress()

# %%
# %distributed stop

# %% [markdown]
# **Next:** `03_where_the_memory_goes` weighs a training step before, while and after it runs.
