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
# # 3. Where the memory goes
#
# **A model of one megabyte needs twenty times that for a training step. Where does it go, and when?**
#
# Before many machines share a model, you should know what one machine has to hold. "Out of memory" is the error that
# most people meet first, and few can say beforehand whether it will come. You will predict the bytes of a step, see
# them rise and fall, and then make do with far fewer.
#
# It takes about an hour, of which your computer works for two minutes. You need notebook 1.

# %%
# %load_ext axon_nb
import pandas as pd
import plotly.graph_objects as go

from axon_course import check, hint, measured, predict, progress, solution
from axon_nb import plan

MIB = 1024**2  # a MiB is about a million bytes

# %% [markdown]
# Two ranks this time, and they will not talk. Each stands for a machine by itself, so that we can try two things at
# once: rank 0 reads 4 samples per step, and rank 1 reads 16.

# %%
# %distributed start -n 2

# %% [markdown]
# ## Four numbers for each weight
#
# Both ranks make the same small GPT. It has 236,000 weights of 4 bytes each: 0.9 MiB. Each rank takes one training step
# with Adam. **Guess**: how many MiB does rank 1 hold *after* the step, when everything is at rest again?

# %%
predict("3.a", mib_at_rest=...)

# %%
# %%distributed --out states
from axon_nb.parallel.models import GPT, GPTConfig, next_byte_loss, standard_library, windows

text = standard_library(1 << 16)  # the source code of Python itself: our text to learn
config = GPTConfig(context=64, hidden=64, heads=4, blocks=4)
batch = 4 if rank == 0 else 16
reader = torch.Generator().manual_seed(0)


def forward(model):
    inputs, targets = windows(text, batch=batch, seq=config.context, generator=reader, device=device)
    return next_byte_loss(model(inputs), targets)


torch.manual_seed(0)
model = GPT(config).to(device)
optimizer = torch.optim.Adam(model.parameters())
forward(model).backward()
optimizer.step()

weights = list(model.parameters())
held = {
    "weights": sum(weight.nbytes for weight in weights),
    "gradients": sum(weight.grad.nbytes for weight in weights),
    "first moments": sum(optimizer.state[weight]["exp_avg"].nbytes for weight in weights),
    "second moments": sum(optimizer.state[weight]["exp_avg_sq"].nbytes for weight in weights),
}
held

# %%
measured("3.a", mib_at_rest=round(sum(states[1].values()) / MIB, 1))

# %%
pd.DataFrame({f"rank {rank}, MiB": pd.Series(held) / MIB for rank, held in states.values.items()}).round(2)

# %% [markdown]
# Four numbers for each weight: the weight; its **gradient**, which says in which direction to change it; and two more
# that Adam keeps from step to step, its **moments** (running means of the gradient and of its square). Together they
# are the **model states**. They are the same on both ranks, so the batch has nothing to do with them.
#
# The next line draws them. The upper bar of each rank is measured; the thin one below it is what a formula expects.
# "Other" is the rest of what the rank has made, such as the text. Leave **what if** below it for later.

# %%
# %memory model optimizer

# %% [markdown]
# ### Exercise 3.1: the bytes of the model states
#
# Write the formula. `states_bytes` gets a model and an optimizer that have not trained yet, and returns how many bytes
# weights, gradients and whatever the optimizer keeps will take after the first step. The optimizer is
# `torch.optim.SGD`, with or without momentum (running mean of the gradient: one number per weight), or
# `torch.optim.Adam`. Leave out the tiny counter of Adam's steps.
#
# Mind weights that two layers share, layers that are **frozen** (`requires_grad` is `False`: they are not trained), and
# numbers that do not have 4 bytes.

# %%
import torch


def states_bytes(model, optimizer):
    """Return the bytes of weights, gradients and what the optimizer keeps, after the first step."""
    ### BEGIN SOLUTION 3.1
    moments = 2 if isinstance(optimizer, torch.optim.Adam) else int(optimizer.defaults["momentum"] > 0)
    total = 0
    for weight in model.parameters():
        copies = 1 + 1 + moments if weight.requires_grad else 1
        total += copies * weight.nbytes
    return total
    ### END SOLUTION


# %%
check("3.1")

# %% [markdown]
# ## The worst moment
#
# That was the memory at rest. But "out of memory" strikes within a step. So let's watch one: `PeakBytes` notes, after
# each operation, how many bytes are alive of the tensors that the step has made.
#
# **Guess**: at the worst moment, how many MiB of new tensors are there on rank 1, with its 16 samples?

# %%
predict("3.b", mib_made_by_a_step=...)

# %%
# %%distributed --quiet --out curves
from axon_course.memory import PeakBytes


def watched_step(model, optimizer):
    optimizer.zero_grad()
    with PeakBytes() as made:
        forward(model).backward()
        optimizer.step()
    return made.history


watched_step(model, optimizer)

# %%
measured("3.b", mib_made_by_a_step=round(max(curves[1]) / MIB, 1))


# %%
def draw(curves):
    """Draw bytes over the operations of a step, one line per name."""
    lines = [go.Scatter(y=[size / MIB for size in sizes], name=name) for name, sizes in curves.items()]
    axes = {"xaxis_title": "operations of one step", "yaxis_title": "MiB made by the step", "height": 340}
    return go.Figure(lines, axes)


draw({"4 samples": curves[0], "16 samples": curves[1]})

# %% [markdown]
# A mountain. It rises through the whole forward pass, and falls through the whole backward pass; the top is at the
# turn, when the loss is known. What is left at the end are the gradients.
#
# Why does it rise? To compute gradients, backward needs what each layer saw: its input, mostly. So forward *keeps* all
# of that until backward comes by. These tensors are called **activations**. They grow with the batch; the model states
# do not. That is why a smaller batch is the first cure for "out of memory".
#
# ## Predicted, then measured
#
# Can one know the top without climbing? `plan.memory` runs one step on tensors that have a shape but no numbers. It
# takes no memory, so it works for models that would not fit. It may take half a minute.

# %%
from axon_nb.parallel.models import GPTConfig

small = GPTConfig(context=64, hidden=64, heads=4, blocks=4)
rows = {}
for rank, batch in ((0, 4), (1, 16)):
    # the mesh says how ranks are arranged: here, one alone
    planned = plan.memory(small, mesh={"tp": 1}, optimizer="Adam", batch=batch, device="cpu")
    at_rest = sum(states[rank].values())
    gradients = states[rank]["gradients"]
    top = at_rest - gradients + max(curves[rank])  # the step made its own gradients
    rows[f"{batch} samples"] = {"predicted, MiB": planned.peak_bytes / MIB, "measured, MiB": top / MIB}
pd.DataFrame(rows).T.round(2)

# %% [markdown]
# ## What does a block keep?
#
# A GPT is a row of equal **blocks**. Here is one, written so that you can read it. `hidden` is how many numbers
# describe a **token** (a piece of text; in our GPT, one character), `context` is how many tokens a text has, and
# attention works in several **heads**, each with its own part of those numbers.

# %%
import inspect

from axon_course.exercises.nb03.block import PlainBlock

print(inspect.getsource(PlainBlock))

# %% [markdown]
# **Guess**: if the text gets four times as long, from 64 to 256 tokens, how many times as many bytes does a block keep?
# (`SavedBytes` counts what a forward keeps for backward.)

# %%
predict("3.c", times_as_many=...)

# %%
import torch

from axon_course.memory import SavedBytes


def kept(block, context):
    with SavedBytes(block.parameters()) as saved:
        output = block(torch.ones(1, context, 32))
    size = saved.bytes
    del output  # until here, it keeps alive what backward needs
    return size


plain = PlainBlock(hidden=32, heads=4)
measured("3.c", times_as_many=round(kept(plain, 256) / kept(plain, 64), 1))

# %% [markdown]
# More than four. Most tensors have a row for each token, and grow like the text. One has a number for each *pair* of
# tokens: how much one looks at the other. Four times the text, sixteen times the pairs.
#
# ### Exercise 3.2: the bytes of a block
#
# Write `block_bytes(batch, context, hidden, heads)`: how many bytes a `PlainBlock` keeps for backward. Numbers are
# float32, with 4 bytes. Do not count the weights. Small things do not matter: 5 % off is right.
#
# Go through the source line by line, and ask of each operation: which tensors does it need to compute its gradient?


# %%
def block_bytes(batch, context, hidden, heads):
    """Return about how many bytes the forward of a PlainBlock keeps for backward."""
    ### BEGIN SOLUTION 3.2
    tokens = batch * context
    narrow = 8 * tokens * hidden  # x, norm1, query, key, value, the input of out, the input of norm2, norm2
    wide = 2 * tokens * 4 * hidden  # before GELU, and after it
    pairs = batch * heads * context**2
    return 4 * (narrow + wide + pairs)
    ### END SOLUTION


# %%
check("3.2")

# %% [markdown]
# Your formula has two terms: one grows with the number of tokens, the other with its square. If a head has 64 numbers,
# the second one wins from about 1,000 tokens on. Nobody wants to pay for it, so nobody keeps the pairs any more:
# **FlashAttention** computes them in small pieces, and again in backward. PyTorch's `scaled_dot_product_attention` does
# that, and so does our GPT, on a GPU and here. Here is the same ratio for a block of our GPT:

# %%
from axon_nb.parallel.models import Block

thrifty = Block(hidden=32, heads=4)
print(f"four times the text: {kept(thrifty, 256) / kept(thrifty, 64):.1f} times the bytes")

# %% [markdown]
# ## What goes wrong
#
# Somebody wants the gradients twice as large, and calls `backward` twice. What can be wrong about that?

# %% tags=["raises-exception"]
# %%distributed
loss = forward(model)
loss.backward()
loss.backward()

# %% [markdown]
# Read the report: what has "already been freed"? Backward eats what forward kept, layer by layer; that is the way down
# the mountain. Nothing is left for a second time.
#
# The opposite mistake gives no error at all. If you only *measure* a loss, nobody calls `backward`, and if you keep the
# loss in a list, it keeps all of its activations alive. After a few batches the memory is full. So measure inside
# `with torch.no_grad():`, and keep `loss.item()`, which is only a number.
#
# ## Compute again instead of keeping
#
# FlashAttention shows a way: what can be computed again need not be kept. Take it further. Keep only the *input* of
# each block. When backward comes to a block, run it forward once more, and then go back through it. This is called
# **recomputation**, or **activation checkpointing**. It costs one more forward, about a third more work.
#
# **Guess**: how many MiB does the step make on rank 1 now, at its worst moment?

# %%
predict("3.d", mib_made_by_a_step=...)

# %%
# %%distributed --quiet --out lean_curves
from axon_nb.parallel import checkpoint_blocks
from axon_nb.parallel.models import Block

torch.manual_seed(0)
lean = GPT(config).to(device)
checkpoint_blocks(lean, Block)
lean_optimizer = torch.optim.Adam(lean.parameters())
forward(lean).backward()
lean_optimizer.step()
watched_step(lean, lean_optimizer)

# %%
measured("3.d", mib_made_by_a_step=round(max(lean_curves[1]) / MIB, 1))

# %%
draw({"everything kept": curves[1], "recomputed": lean_curves[1]})

# %% [markdown]
# One mountain has become a row of hills: each is one block, computed again and given back. The curve is longer, as
# there are more operations.
#
# ### Exercise 3.3: sixteen layers, room for twelve
#
# Now a puzzle. Our blocks keep sixteen times their input, so keeping only the input is a bargain. But think of layers
# that keep *nothing but* their input, such as a small linear layer and a `tanh`. There are sixteen of them, and there
# is room for twelve tensors.
#
# Write `lean_forward(layers, x)`: the result is that of all layers, one after the other, and so are all gradients, to
# the last bit. In forward and backward together, no layer runs more than twice. `checkpoint` is PyTorch's tool:
#
# ```python
# y = checkpoint(function, a, b, use_reentrant=False)  # function(a, b): keeps only a and b, runs again in backward
# ```
#
# When all properties hold, the check shows your peak, and the best that is known.

# %%
from torch.utils.checkpoint import checkpoint


def lean_forward(layers, x):
    """Return the result of all layers; keep little, and run no layer more than twice."""
    ### BEGIN SOLUTION 3.3

    def run(group, x):
        for layer in group:
            x = layer(x)
        return x

    size = round(len(layers) ** 0.5)
    for first in range(0, len(layers), size):
        x = checkpoint(run, layers[first : first + size], x, use_reentrant=False)
    return x
    ### END SOLUTION


# %%
check("3.3")

# %% [markdown]
# With n layers in groups of √n, there are √n inputs to keep and √n layers to compute again: 2√n instead of n. For 100
# layers that is 20.
#
# ## What if?
#
# Show the memory of the first model again. In JupyterLab, open **what if** below the picture. Move the batch, switch
# checkpointing on, choose `bfloat16`, `sgd`, or 8 ranks: the prediction moves, and nothing has to run.

# %%
# %memory model optimizer

# %% [markdown]
# And a real model? Seven billion weights, four texts of 2,048 tokens. **Guess** how many GiB (1,024 MiB) one GPU needs,
# if it keeps everything, in float32.

# %%
predict("3.e", gib=...)

# %%
seven = GPTConfig(vocab=32_000, context=2048, hidden=4096, heads=32, blocks=34)
kept_all = plan.memory(seven, mesh={"tp": 1}, batch=4)
recomputed = plan.memory(seven, mesh={"tp": 1}, batch=4, activation_checkpointing=True)
measured("3.e", gib=round(kept_all.peak_bytes / 1024**3))

# %%
peaks = {"everything kept": kept_all.worst.peak, "recomputed": recomputed.worst.peak}
pd.DataFrame({f"{name}, GiB": pd.Series(peak.as_dict()) / 1024**3 for name, peak in peaks.items()}).round(1)

# %% [markdown]
# Recomputing makes the activations small. What is left are the model states, more than a hundred GiB, and no trick on
# one GPU makes those go away. They have to be shared, and that is what the next notebooks are about.
#
# ## What you know now
#
# - **Model states** stay: weight, gradient, and with Adam two moments. Sixteen bytes per weight, whatever the batch.
# - **Activations** come and go: forward keeps them, backward frees them. The peak is where the two meet.
# - A block keeps about 16 times its input, and attention written out also a number per pair of tokens and head.
# - **Recomputation** buys memory with one more forward.

# %%
progress()

# %%
# %distributed stop

# %% [markdown]
# **Next:** `04_data_parallelism` trains one model on four ranks, with nothing but `all_reduce`.
