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
# # 4. Data parallelism, from scratch
#
# **Four ranks read four different batches. How do they stay one model, and what does it cost?**
#
# This is the oldest and most used way to train on many GPUs. Every rank has a whole copy of the model. Each reads its
# own part of the data, and in every step the ranks agree on one direction. You will build it in four lines, then make
# it faster twice, until you have what PyTorch calls `DistributedDataParallel`.
#
# It takes about 75 minutes, of which your computer works for one or two. You need notebooks 1 and 2.

# %%
# %load_ext axon_nb
import torch
import torch.distributed as dist

from axon_course import check, hint, measured, predict, progress, solution

# %%
# %distributed start -n 4

# %% [markdown]
# ## Four copies drift apart
#
# Each rank makes the same small network, with the same first weights, and trains it on a quarter of the digits. Nobody
# communicates. After ten steps we compare one number of the last layer. **Guess**: how many different values do the
# four ranks have?

# %%
predict("4.a", different_values=...)

# %%
# %%distributed --out drifted
import torch.nn.functional as F
from torch import nn

import axon_nb
from axon_course.data import digits

images, labels = (torch.from_numpy(array).to(device) for array in digits())
x, y = images.flatten(1)[rank::world_size], labels[rank::world_size]


def new_network():
    torch.manual_seed(0)  # the same first weights on every rank
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)


def local_loss(network, step, size=32):
    mine = slice(step * size, (step + 1) * size)
    return F.cross_entropy(network(x[mine]), y[mine])


network = new_network()
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
for step in range(10):
    optimizer.zero_grad()
    local_loss(network, step).backward()
    optimizer.step()
network[-1].bias[0].item()

# %%
measured("4.a", different_values=len(set(drifted.values.values())))

# %% [markdown]
# Four ranks, four models. Each learned from its own quarter only.
#
# ## The idea
#
# The loss of a batch is a mean over its samples. So its gradient is a mean, too: if the four parts of a batch are
# equally large, **the gradient of the whole batch is the mean of the gradients of its parts**. Each rank computes the
# gradient of its part; an all-reduce and a division give the mean to everybody. All take the same step from the same
# place, and arrive at the same place.
#
# In its simplest form, that is one `all_reduce` per parameter:

# %%
# %%distributed --watch --out naive
network = new_network()
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
for step in range(10):
    optimizer.zero_grad()
    local_loss(network, step).backward()
    with axon_nb.calls() as counted:
        for parameter in network.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
    optimizer.step()
naive_weights = [parameter.detach().clone() for parameter in network.parameters()]
network[-1].bias[0].item(), counted.num_calls

# %% [markdown]
# The first number is the same on all ranks now: they are one model again. The second says how many calls a step makes:
# one per parameter, six in all. Real models have hundreds.
#
# In the timeline, the upper bar of each rank is what it computes, and the lower one its calls. The calls come *after*
# backward, one after the other, and nobody computes meanwhile. *Hidden* says how much of the communication ran while
# the rank computed: 0 %. (Pale parts are waiting: if ranks share few cores, one of them is always late.)
#
# ### Exercise 4.1: one suitcase
#
# Each call costs a latency, however small it is (notebook 2). So pack all gradients into one long tensor, a *bucket*,
# and travel once.
#
# Write `average_gradients`. After it, every parameter of the model has the mean gradient over all ranks. Careful: if a
# rank has not used a layer, the gradients of that layer are `None` there, but the other ranks need them.

# %%
import torch
import torch.distributed as dist


def average_gradients(model):
    """Replace each gradient of the model by its mean over all ranks, with a single call."""
    ### BEGIN SOLUTION 4.1
    parameters = list(model.parameters())
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    ### END SOLUTION


# %%
check("4.1")

# %% [markdown]
# Now train with it on the real ranks (not ready? borrow `solution("4.1")`), and compare the weights with those of the
# naive loop. **Guess**: how large is the largest difference?

# %%
predict("4.b", largest_difference=...)

# %%
# %push average_gradients

# %%
# %%distributed --watch --out flat
network = new_network()
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
for step in range(10):
    optimizer.zero_grad()
    local_loss(network, step).backward()
    average_gradients(network)
    optimizer.step()
max((new - old).abs().max().item() for new, old in zip(network.parameters(), naive_weights, strict=True))

# %%
measured("4.b", largest_difference=flat[0])

# %% [markdown]
# The same model, to the last bit, with one call per step instead of six.
#
# ## Hide the cost
#
# In the timeline, backward still comes first, and then communication. But backward works from the last layer to the
# first, and the gradients of the last layer are ready long before those of the first. Why not send them already, while
# backward computes the rest?
#
# You need two things:
#
# - `parameter.register_post_accumulate_grad_hook(function)`: PyTorch calls `function(parameter)` once the gradient
#   of this parameter is ready. Backward is not done then: earlier layers still follow.
# - `work = dist.all_reduce(tensor, async_op=True)`: it only *begins* the call. The sum is there after `work.wait()`.
#
# And buckets again: not one call per parameter, and not one bucket for all, as that would be full only at the end. A
# bucket leaves as soon as it has `bucket_bytes` bytes.
#
# ### Exercise 4.2: communicate while backward still runs
#
# Write two methods of the class `Overlapped`. `ready` is the hook: PyTorch calls it in backward, for one parameter
# after the other. `finish`, called after backward, sends what is left and waits; then all gradients are means over
# ranks. You may assume that every step uses all parameters.

# %%
import torch
import torch.distributed as dist


class Overlapped:
    """Averages the gradients of a model in buckets, while backward still runs."""

    def __init__(self, model, bucket_bytes):
        self.bucket_bytes = bucket_bytes
        self.bucket = []  # parameters whose gradients wait for a full bucket
        self.sent = []  # what has been sent and is not back yet
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.ready)

    def ready(self, parameter):
        """Called in backward: the gradient of this parameter is complete."""
        ### BEGIN SOLUTION 4.2
        self.bucket.append(parameter)
        if sum(other.grad.nbytes for other in self.bucket) >= self.bucket_bytes:
            self.send()

    def send(self):
        """Begin to sum the gradients of the bucket, and start an empty one."""
        flat = torch.cat([parameter.grad.flatten() for parameter in self.bucket])
        self.sent.append((dist.all_reduce(flat, async_op=True), flat, self.bucket))
        self.bucket = []
        ### END SOLUTION

    def finish(self):
        """Called after backward: when it returns, all gradients are means over ranks."""
        ### BEGIN SOLUTION 4.2
        if self.bucket:
            self.send()
        for work, flat, parameters in self.sent:
            work.wait()
            flat.div_(dist.get_world_size())
            for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                parameter.grad.copy_(part.view_as(parameter))
        self.sent = []
        ### END SOLUTION


# %%
check("4.2")

# %%
check("4.2", on="ranks")

# %% [markdown]
# Train with it (or with that of `solution("4.2")`), and compare its timeline with the first one.

# %%
# %push Overlapped

# %%
# %%distributed --watch --out overlapped
network = new_network()
averaging = Overlapped(network, bucket_bytes=200_000)
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
for step in range(10):
    optimizer.zero_grad()
    local_loss(network, step).backward()
    averaging.finish()
    optimizer.step()
max((new - old).abs().max().item() for new, old in zip(network.parameters(), naive_weights, strict=True))

# %% [markdown]
# Calls now begin before backward ends. How much of them is hidden depends on your machine: the network is small, and
# four ranks share few cores. On GPUs with large models it is often nearly all of the communication.
#
# What you have built is, in its bones, PyTorch's `DistributedDataParallel`. Here is the original, on the same data and
# from the same first weights:

# %%
# %%distributed
from torch.nn.parallel import DistributedDataParallel

network = new_network()
model = DistributedDataParallel(network, bucket_cap_mb=0.2)
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
for step in range(10):
    optimizer.zero_grad()
    local_loss(model, step).backward()
    optimizer.step()
max((new - old).abs().max().item() for new, old in zip(network.parameters(), naive_weights, strict=True))

# %% [markdown]
# ## A larger batch
#
# Each rank takes 32 samples, so every step learns from 4 × 32 = 128. This is the **effective batch size**, and it grows
# with the number of ranks, although nobody changed the 32. A larger batch gives a more reliable direction, so you may
# take longer steps; a common rule is to multiply the learning rate by the same factor, and to warm up. If you move a
# program from one GPU to eight and change nothing else, you have changed the training.
#
# ## What goes wrong
#
# Averaging needs *everybody*, in *every* step. Here rank 3 runs out of data one step before the others. It leaves the
# loop; they do not.

# %% tags=["raises-exception"]
# %%distributed
network = new_network()
steps = 4 if rank == 3 else 5
for step in range(steps):
    network.zero_grad()
    local_loss(network, step).backward()
    for parameter in network.parameters():
        dist.all_reduce(parameter.grad)

# %% [markdown]
# Who waits for whom, and in which line? The cure is not in the loop but in the data: **all ranks must have equally many
# batches**. So somebody has to deal out the samples with care.
#
# ### Exercise 4.3: who reads which sample
#
# Write `my_share(length, epoch)`. It returns the indices of the samples that this rank reads, as a list:
#
# - together, the ranks read all samples, 0 to `length` - 1;
# - the order is random, another one in each epoch, and the same when asked again;
# - all ranks have equally many. If they do not divide `length`, a few samples are read twice.
#
# PyTorch's `DistributedSampler` does just this; everybody forgets to call its `set_epoch` once.

# %%
import torch
import torch.distributed as dist


def my_share(length, epoch):
    """Return the indices of this rank's samples in an epoch, in the order in which it reads them."""
    ### BEGIN SOLUTION 4.3
    n = dist.get_world_size()
    order = torch.randperm(length, generator=torch.Generator().manual_seed(epoch)).tolist()
    order += order[: -length % n]
    return order[dist.get_rank() :: n]
    ### END SOLUTION


# %%
check("4.3")

# %% [markdown]
# ## What you know now
#
# - In data parallelism every rank has the **whole model** and a **part of the batch**. The mean of the gradients makes
#   them one model.
# - **Buckets** save calls. **Overlap** hides them behind backward.
# - In a step each rank sends almost twice the size of the model, however many ranks there are.
# - The effective batch grows with the ranks. All need equally many batches, from one shuffled order.
#
# One thing is still wasteful: the same weights, gradients and optimizer state, four times. Notebook 5 asks whether that
# has to be.

# %%
progress()

# %%
# %distributed stop
