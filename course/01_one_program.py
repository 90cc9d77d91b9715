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
# # 1. One program, four processes
#
# **What does it mean that the same line runs four times?**
#
# Large models are trained by many processes at once. They all run the same program, and yet they do different work.
# You will start four of them, look into them, let them work together, and see what happens when one fails.
#
# It takes about 45 minutes, of which your computer works for one. You need Python and a little PyTorch.
#
# **How each part goes.** First you *guess* what will happen. Then you *run* it and *look*. Then comes a short
# explanation, and sometimes an *exercise*. A wrong guess costs nothing: the surprise is what you will remember. You
# can't break anything either, so change a cell, and run it again.

# %%
# %load_ext axon_nb
from axon_course import check, hint, measured, predict, progress, solution

# %% [markdown]
# ## Four processes
#
# So far, this notebook is one Python process. The next line starts four more. Each is called a **rank**, and has a
# number from 0 to 3. They stay, with all their variables, until you stop them.

# %%
# %distributed start -n 4

# %% [markdown]
# A cell that begins with `%%distributed` runs on all four ranks at the same time. Every rank knows its number, `rank`,
# and how many there are, `world_size`. These names are there from the start, and so are `torch` and `dist`
# (`torch.distributed`, the part of PyTorch through which ranks talk to each other).
#
# The cell after the next one prints two lines on each rank. **Guess**: how many lines will you see below it? Type a
# number in place of `...`, and run the cell.

# %%
predict("1.a", lines=...)

# %%
# %%distributed --out hello
print(f"I am rank {rank}")
print(f"we are {world_size}")

# %%
# your guess beside what was shown; ranks that print the same share a line
measured("1.a", lines=len({line for text in hello.text.values() for line in text.splitlines()}))

# %% [markdown]
# Eight lines were printed, and five are shown: what is the same on all ranks appears once, with the ranks in front,
# `[ranks 0-3]`. Keep an eye on these brackets: they say who is speaking.
#
# This style has a name, **SPMD**: single program, multiple data. Nobody is the boss. The ranks differ only in what
# `rank` is, and in all that follows from it.

# %% [markdown]
# ## Each has its own memory
#
# Here only rank 0 runs the assignment. **Guess** what rank 3 will say when we print `x` in the cell after it: `"5"`,
# `"None"` or `"an error"`?

# %%
predict("1.b", rank_3_says=...)

# %%
# %%distributed
if rank == 0:
    x = 5

# %% tags=["raises-exception"]
# %%distributed
print(x)

# %% [markdown]
# Four processes, four memories. Rank 0 has an `x`; the other three have never heard of it. Nothing travels from one
# rank to another unless you send it.
#
# That was also your first failure. The report names the ranks, the line and the error; below it is Python's own
# traceback, which says the same at length. It is only a report: everything is still there. The next cell lists who has
# which variable.

# %%
# %distributed vars

# %% [markdown]
# ## They meet
#
# To work together, ranks make a call *together*. It is called a **collective**. The most important one is
# `dist.all_reduce`: every rank brings a tensor, and every rank goes home with the sum.
#
# Rank 0 brings 1, rank 1 brings 2, rank 2 brings 3, rank 3 brings 4. **Guess** what rank 2 has afterwards.

# %%
predict("1.c", rank_2_has=...)

# %%
# %%distributed --out sums
value = torch.tensor(rank + 1.0)
dist.all_reduce(value)
value.item()

# %%
measured("1.c", rank_2_has=sums[2])

# %% [markdown]
# `all_reduce` works *in place*: it put the sum into `value` itself. And it is a meeting: nobody leaves before everybody
# has come. Most of what goes wrong in distributed programs goes wrong here.

# %% [markdown]
# ## They train
#
# Now something useful: 1,797 small pictures of handwritten digits, and a network that reads them. Each rank trains on
# a quarter of the pictures. `DistributedDataParallel` wraps the network and makes all ranks average their gradients in
# every step, so that the four copies stay one model. (Notebook 4 builds it from scratch.)

# %%
# %%distributed
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from axon_course.data import digits

images, labels = (torch.from_numpy(array).to(device) for array in digits())
mine = slice(rank, None, world_size)  # rank 0 has pictures 0, 4, 8, …; rank 1 has 1, 5, 9, …
x, y = images[mine], labels[mine]

torch.manual_seed(0)  # the same first weights everywhere
network = nn.Sequential(
    nn.Conv2d(1, 16, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(16 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
).to(device)  # fmt: skip
model = DistributedDataParallel(network)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

# %% [markdown]
# With `--watch`, a cell draws what its ranks do while it runs. On top is the **strip**: a row for each rank, coloured
# by what it is doing. Below it is the **timeline**, where every call has its bar; notebook 4 makes use of it.

# %%
# %%distributed --watch
for epoch in range(3):
    for first in range(0, len(x) // 32 * 32, 32):
        loss = F.cross_entropy(model(x[first : first + 32]), y[first : first + 32])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch + 1}: loss {loss.item():.3f}")

# %% [markdown]
# Four different losses in every epoch, although there is one model. None of them is wrong: each rank prints the loss of
# *its own* last 32 pictures. Which one belongs in your report? None of the four. You want the loss over the pictures of
# all ranks, and no rank knows it alone.
#
# ### Exercise 1.1: the loss of all ranks
#
# Write `mean_loss`. It gets the losses of this rank, one per sample, and returns the mean over **all samples of all
# ranks**, as a number, on every rank. Careful: ranks do not always have equally many samples. One may even have none.
#
# This cell has no `%%distributed`, so it runs in the notebook. `check` then tries your function in a *mock world*: four
# pretend ranks inside this one process, with the same `dist` and the same rules. There a mistake shows at once, and
# always in the same way. Only the names `rank` and `world_size` are missing: a function asks `dist.get_rank()` and
# `dist.get_world_size()`.

# %%
import torch
import torch.distributed as dist


def mean_loss(losses):
    """Return the mean loss over all samples of all ranks; `losses` are those of this rank, a tensor of any length."""
    ### BEGIN SOLUTION 1.1
    sum_and_count = torch.tensor([losses.sum().item(), len(losses)])
    dist.all_reduce(sum_and_count)
    return (sum_and_count[0] / sum_and_count[1]).item()
    ### END SOLUTION


# %%
check("1.1")

# %% [markdown]
# No idea how to begin? Run `hint("1.1")` in a new cell, up to three times. `solution("1.1")` shows one answer, once you
# have tried.
#
# When all lines have a ✓, run the same function on your real ranks, unchanged:

# %%
check("1.1", on="ranks")

# %% [markdown]
# ## One fails
#
# So what if one rank never comes to the meeting? In the next cell rank 2 is a second late, and then looks up its share
# in a table that has none for it. It fails *before* `all_reduce`. The other three are already there, waiting.
#
# In an ordinary distributed program they would wait for ten minutes or more, in silence. **Guess**: after how many
# seconds does this cell end?

# %%
predict("1.d", seconds=...)

# %% tags=["raises-exception"]
# %%distributed --watch
import time

if rank == 2:
    time.sleep(1)
share = {0: 0.1, 1: 0.2, 3: 0.4}
part = torch.tensor(share[rank])
dist.all_reduce(part)

# %% [markdown]
# Look at the strip: three ranks are waiting in `all_reduce` until rank 2 turns red. Then the cell ends, and the report
# says which rank failed, in which line, and who was waiting for it. How long all that took stands above the strip. (The
# timeline draws only calls that came to an end, so it has nothing to show.)
#
# Now the part that matters. Is the model lost?

# %%
# %%distributed
share[2] = 0.3
part = torch.tensor(share[rank])
dist.all_reduce(part)
print(f"the shares add up to {part.item():.1f}")
print(f"the model still has {sum(weights.numel() for weights in model.parameters()):,} weights")

# %% [markdown]
# Nothing is lost: the model, the variables and the connection between the ranks are as they were. You correct the line
# and go on.
#
# ## Three never come
#
# The most common mistake of all has no error message. Somebody wants to print a total once, not four times, and writes
# this:

# %% tags=["raises-exception"]
# %%distributed
points = torch.tensor(10.0 * rank)
if rank == 0:
    dist.all_reduce(points)
    print(f"the total is {points.item():g}")

# %% [markdown]
# Read the report before you read on. Which rank was waiting, in which line, and for whom?
#
# Rank 0 came to the meeting alone. The others skipped the `if` and finished the cell. axon_nb sees that nobody is left
# who could still come, and ends the cell. Elsewhere this program hangs.
#
# ### Exercise 1.2: one reports, all take part
#
# Write it the right way: `report_total` gets a tensor with one number, and returns the text `"the total is 60"` (with
# the sum over all ranks) on rank 0, and `None` on the others.

# %%
import torch.distributed as dist


def report_total(value):
    """Return "the total is …" on rank 0, and None on all others; `value` is a tensor with one number."""
    ### BEGIN SOLUTION 1.2
    dist.all_reduce(value)
    if dist.get_rank() == 0:
        return f"the total is {value.item():g}"
    return None
    ### END SOLUTION


# %%
check("1.2")

# %% [markdown]
# ## A meeting of some
#
# With `--ranks`, a cell runs on some ranks only. The others do not even notice.

# %%
# %%distributed --ranks 1,3
print(f"rank {rank} is here")

# %% [markdown]
# But `dist.all_reduce` is a meeting of *all* ranks, so it would wait in such a cell. For a meeting of some, ranks first
# form a smaller **group**: `group = dist.new_group([1, 3])`, and then `dist.all_reduce(value, group=group)`. There is
# one rule that everybody forgets once: *all* ranks make the group, also those that will not be in it. They just do not
# use it.
#
# ### Exercise 1.3: a sum among some ranks
#
# Write `sum_among`. All ranks call it, each with a tensor of one number, and the list of the ranks that are members.
# Members return the sum of the members' numbers; all others return `None`.

# %%
import torch.distributed as dist


def sum_among(value, members):
    """Return the sum over the ranks in the list `members` to each of them, and None to all others."""
    ### BEGIN SOLUTION 1.3
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return None
    dist.all_reduce(value, group=group)
    return value.item()
    ### END SOLUTION


# %%
check("1.3")

# %% [markdown]
# ## What you know now
#
# - A **rank** is a process. All ranks run the same program, and differ in what `rank` is.
# - Each has its **own memory**. Data travels only in calls that ranks make together.
# - A **collective** is a meeting: all ranks of a group must come, or those who came wait.
# - A number on one rank is not *the* number. Sum it up before you report it.

# %%
progress()

# %%
# %distributed stop

# %% [markdown]
# **Next:** `02_seven_moves` shows the few calls that everything else is made of, and what each costs.
