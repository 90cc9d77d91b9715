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
# # 11. The bug hunt
#
# **It hangs. Who, where, why?**
#
# A program on many ranks can fail in ways that no single program knows. One rank leaves, and three wait. One is slow,
# and all are slow. One goes wrong silently, and the model is worse for it. In this notebook ten things go wrong,
# and you find out what: which rank, which line, which kind of fault. Then you build what would have saved you.
#
# Your ten faults are not those of your neighbour: they are drawn from your user name. So you can talk about how you
# found them, and not give anything away.
#
# It takes about 75 minutes, of which your computer works for two. You need notebooks 1, 2 and 4.

# %%
# %load_ext axon_nb
from axon_course import check, hint, measured, predict, progress, solution
from axon_course.faults import answer, clue

# %% [markdown]
# **Guess**: of ten faults, how many will you find without a clue?

# %%
predict("11.a", found_without_a_clue=...)

# %%
# %distributed start -n 4

# %% [markdown]
# ## The suspect
#
# This program trains a small network, as in notebook 4: each rank reads its own digits, and `all_reduce` averages the
# gradients. It writes down two things, which you will need later: the losses of all ranks, and a **snapshot** of the
# weights before each step.
#
# `planted(case, …)` makes one rank go wrong, somewhere in its block; `planted(None, …)` does nothing. **Do not change
# this cell**: you will be asked for line numbers in it. (*View → Show Line Numbers*, if you see none. The line with
# `%%distributed` is line 1.)

# %%
# %%distributed
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from axon_course.data import digits
from axon_course.faults import Fault, planted

images, labels = (torch.from_numpy(array).to(device) for array in digits())


def train(case=None, first=0, weights=None):
    x, y = images.flatten(1)[rank::world_size], labels[rank::world_size]
    torch.manual_seed(0)  # the same first weights on all ranks
    network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
    if weights is None:
        snapshots.clear()
    else:
        vector_to_parameters(weights.clone(), network.parameters())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    with planted(case, network, optimizer):
        for step in range(first, 12):
            snapshots[step] = parameters_to_vector(network.parameters()).detach()
            loss = F.cross_entropy(network(x[32 * step : 32 * step + 32]), y[32 * step : 32 * step + 32])
            optimizer.zero_grad()
            loss.backward()
            dist.all_reduce(gradient := torch.cat([p.grad.flatten() for p in network.parameters()]))
            give_back(gradient / world_size, network)
            optimizer.step()
            losses = [torch.zeros_like(loss) for _ in range(world_size)]
            dist.all_gather(losses, loss.detach())
    print(f"12 steps done, loss {sum(losses).item() / world_size:.3f}")
    return network


def give_back(gradient, network):
    for p, part in zip(network.parameters(), gradient.split([p.numel() for p in network.parameters()]), strict=True):
        p.grad.copy_(part.view_as(p))


snapshots = {}
undisturbed = parameters_to_vector(train().parameters()).detach()

# %% [markdown]
# One step is: compute a loss, agree on the gradient, let the optimizer step, share the losses. Twelve times. Keep this
# order in mind. It is all that you need to read a report.
#
# These are the ten kinds of faults. The first word is what you will answer.
#
# | kind | what the rank does |
# |---|---|
# | `"skipped"` | leaves out one call |
# | `"swapped"` | makes another call in its place |
# | `"raised"` | fails with an error |
# | `"shape"`, `"dtype"` | brings a tensor of another shape, or of another type of number |
# | `"killed"` | dies, without a last word |
# | `"endless"` | gets into a loop that never ends |
# | `"slow"` | is slow, from some step on |
# | `"stale"` | no longer changes its weights |
# | `"leak"` | keeps more memory in each step, when it computes the loss |
#
# ## Read the report
#
# First one that we plant together. In step 5, rank 2 leaves out the `all_reduce` of line 27. The others wait there.
# **Guess**: in which line will rank 2 be when somebody notices?

# %%
predict("11.b", line_of_rank_2=...)

# %% tags=["raises-exception"]
# %%distributed
train(Fault("skipped", rank=2, step=5, place="all_reduce"))

# %% [markdown]
# Rank 2 did not stop where it went wrong. It went on, to its next meeting: line 31. That is the first rule of the
# hunt: **the line of a report is where a rank is now, not where it went wrong.** If ranks stand in two different lines,
# ask which of them is *later*. (Line 27 is later than 31, too: in the next step.) The one that is alone has missed
# something.
#
# Now your first case. Run the cell, read the report, and write down your answer in the cell below it: the rank that is
# to blame, the line in which it *went wrong*, and the kind. You may try as often as you like. A case is worth ten
# points. A wrong answer costs two of them, and `clue(1)` costs three.

# %% tags=["raises-exception"]
# %%distributed
network = train(1)

# %%
answer(1, rank=..., line=..., kind=...)

# %% [markdown]
# Whatever it was: your ranks are fine. That cell is over, and here is the next one.

# %% tags=["raises-exception"]
# %%distributed
network = train(2)

# %%
answer(2, rank=..., line=..., kind=...)

# %% tags=["raises-exception"]
# %%distributed
network = train(3)

# %%
answer(3, rank=..., line=..., kind=...)

# %% [markdown]
# With two or three reports in front of you: what do they have in common? Each says who waits, in which call, and for
# whom. Often a rank waits for one that waits for a third. Then only the last one is to blame. And if the way leads in a
# circle, nobody is first: all of the circle are to blame.
#
# ### Exercise 11.1: who is to blame?
#
# Write `to_blame(waits)`. `waits` is a dictionary from each rank to the list of ranks that it waits for, which is empty
# if it works. Return a sorted list of the ranks to blame: those that are waited for, but do not wait themselves, and
# those that wait for each other in a circle. `{0: [2], 1: [2], 2: [], 3: [2]}` gives `[2]`.
#
# axon_nb asks the same question before it names a rank in a report.


# %%
def to_blame(waits):
    """Return the ranks to blame, sorted; `waits` says whom each rank waits for."""
    ### BEGIN SOLUTION 11.1
    blamed = set()
    for others in waits.values():
        for rank in others:
            reached, new = set(), set(waits[rank])
            while new:
                reached |= new
                new = {further for other in new for further in waits[other]} - reached
            if not waits[rank] or rank in reached:
                blamed.add(rank)
    return sorted(blamed)
    ### END SOLUTION


# %%
check("11.1")

# %% [markdown]
# Two more of this sort.

# %% tags=["raises-exception"]
# %%distributed
network = train(4)

# %%
answer(4, rank=..., line=..., kind=...)

# %% tags=["raises-exception"]
# %%distributed
network = train(5)

# %%
answer(5, rank=..., line=..., kind=...)

# %% [markdown]
# ## The reason why nobody comes
#
# Most ranks that miss a meeting have had a good reason. Here is one that you will write yourself one day. A sample is
# damaged, and the loss is `nan`, "not a number". It would spoil the weights, so you skip that step. **Guess**: which
# ranks skip it?

# %%
predict("11.c", how_many_ranks_skip=...)

# %% tags=["raises-exception"]
# %%distributed
for step in range(4):
    loss = torch.tensor(float("nan") if rank == 1 and step == 2 else 0.5)
    if loss.isnan():
        continue
    dist.all_reduce(loss)

# %% [markdown]
# Read the report before you read on: who has left, and who waits?
#
# Only rank 1 saw the `nan`, so only rank 1 skipped. For it, step 3 was the third call, and then it was done; the others
# waited for the fourth. And there is worse: in step 3 its number was added to those of step 2, **and nobody noticed**.
#
# So here is the second rule: **what one rank decides, all must decide.**
#
# ### Exercise 11.2: all step, or none
#
# Write `safe_step(loss, model, optimizer)`. Each rank has its own `loss`. If those of all ranks are finite, the ranks
# average their gradients, the optimizer steps, and it returns `True`. If a loss is `nan` or infinite on *any* rank, no
# rank steps, and all return `False`. All parameters have a gradient after `backward`. Before and after your function,
# gradients are zero (or `None`).
#
# It is also a puzzle: with how few calls per step can you do it? The check counts them.

# %%
import torch
import torch.distributed as dist


def safe_step(loss, model, optimizer):
    """Make a step with the mean gradient of all ranks if all losses are finite; return whether it was made."""
    ### BEGIN SOLUTION 11.2
    loss.backward()
    parameters = list(model.parameters())
    flat = torch.cat([*(p.grad.flatten() for p in parameters), loss.detach().reshape(1)])
    dist.all_reduce(flat)
    is_good = flat.isfinite().all().item()
    if is_good:
        parts = (flat[:-1] / dist.get_world_size()).split([p.numel() for p in parameters])
        for p, part in zip(parameters, parts, strict=True):
            p.grad.copy_(part.view_as(p))
        optimizer.step()
    optimizer.zero_grad()
    return is_good
    ### END SOLUTION


# %%
check("11.2")

# %%
check("11.2", on="ranks")

# %% [markdown]
# ## The one that died
#
# In case 6 a process dies, as if the machine had no memory left for it. It cannot report anything, and nobody can say
# for sure in which line it was. But the others can: it did not come to the meeting at which they wait. Answer with that
# line.

# %% tags=["raises-exception"]
# %%distributed
network = train(6)

# %%
answer(6, rank=..., line=..., kind=...)

# %% [markdown]
# Three ranks still have everything. The next line starts a new fourth one, and gives it the variables of rank 0.

# %%
# %distributed repair --from 0

# %% [markdown]
# And now? Training has stopped halfway. The ranks may have been in different steps when it happened, and a rank that
# is ahead of the others must go back. Each has its `snapshots`. **From which step can all go on together?**
#
# ### Exercise 11.3: go on together
#
# Write `last_common(snapshots)`. `snapshots` is a dictionary from steps to the weights before that step, a tensor. Find
# the newest step of which all ranks have a snapshot, and return `(step, weights)`, the same on all ranks. A rank that
# is new may have none at all; then only the others count, and it gets the weights from one of them.

# %%
import torch
import torch.distributed as dist


def last_common(snapshots):
    """Return the newest step of which all ranks that have snapshots have one, and the weights before it."""
    ### BEGIN SOLUTION 11.3
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, sorted(snapshots))
    step = max(set.intersection(*(set(steps) for steps in everybody if steps)))
    giver = next(rank for rank, steps in enumerate(everybody) if steps)
    box = [snapshots.get(step)]
    dist.broadcast_object_list(box, src=giver)
    return step, box[0]
    ### END SOLUTION


# %%
check("11.3")

# %%
check("11.3", on="ranks")

# %% [markdown]
# Now use it. The ranks go on from there, to the twelfth step. **Guess**: how far is the end from that of the
# undisturbed training, in the weight that differs most?

# %%
predict("11.d", largest_difference=...)

# %%
# %push last_common

# %%
# %%distributed --out repaired
first, weights = last_common(snapshots)
network = train(None, first, weights)
(parameters_to_vector(network.parameters()) - undisturbed).abs().max().item()

# %%
measured("11.d", largest_difference=repaired[0])

# %% [markdown]
# Zero, to the last bit. A rank has died, and the model does not know.
#
# ## The one that never ends
#
# Case 7 will not end by itself. `--noblock` starts it in the background, so that you can look around. There are no
# reports now, only your tools: `%distributed stacks` shows where each rank is.

# %%
# %%distributed --noblock --out running
network = train(7)

# %%
import time

time.sleep(3)  # by then it hangs
# %distributed stacks

# %% [markdown]
# Three wait, and one does not. Run the cell above again: has it moved? Answer while it still hangs; then end it.

# %%
answer(7, rank=..., line=..., kind=...)

# %%
# %distributed cancel

# %% [markdown]
# ## All is well. Is it?
#
# The last three cases are the worst. There is no report, the loss falls, and still one rank is wrong in each. You need
# tools that look inside:
#
# - The timeline, which `--watch` opens below the cell, shows who waits for whom. Careful: **the slow rank is the one
#   that does not wait.** All others have striped bars in every step; it has none.
# - `%distributed diff network` compares the weights of all ranks, and says who differs.
# - `%distributed status` shows how much memory each process has.

# %%
# %%distributed --watch
network = train(8)

# %%
# %distributed diff network
# %distributed status

# %%
answer(8, rank=..., line=..., kind=...)

# %%
# %%distributed --watch
network = train(9)

# %%
# %distributed diff network
# %distributed status

# %%
answer(9, rank=..., line=..., kind=...)

# %%
# %%distributed --watch
network = train(10)

# %%
# %distributed diff network
# %distributed status

# %%
answer(10, rank=..., line=..., kind=...)

# %% [markdown]
# `%distributed diff` is the tool that you would miss most elsewhere. So take it with you: it is ten lines.
#
# ### Exercise 11.4: who differs?
#
# Write `who_differs(weights)`. It gets the rank's weights, a tensor, and returns a sorted list of the ranks whose
# weights are not, bit for bit, those that most ranks have; on every rank the same list. Any difference counts: a single
# last bit, or two numbers that have changed places.
#
# Weights are large, so do not send them. The check counts bytes, and this is a puzzle, too.

# %%
import torch
import torch.distributed as dist


def who_differs(weights):
    """Return the ranks whose weights are not those of most ranks, sorted, on every rank."""
    ### BEGIN SOLUTION 11.4
    import zlib
    from collections import Counter

    mine = torch.tensor([zlib.crc32(weights.cpu().numpy().tobytes()) - 2**31], dtype=torch.int32, device=weights.device)
    hashes = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(hashes, mine)
    hashes = [value.item() for value in hashes]
    usual = Counter(hashes).most_common(1)[0][0]
    return [rank for rank, value in enumerate(hashes) if value != usual]
    ### END SOLUTION


# %%
check("11.4")

# %%
check("11.4", on="ranks")

# %% [markdown]
# ## What you know now
#
# - A report says where a rank is **now**. Whoever is *later* in the program has missed something.
# - Follow the waiting ranks to the one that does not wait, or to a circle.
# - What one rank decides, **all must decide**: put the decision into a collective.
# - The slow rank is the one that **does not wait**.
# - The worst faults are silent. Compare **hashes of weights** now and then; it costs twelve bytes.
# - With a snapshot per step, a death costs a step, and not a bit of the result.

# %%
progress()

# %%
# %distributed stop

# %% [markdown]
# **Next:** in `12_capstone` you put everything together: train, break, resume, ship.
