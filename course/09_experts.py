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
# # 9. Experts
#
# **What if each token needs only two of eight experts, and the experts live on different ranks?**
#
# In every model so far, all numbers went through all weights. A **mixture of experts** is lazier, and cleverer. It has
# several small networks in place of a large one, the *experts*, and for each token it asks only those two that know
# best. So a model can have eight times the weights without computing eight times as much. Most of the largest models
# are built like this.
#
# There is a catch, and this notebook is about it: nobody knows in advance who will be asked.
#
# It takes about an hour, of which your computer works for one or two minutes. You need notebooks 1, 2 and 4.

# %%
# %load_ext axon_nb
import torch
import torch.distributed as dist
import torch.nn.functional as F

from axon_course import check, hint, measured, predict, progress, solution
from axon_course.data import digits
from axon_course.pictures import draw

# %% [markdown]
# ## A layer that chooses
#
# A *token* is what a layer works on: in a language model a piece of a word. Here each token is a handwritten digit, a
# row of 64 numbers.
#
# A small matrix, the **router**, gives each token a score for each expert. Softmax makes them add up to 1. The token
# visits the two experts with the highest scores, and the layer returns their two results, weighted by the scores.
#
# Below, the router is fresh: its weights are random, and nothing has been learned. 512 tokens make 1,024 visits, and
# there are 8 experts, so 128 visits each would be fair. **Guess**: how many visits does the most popular expert get?

# %%
predict("9.a", most_visits=...)

# %%
images = torch.from_numpy(digits()[0]).flatten(1)[:512]
torch.manual_seed(0)
router = torch.nn.Linear(64, 8, bias=False)
scores = F.softmax(router(images), dim=1)
weights, choice = scores.topk(2)  # each token's two highest scores, and whose they are
visits = torch.bincount(choice.flatten(), minlength=8)
print("visits to experts 0 to 7:", visits.tolist())

# %%
measured("9.a", most_visits=visits.max().item())

# %% [markdown]
# Not fair at all, and nobody has meant it so. All digits look a little alike (a bright stroke on a dark ground), so
# they like the same experts. Keep this picture in mind; it will cost us.
#
# ## Experts move out
#
# Four ranks, eight experts: each rank keeps two of them. Rank 0 has experts 0 and 1, rank 1 has 2 and 3, and so on.
# This is **expert parallelism**. Each rank also reads its own tokens, as in data parallelism. So a token on rank 0 that
# wants expert 5 has to travel to rank 2, and its result has to come back.
#
# You know the move for this: `all_to_all`, everybody deals. But in notebook 2, everybody dealt the same number to each.
# Now the numbers differ from rank to rank, and from step to step. `all_to_all` of `axon_nb.comm` takes them as
# `send_sizes`: how many rows go to rank 0, how many to rank 1, and so on.

# %%
from axon_nb.comm import all_to_all


def uneven(tensor):
    mine = [[1, 3, 0, 0], [0, 4, 0, 0], [1, 1, 1, 1], [0, 2, 1, 1]]  # by sender: rows for ranks 0, 1, 2 and 3
    return all_to_all(tensor, send_sizes=mine[dist.get_rank()])


draw(uneven)

# %% [markdown]
# Each rank still has four numbers before. Afterwards rank 1 has ten of them, and rank 2 has two. This is how a popular
# expert looks from outside.
#
# ## What goes wrong
#
# How does a rank know how many rows will come? It cannot. PyTorch's own call, `dist.all_to_all_single`, wants both
# lists from you: what you send, and what you receive. Here somebody thought: I will get as many as I send. Start the
# ranks, run it, and read the report before you read on.

# %%
# %distributed start -n 4

# %% tags=["raises-exception"]
# %%distributed
sends = [rank] * world_size  # rank 0 sends nothing, rank 3 sends three rows to each
rows = torch.full((sum(sends), 2), float(rank), device=device)
arrived = torch.empty_like(rows)
dist.all_to_all_single(arrived, rows, sends, sends)  # into, from, sizes to receive, sizes to send

# %% [markdown]
# Rank 1 sends one row to each, so it made room for one row from each. But rank 0 has none to send. Somebody has to
# *say* how many rows will come. So before the rows travel, their numbers travel: one small all-to-all with one number
# for each rank. `all_to_all` of `axon_nb.comm` does this for you if you leave the second list out. It differs from
# PyTorch's call in one more way: **gradients travel back** through it. In backward, each row's gradient goes back the
# way the row came.
#
# ### Exercise 9.1: there and back
#
# Write `through_experts(x, choice, experts)`. On each rank it gets
#
# - `x`, this rank's tokens, one row each (perhaps none);
# - `choice`, the number of the expert that each row wants, counted over all ranks: 0, 1, 2, …;
# - `experts`, the list of this rank's own experts, equally many on each rank. Rank r has the r-th part of all of them.
#   An expert is a function from rows to as many rows.
#
# It returns the result of each row, in the order of `x`. The three parts have names that you will meet in papers:
# **dispatch** (rows travel), **compute**, **combine** (results travel back).
#
# Two tips. Rows that go to the same rank must stand together: sort first, and undo it at the end. And an expert may get
# no rows at all; let it compute anyway (why? think of backward).

# %%
import torch
import torch.distributed as dist

from axon_nb.comm import all_to_all


def through_experts(x, choice, experts):
    """Return, for each row of `x`, what the expert with the number in `choice` makes of it, on whatever rank it is."""
    ### BEGIN SOLUTION 9.1
    n, rank = dist.get_world_size(), dist.get_rank()
    # Dispatch. Sorted by expert, the rows are sorted by rank, too.
    order = choice.argsort(stable=True)
    sent = torch.bincount(choice // len(experts), minlength=n)  # rows for each rank
    received = all_to_all(sent)  # rows from each rank
    sizes = {"send_sizes": sent.tolist(), "recv_sizes": received.tolist()}
    arrived = all_to_all(x[order], **sizes)
    wanted = all_to_all(choice[order], **sizes) - rank * len(experts)
    # Compute: each expert its rows. `rows` are places among those that arrived.
    rows = [(wanted == number).nonzero().flatten() for number in range(len(experts))]
    results = torch.cat([expert(arrived[mine]) for expert, mine in zip(experts, rows, strict=True)])
    results = results[torch.cat(rows).argsort()]
    # Combine: the way back has the sizes swapped.
    back = all_to_all(results, send_sizes=received.tolist(), recv_sizes=sent.tolist())
    return back[order.argsort()]
    ### END SOLUTION


# %%
check("9.1")

# %%
check("9.1", on="ranks")

# %% [markdown]
# ## A model with experts
#
# Now a whole model on the real ranks: a layer of eight experts, and a small matrix that reads the digit from its
# result. The layer *adds* to its input (`x + …`), as layers in large models do.
#
# Your computer has few cores, and four ranks would get in each other's way. So each expert also rests for 400
# millionths of a second per row, as if it were larger. Then you see where the time goes on four GPUs.

# %%
# %push through_experts

# %%
# %%distributed
import time

import torch.nn.functional as F
from torch import nn

from axon_course.data import digits
from axon_nb.comm import all_to_all

NUM_EXPERTS = 2 * world_size
images, labels = (torch.from_numpy(array).to(device) for array in digits())
x, y = images.flatten(1)[rank::world_size], labels[rank::world_size]


class Expert(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, rows):
        time.sleep(400e-6 * len(rows))
        return super().forward(rows)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)  # router and head: the same on every rank
        self.router = nn.Linear(64, NUM_EXPERTS, bias=False)
        self.head = nn.Linear(64, 10)
        torch.manual_seed(100 + rank)  # experts: other ones on every rank
        self.experts = nn.ModuleList([Expert(), Expert()])

    def forward(self, x):
        scores = F.softmax(self.router(x), dim=1)
        weights, choice = scores.topk(2)
        twice = x.repeat_interleave(2, dim=0)  # a token makes two visits
        visits = through_experts(twice, choice.flatten(), self.experts)
        results = (visits.view(len(x), 2, -1) * weights[..., None]).sum(dim=1)
        return self.head(x + results), scores, choice


def average(model):
    """Router and head are copies: add up their gradients. An expert exists once, and has met the tokens of all."""
    copies = [*model.router.parameters(), *model.head.parameters()]
    flat = torch.cat([parameter.grad.flatten() for parameter in copies])
    dist.all_reduce(flat)
    for parameter, part in zip(copies, flat.split([p.numel() for p in copies]), strict=True):
        parameter.grad.copy_(part.view_as(parameter))
    for parameter in model.parameters():
        parameter.grad /= world_size


def train(model, steps, extra_loss=None):
    """Train; return the visits of the last ten steps, by expert, of this rank's tokens."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    visits = torch.zeros(NUM_EXPERTS, dtype=torch.int64)
    for step in range(steps):
        first = step * 32 % (len(x) - 32)
        logits, scores, choice = model(x[first : first + 32])
        loss = F.cross_entropy(logits, y[first : first + 32])
        if extra_loss is not None:
            loss = loss + extra_loss(scores, choice)
        optimizer.zero_grad()
        loss.backward()
        average(model)
        optimizer.step()
        if step >= steps - 10:
            visits += torch.bincount(choice.flatten(), minlength=NUM_EXPERTS).cpu()
    return visits.tolist()


_ = train(Model().to(device), steps=1)  # in its first step, PyTorch loads what it needs: not a step to look at

# %% [markdown]
# In each step 4 × 32 tokens make 256 visits. All ranks wait for each other when results travel back, so a step is as
# slow as its busiest rank. **Guess**: for how much of the time do the ranks wait for the busiest one, on average and in
# percent? (If all visits were spread evenly, 0. If one rank did everything, 75.)

# %%
predict("9.b", percent_waiting=...)

# %%
# %%distributed --watch --out visited
model = Model().to(device)
train(model, steps=30)

# %% [markdown]
# Look at the timeline. Who computes, and who waits for whom? The table under it has a column *waited for*.
#
# The reason is in the visits. Each row is a rank that sends tokens, each column an expert. The stronger the
# colour, the more visits.

# %%
import pandas as pd


def heat_map(visited):
    table = pd.DataFrame([visited[rank] for rank in range(4)])
    table.index = [f"rank {rank}" for rank in table.index]
    table.columns = [f"expert {expert} (rank {expert // 2})" for expert in table.columns]
    table.loc["all"] = table.sum()
    return table.style.apply(
        lambda row: [f"background-color: rgba(38, 100, 176, {0.6 * visits / row.max():.2f})" for visits in row], axis=1
    )


def percent_waiting(visited):
    """The average rank's share of waiting, if each visit takes equally long."""
    busy = pd.DataFrame([visited[rank] for rank in range(4)]).sum().to_numpy().reshape(4, 2).sum(axis=1)
    return round(100 * (1 - busy.mean() / busy.max()), 1)


heat_map(visited)

# %%
measured("9.b", percent_waiting=percent_waiting(visited))

# %% [markdown]
# Ranks that wait are GPUs that somebody pays for. And it does not get better by itself: an expert with many visitors
# learns faster, and so it gets more visitors.
#
# ## A limit of seats
#
# The first cure is rough. Each expert gets a fixed number of seats: its fair share of visits, times a **capacity
# factor**, such as 1.25. Visits beyond that are **dropped**: the expert does not see them. The token goes on without
# this result, which is why the layer *adds* to its input: nothing added is still a token.
#
# To keep it simple (and it is done so in practice), each rank hands out seats for its own tokens alone. With 16 visits
# on a rank, 4 experts and a factor of 1.25, each expert has 5 seats for that rank.
#
# ### Exercise 9.2: who gets a seat
#
# Write `within_capacity(choice, num_experts, factor)`. `choice` has the expert of each visit, in the order of arrival.
# Return a tensor of `True` and `False`: whether the visit gets a seat. Seats are rounded up, and first come, first
# kept.

# %%
import math

import torch
import torch.nn.functional as F


def within_capacity(choice, num_experts, factor):
    """Return, for each visit, whether its expert still has a seat for it."""
    ### BEGIN SOLUTION 9.2
    seats = math.ceil(factor * len(choice) / num_experts)
    table = F.one_hot(choice, num_experts)  # a row per visit, a column per expert
    place = (table.cumsum(dim=0) * table).sum(dim=1)  # 1 for the first visit to its expert, 2 for the second
    return place <= seats
    ### END SOLUTION


# %%
check("9.2")

# %% [markdown]
# How much is lost? Here are all digits, on the router that your ranks have just trained. **Guess** the share of dropped
# visits, in percent, for a factor of 1 (exactly the fair share) and for a factor of 2.

# %%
predict("9.c", factor_1=..., factor_2=...)

# %%
# %push within_capacity

# %%
# %%distributed --quiet --out dropped
with torch.no_grad():
    choice = F.softmax(model.router(x), dim=1).topk(2).indices.flatten()
factors = (1.0, 1.25, 1.5, 2.0, 3.0)
shares = {factor: 1 - within_capacity(choice, NUM_EXPERTS, factor).float().mean().item() for factor in factors}
shares

# %%
percent = {factor: round(25 * sum(dropped[rank][factor] for rank in range(4)), 1) for factor in dropped[0]}
measured("9.c", factor_1=percent[1.0], factor_2=percent[2.0])

# %%
table = pd.DataFrame({"dropped visits, %": percent})
table.index.name = "capacity factor"
table.style.format("{:.1f}").bar(color="#2664B080", vmin=0, width=80)

# %% [markdown]
# A small factor saves time and drops tokens. A large factor keeps tokens, and the ranks wait. As long as the router has
# favourites, you can only choose what to lose.
#
# ## Better: no favourites
#
# The second cure teaches the router. We add a small term to the loss, a **balance loss**, which is larger if a few
# experts get most of the visits. The router then learns two things at once: to choose well, and to spread.
#
# ### Exercise 9.3, a puzzle: keep them all busy
#
# Write `balance_loss(scores, choice)`. `scores` are the router's, after softmax: a row per token, a column per expert.
# `choice` has the two experts that each token visits. Return one number, a tensor with a gradient. It is added to the
# loss as it is, so how strong it is, is up to you.
#
# The check trains a small model with it, on four ranks and for 60 steps. 88 % of the digits must still be read right,
# and the ranks must wait at most 15 % of the time. Then it shows your score: that waiting time. How low can you go?

# %%
import torch.nn.functional as F


def balance_loss(scores, choice):
    """Return a number that is the smaller, the more evenly the tokens visit all experts."""
    ### BEGIN SOLUTION 9.3
    num_experts = scores.shape[1]
    visits = F.one_hot(choice.flatten(), num_experts).float().mean(dim=0)  # each expert's share: without gradient
    return 2 * num_experts * (visits * scores.mean(dim=0)).sum()
    ### END SOLUTION


# %%
check("9.3")

# %% [markdown]
# Back to the real ranks, the same model and the same steps, with your loss. **Guess** how long the ranks wait now.

# %%
predict("9.d", percent_waiting=...)

# %%
# %push balance_loss

# %%
# %%distributed --watch --out visited_evenly
model = Model().to(device)
train(model, steps=30, extra_loss=balance_loss)

# %%
measured("9.d", percent_waiting=percent_waiting(visited_evenly))

# %%
heat_map(visited_evenly)

# %% [markdown]
# Compare this timeline with the first one, and its column *waited for*: no rank stands out. Nor does a column of the
# map. Nobody computes faster; only the work is spread. (What the ranks still wait for is the sending itself, which
# takes long where four ranks share few cores.)
#
# ## What you know now
#
# - A **mixture of experts** has many weights, and each token uses few of them. A **router** chooses.
# - In **expert parallelism** experts live on different ranks. A layer needs two `all_to_all` in forward, **dispatch**
#   and **combine**, and two more in backward.
# - Nobody knows the sizes in advance, so numbers travel before rows do.
# - A step is as slow as its busiest rank. **Capacity** cuts the queue and drops tokens; a **balance loss** prevents it.
# - An expert without visitors must still take part, in forward and in backward.

# %%
progress()

# %%
# %distributed stop

# %% [markdown]
# **Next:** `10_which_layout` puts everything together: which of all these ways would you choose for a model with 7
# billion weights?
