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
# # 12. Capstone: train, break, resume, ship
#
# **Can you train one model in several dimensions, lose a rank, go on, and hand in a script?**
#
# In this notebook you need nearly everything from before. A small GPT, cut in two ways at once, learns Python. Then a
# rank dies within a step. You bring it back, go on with half of the ranks, and at the end the notebook becomes a script
# that runs without any notebook, and prints the same numbers.
#
# It takes about 90 minutes, of which your computer works for three. You need notebooks 1, 4, 5 and 6.

# %%
# %load_ext axon_nb
from axon_course import check, hint, measured, predict, progress, solution

# %% [markdown]
# `protect=on` keeps a copy of what each rank has, in memory that outlives the rank. You will see what for.

# %%
# %distributed start -n 4
# %distributed config protect=on

# %% [markdown]
# ## Two dimensions
#
# Four ranks in a square. Along one axis, `tp`, two ranks share each matrix and compute with its halves (notebook 6).
# Along the other, `dp`, they see different samples, and share out what they keep (notebook 5). Each rank is a member of
# one group on each axis. Such an arrangement is called a **mesh**. Large models are trained on one with three or four
# axes; the third is usually `pp`, a pipeline (notebook 8).
#
# Ranks are numbered so that **the last axis varies fastest**: along it they are neighbours. In a mesh with `dp=2` and
# `tp=2`, ranks 0 and 1 form a `tp` group.
#
# ### Exercise 12.1: who is in a group
#
# Write `members(rank, sizes, axis)`: the ranks that are in this rank's group on an axis, in order, itself included.
# They are those that differ from it in their place on that axis and in nothing else. `sizes` lists the axes, such as
# `{"pp": 2, "dp": 2, "tp": 2}`.


# %%
def members(rank, sizes, axis):
    """Return the ranks that differ from this one only in their place on the axis, in ascending order."""
    ### BEGIN SOLUTION 12.1
    stride = 1  # how much one step along the axis adds to the rank
    for name in reversed(sizes):
        if name == axis:
            break
        stride *= sizes[name]
    first = rank - rank // stride % sizes[axis] * stride
    return [first + place * stride for place in range(sizes[axis])]
    ### END SOLUTION


# %%
check("12.1")

# %%
check("12.1", on="ranks")

# %% [markdown]
# ## The model
#
# The cell below cuts a small GPT along both axes: the matrices of each block by columns, and by rows where they lead
# back (`parallelize_module`), and then all that a rank has left, over `dp` (`fully_shard`, PyTorch's FSDP).
#
# Note one thing in `one_step`: which samples a step reads depends on the **number of the step alone**, not on what was
# read before, and not on how many ranks there are. You will be glad of it.

# %%
# %%distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from axon_nb.parallel import Checkpoints, make_mesh
from axon_nb.parallel.models import GPT, GPTConfig, next_byte_loss, standard_library, windows

torch.set_num_threads(1)
text = standard_library(1 << 18)  # the source code of Python itself
config = GPTConfig(context=32, hidden=64, heads=4, blocks=2)
mesh = make_mesh(dp=world_size // 2, tp=2)


def build():
    torch.manual_seed(0)
    model = GPT(config).to(device)
    columns = [f"block*.{name}" for name in ("attention.query", "attention.key", "attention.value", "up")]
    rows = ["block*.attention.out", "block*.down"]
    plan = {**{name: ColwiseParallel() for name in columns}, **{name: RowwiseParallel() for name in rows}}
    parallelize_module(model, mesh["tp"], plan)
    for layer in [*model, model]:
        fully_shard(layer, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def one_step(step):
    reader = torch.Generator().manual_seed(step)
    x, target = windows(text, batch=16, seq=config.context, generator=reader, device=device)
    part, parts = mesh.get_local_rank("dp"), mesh["dp"].size()
    loss = next_byte_loss(model(x.chunk(parts)[part]), target.chunk(parts)[part])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().double()
    dist.all_reduce(mean)
    return mean.item() / world_size  # the same on all ranks


model, optimizer = build()
kept = sum(weight.to_local().numel() for weight in model.parameters())
print(f"keeps {kept:,} of {sum(weight.numel() for weight in model.parameters()):,} weights")

# %%
# %shards model

# %% [markdown]
# Of most matrices, a rank holds a quarter, and no other rank has it. But look at the norms: the two ranks of a `tp`
# group have the same numbers of them. So "the whole model" is not simply what all ranks have together.
#
# You meet this where you would not expect it. Now and then a batch is odd, and its gradient is a hundred times as long
# as usual; the **length** of a gradient is the root of the sum of the squares of all its numbers. One such step can
# spoil a week of training. So large trainings **clip**: where the length is above a limit, all numbers are multiplied
# by the same factor, so that it is just the limit. No rank knows the length alone.
#
# ### Exercise 12.2: as long as allowed
#
# Write `clip(cut, whole, limit)`. `cut` is a list with this rank's slices of gradients, which no other rank has.
# `whole` is a list of gradients that *all* ranks have, with the same numbers. Return the length of the whole model's
# gradient, a Python float, the same on all ranks. If it is above the limit, scale the gradients in place. If not,
# leave them alone.


# %%
import torch
import torch.distributed as dist


def clip(cut, whole, limit):
    """Scale the gradients in place to the limit, if they are longer together; return their length before that."""
    ### BEGIN SOLUTION 12.2
    device = next((gradient.device for gradient in (*cut, *whole)), None)
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in cut:
        squares += gradient.double().square().sum()
    dist.all_reduce(squares)
    for gradient in whole:
        squares += gradient.double().square().sum()
    length = squares.sqrt().item()
    if length > limit:
        for gradient in (*cut, *whole):
            gradient.mul_(limit / length)
    return length
    ### END SOLUTION


# %%
check("12.2")

# %%
check("12.2", on="ranks")

# %% [markdown]
# Our model is small and well-behaved, and does without. Now twenty-four steps that nothing disturbs. These losses are
# what everything will be compared with.

# %%
# %%distributed
undisturbed = [one_step(step) for step in range(24)]
if rank == 0:
    print(f"from {undisturbed[0]:.3f} to {undisturbed[-1]:.3f} nats per byte")

# %% [markdown]
# ## A rank dies
#
# Once more from the start. But now fate strikes: a rank and a step are drawn from your name, and within that step,
# after it has changed its weights, this rank is killed, as by a machine that has run out of memory. Type a name.

# %%
import random

name = "Ada"
fate = random.Random(name)
victim, fatal_step = fate.randrange(4), fate.randrange(10, 20)
# %push victim fatal_step

# %%
# %%distributed
import os
import signal

model, optimizer = build()
losses = []
born = os.getpid()


def strike(*_):
    if rank == victim and len(losses) == fatal_step and os.getpid() == born:  # whoever takes its place is spared
        os.kill(born, signal.SIGKILL)


_ = optimizer.register_step_post_hook(strike)

# %% tags=["raises-exception"]
# %%distributed --watch
while len(losses) < 24:
    losses.append(one_step(len(losses)))

# %% [markdown]
# Read the report. That rank's part of the weights is gone, and so are Adam's moments for it. Elsewhere the job would be
# over now, and start again from the last checkpoint, if there is one. Here, `repair` starts a new process for the dead
# rank, and gives it what the rank had after the last step that *all* had finished.
#
# **Guess**: how many of the 24 losses will differ from the undisturbed run?

# %%
predict("12.a", losses_that_differ=...)

# %%
# %distributed repair

# %%
# %%distributed --watch --quiet --out differing
while len(losses) < 24:
    losses.append(one_step(len(losses)))
sum(loss != right for loss, right in zip(losses, undisturbed, strict=True))

# %%
measured("12.a", losses_that_differ=differing[0])

# %% [markdown]
# Compare the timelines of the two cells: in the first one the row of the dead rank ends, and in the second one the
# newcomer takes part in every step from the first on.
#
# ## Without a safety net
#
# What if the whole machine goes down? Then only what is on disk helps: a **checkpoint**. `Checkpoints(folder)` has two
# methods that you need, and both are meetings of all ranks (notebook 5):
#
# - `save(step, model=…, optimizer=…, extra=…)` writes a checkpoint after a step. `extra` takes whatever else you want
#   to keep, such as a list of numbers.
# - `load_latest(model=…, optimizer=…)` puts the last one back *into* model and optimizer, and returns an object with
#   `step`, the last step done, and `extra`. If there is none, it returns `None` and changes nothing.
#
# ### Exercise 12.3: go on where it was cut off
#
# Write `train(model, optimizer, one_step, folder, steps)`. It does the steps 0 … `steps` - 1, each by
# `one_step(step)`, which returns the loss, and returns the list of **all** losses. After each step it saves. If it is
# cut off and called again with the same folder, in a new process with a new model, it goes on with the step that was
# not finished, and in the end nobody can tell from losses or weights that anything has happened.

# %%
from axon_nb.parallel import Checkpoints


def train(model, optimizer, one_step, folder, steps):
    """Do each step once, go on from the last checkpoint in the folder, and return the losses of all steps."""
    ### BEGIN SOLUTION 12.3
    checkpoints = Checkpoints(folder, keep=2)
    resumed = checkpoints.load_latest(model=model, optimizer=optimizer)
    losses = list(resumed.extra) if resumed else []
    for step in range(len(losses), steps):
        losses.append(one_step(step))
        checkpoints.save(step, model=model, optimizer=optimizer, extra=losses)
    return losses
    ### END SOLUTION


# %%
check("12.3")

# %%
check("12.3", on="ranks")

# %% [markdown]
# ## Half of the ranks
#
# Twelve steps on four ranks. Then the machine "goes down".

# %%
import tempfile

folder = tempfile.mkdtemp()
# %push train folder

# %%
# %%distributed
model, optimizer = build()
losses = train(model, optimizer, one_step, folder, steps=12)
if rank == 0:
    print(f"12 steps on {world_size} ranks, at {losses[-1]:.3f} nats per byte")

# %%
# %pull undisturbed --ranks 0
# %distributed stop

# %% [markdown]
# The next day you get only two ranks. They still share each matrix, but there is nobody to share the samples with: a
# rank now holds a *half* of each matrix, and the checkpoint has quarters. They are put together as needed.
#
# **Guess** the largest difference between the losses of steps 12 to 23 and the undisturbed ones.

# %%
predict("12.b", largest_difference=...)

# %%
# %distributed start -n 2
# %push train folder

# %%
# %%distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from axon_nb.parallel import Checkpoints, make_mesh
from axon_nb.parallel.models import GPT, GPTConfig, next_byte_loss, standard_library, windows

torch.set_num_threads(1)
text = standard_library(1 << 18)  # the source code of Python itself
config = GPTConfig(context=32, hidden=64, heads=4, blocks=2)
mesh = make_mesh(dp=world_size // 2, tp=2)


def build():
    torch.manual_seed(0)
    model = GPT(config).to(device)
    columns = [f"block*.{name}" for name in ("attention.query", "attention.key", "attention.value", "up")]
    rows = ["block*.attention.out", "block*.down"]
    plan = {**{name: ColwiseParallel() for name in columns}, **{name: RowwiseParallel() for name in rows}}
    parallelize_module(model, mesh["tp"], plan)
    for layer in [*model, model]:
        fully_shard(layer, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def one_step(step):
    reader = torch.Generator().manual_seed(step)
    x, target = windows(text, batch=16, seq=config.context, generator=reader, device=device)
    part, parts = mesh.get_local_rank("dp"), mesh["dp"].size()
    loss = next_byte_loss(model(x.chunk(parts)[part]), target.chunk(parts)[part])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().double()
    dist.all_reduce(mean)
    return mean.item() / world_size  # the same on all ranks


model, optimizer = build()
losses = train(model, optimizer, one_step, folder, steps=24)
if rank == 0:
    print("losses:", losses)

# %%
# %pull losses --ranks 0
measured("12.b", largest_difference=max(abs(a - b) for a, b in zip(losses, undisturbed, strict=True)))

# %% [markdown]
# Not to the last bit this time: two ranks add up the same numbers in another order, and computers round after each
# addition. But far less than one part in a million.
#
# ## Ship it
#
# A notebook is for exploring. What runs for a week is a script. `%distributed export` writes the cells that ran on the
# ranks as one program for `torchrun`, which is how PyTorch jobs are started everywhere. What was pushed becomes an
# option of the script, so it can train in another folder.

# %%
from pathlib import Path

script = Path(folder, "train.py")
# %distributed export {script} --live-only
print(script.read_text())

# %% [markdown]
# Run it from the start, in an empty folder: no notebook, no checkpoint, two processes. **Guess** the largest difference
# between its 24 losses and those of the undisturbed run on four ranks.

# %%
predict("12.c", largest_difference=...)

# %%
import ast
import subprocess
import sys

command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
run = subprocess.run([*command, "--folder", f"{folder}/again"], capture_output=True, text=True, check=True)
printed = ast.literal_eval(run.stdout.partition("losses: ")[2].splitlines()[0])
measured("12.c", largest_difference=max(abs(a - b) for a, b in zip(printed, undisturbed, strict=True)))

# %% [markdown]
# Other processes, no notebook, half of the ranks, and the same training. Whoever gets your script gets your result.
#
# ## The leaderboard
#
# One last puzzle, without a single right answer. Everybody gets the same: **100,000 weights and 16,384 bytes of text**,
# in random windows of 32 bytes. Who reaches the lowest loss on text that the model has not seen?
#
# ### Exercise 12.4: the best use of 16,384 bytes
#
# You choose the width of the model (`hidden`, divisible by 4), how many `blocks` it has, the `batch`, and the learning
# rate `lr`. Large batches make few, reliable steps; small ones many, shaky steps. The learning rate rises for five
# steps, and in the second half it falls to zero. To pass, get below 2.7 nats per byte. Then look at the score.

# %%
### BEGIN SOLUTION 12.4
recipe = {"hidden": 64, "blocks": 1, "batch": 4, "lr": 0.01}
### END SOLUTION

# %%
check("12.4")

# %% [markdown]
# ## What to hand in
#
# 1. The script, and the losses that it prints.
# 2. Your recipe, its score, and two recipes that you expected to be better, with your explanation why they are not.
# 3. A page of reasons. Your model has 30 billion weights now, and you have 32 GPUs with 80 GB, four to a machine.
#    Which axes does your mesh have, in which order, and how large are they? Which of them crosses the slow wires, and
#    how many bytes are that in a step? What is lost if one GPU dies, and how long ago may the last checkpoint be?
#
# ## What you know now
#
# You have seen four processes become one training, built every part of it yourself, and broken most of them. You can
# tell what a rank waits for, what it keeps, and what it costs. That is what distributed training *is*; the rest is
# more of it.

# %%
progress()

# %%
import shutil

shutil.rmtree(folder)
# %distributed stop
