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
# # 8. Pipelines and their bubble
#
# **Four stages, one batch: who waits, and which order wastes least?**
#
# In notebooks 5 and 6, every rank had a piece of every layer. Here each rank has whole layers, but only some of them:
# rank 0 the first few, rank 1 the next, and so on, like an assembly line. Between two ranks, nothing travels but the
# output of one layer. That is very little, so this is how models are spread over machines with slow wires between
# them. The price is waiting, and this notebook is about how to wait less.
#
# It takes about 75 minutes, of which your computer works for two or three. You need notebooks 1 and 2.

# %%
# %load_ext axon_nb
import pandas as pd

from axon_course import check, hint, measured, predict, progress, solution
from axon_nb import plan
from axon_nb.parallel import bubble_fraction

# %%
# %distributed start -n 4

# %% [markdown]
# ## An assembly line
#
# The layers that a rank holds are called its **stage**. A batch goes *forward* through stages 0, 1, 2, 3. Then its
# gradient comes *backward* through 3, 2, 1, 0.
#
# Four ranks on two cores would mostly wait for a core. So that you see the pipeline and not your computer, the stages
# here only sleep: 10 ms per sample in forward, and twice that in backward, as in a real network. `run_order` runs one
# stage on each rank and passes messages between neighbours. It gets a list of what the rank shall do: `("F", 0)` is
# the forward of batch number 0, `("B", 0)` its backward.
#
# Eight samples go through, all at once. **Guess**: what part of the time is a rank busy, in percent?

# %%
predict("8.a", busy_percent=...)

# %%
# %%distributed --watch --quiet --out spans
from axon_course.exercises.nb08.stages import Sleeper, run_order

stage = Sleeper(0.01).to(device)
batch = torch.ones(8, 4, device=device)  # 8 samples
run_order([("F", 0), ("B", 0)], stage, batch, batch)


# %%
def bubble(spans):
    """Return the share of all ranks' time in which they did not compute, from the spans of each rank."""
    return bubble_fraction([span for of_rank in spans.values.values() for span in of_rank])


measured("8.a", busy_percent=round(100 * (1 - bubble(spans))))

# %% [markdown]
# A quarter, as only one rank works at a time. Look at the pipeline in the timeline above: three quarters of it are
# empty. This waiting is called the **bubble**.
#
# ## Cut the batch
#
# The cure is that of every assembly line: do not send everything at once. Cut the batch into **microbatches**. As soon
# as rank 0 is done with the first, it passes it on and begins the second. Gradients of microbatches add up, so in the
# end they are those of the whole batch.
#
# The simplest order is called **GPipe**: all forwards, then all backwards. With 8 microbatches of one sample each,
# **guess** the bubble.

# %%
predict("8.b", bubble_percent=...)

# %%
# %%distributed --watch --quiet --out spans
forwards = [("F", number) for number in range(8)]
backwards = [("B", number) for number in range(8)]
run_order(forwards + backwards, stage, batch, batch)

# %%
measured("8.b", bubble_percent=round(100 * bubble(spans)))

# %% [markdown]
# The timeline shows the step twice: as it was, and below it the same order with messages that take no time. Your own
# bubble is a little larger, as messages do take time and a busy computer is late. But why is the ideal 27 %?
#
# Rank 3 cannot begin before three others have done their first forward, and at the end rank 0 waits until three others
# have done their last backward. With P stages and M microbatches, a rank works for M turns and waits for P - 1:
#
# $$\text{bubble} = \frac{P - 1}{M + P - 1} = \frac{3}{8 + 3}$$
#
# So take more microbatches! But there is a catch. Between the forward and the backward of a microbatch, a rank must
# keep everything that it computed in forward, its *activations*, as backward needs them. Such a microbatch is
# **alive**. With GPipe, all M are alive at the same time, on every rank: a smaller bubble costs more memory.
#
# ## One forward, one backward
#
# Must it be like that? The last rank could do the backward of microbatch 0 right after its forward: nobody forces it
# to do the other forwards first. Then the gradient travels back, and every rank can let go of microbatch 0 early. This
# order is called **1F1B**: after a short start, each rank does one forward and one backward in turn.
#
# ### Exercise 8.1: the order of 1F1B
#
# Write `one_f_one_b(rank, stages, microbatches)`. It returns what this rank does, in order, as a list of pairs:
# `[("F", 0), ("F", 1), ("B", 0), …]`.
#
# The step shall be as short as with GPipe, and no rank shall keep more microbatches alive than that needs. There are
# four ranks and you have four coins: play it on paper first.


# %%
def one_f_one_b(rank, stages, microbatches):
    """Return the actions of a rank in order: ("F", number) and ("B", number), each once per microbatch."""
    ### BEGIN SOLUTION 8.1
    ahead = min(microbatches, stages - rank)  # the warm-up: the last rank can turn round at once
    order = [("F", number) for number in range(ahead)]
    for number in range(microbatches):
        order.append(("B", number))
        if ahead + number < microbatches:
            order.append(("F", ahead + number))
    return order
    ### END SOLUTION


# %%
check("8.1")

# %% [markdown]
# Now your order runs on four real processes, first in the check, which compares the gradients with those of one
# process. Then once more for you to see: your own schedule, as your ranks have run it, above its ideal.

# %%
check("8.1", on="ranks")

# %%
# %push one_f_one_b

# %%
# %%distributed --watch --quiet --out spans
run_order(one_f_one_b(rank, world_size, 8), stage, batch, batch)

# %% [markdown]
# The ideal bubble is that of GPipe, as you can see. But rank 0 keeps at most 4 microbatches alive and rank 3 a single
# one, *however many there are in all*. With 1F1B, more microbatches shrink the bubble and cost no memory. That is why
# nearly everybody begins with it.
#
# ## What goes wrong
#
# Somebody sees that rank 0 keeps the most, and wants to help: it shall bring each microbatch home before it begins the
# next. All others keep to your order. What could go wrong?

# %% tags=["raises-exception"]
# %%distributed
order = one_f_one_b(rank, world_size, 8)
if rank == 0:
    order = [(action, number) for number in range(8) for action in ("F", "B")]
run_order(order, stage, batch, batch)

# %% [markdown]
# Read the report: who waits for whom? Rank 0 waits for a gradient from rank 1. And rank 1 waits, before it does any
# backward, for the *second* microbatch from rank 0. Each order makes sense alone; together they wait in a circle.
# **In a pipeline, an order is right or wrong only together with all the others.** This is why you wrote *one* function
# for all ranks, and why the check plays all of them.
#
# ## A real model
#
# Sleeping stages teach, but do not learn. Here is a small GPT, cut into four stages by `Pipeline.split`, which uses
# your order (or rather PyTorch's, which is the same). Each rank builds the model and keeps only its own stage.
#
# **Guess**: how many microbatches are alive at the worst moment, on rank 0 and on rank 3?

# %%
predict("8.c", rank_0=..., rank_3=...)

# %%
# %%distributed --out alive
from axon_nb.parallel import Pipeline
from axon_nb.parallel.models import GPT, GPTConfig, next_byte_loss, standard_library, windows

torch.set_num_threads(1)
torch.manual_seed(0)
config = GPTConfig(context=64, hidden=64, heads=4, blocks=6)
pipe = Pipeline.split(GPT(config).to(device), num_microbatches=8, schedule="1F1B", loss=next_byte_loss)
layers = dict.fromkeys(name.partition(".")[0] for name, _ in pipe.named_parameters())
print(f"stage {rank}: {', '.join(layers)}")

text = standard_library(1 << 18)  # the source code of Python itself: our text to learn
reader = torch.Generator().manual_seed(1)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=2e-3)
for number in range(40):
    x, target = windows(text, batch=16, seq=config.context, generator=reader, device=device)
    optimizer.zero_grad()
    losses = pipe.step(x, target)  # forward and backward of the whole batch
    optimizer.step()
    loss = pipe.mean_loss(losses)
    if rank == 0 and number % 10 == 9:
        print(f"step {number + 1}: {loss:.3f} nats per byte")
pipe.peak_activations()[rank]

# %%
measured("8.c", rank_0=alive[0], rank_3=alive[3])

# %% [markdown]
# ## Eight stages, and other orders
#
# Now think larger: 8 stages and 64 microbatches. You need no eight ranks for that, as `plan.schedule` plays an order
# without running it. **Guess** the bubble of 1F1B first; the formula helps.

# %%
predict("8.d", bubble_percent=...)

# %%
large = plan.schedule("1F1B", 8, 64)
measured("8.d", bubble_percent=round(100 * large.bubble, 1))

# %% [markdown]
# Can an order be better than 1F1B? Two ideas, and you find both in large training runs:
#
# - **Several stages per rank** (*interleaved*). Of eight short stages, rank 0 has the first and the fifth. The
#   shorter a stage, the sooner the pipeline is full. But a microbatch passes each rank twice: twice as many
#   messages.
# - **Backward in two halves** (*zero bubble*). Backward computes two things: the gradient of the *input*, for which the
#   rank before waits, and the gradients of the *weights*, for which nobody waits. So do the first at once, and put the
#   second wherever there would be a gap.
#
# A table for four ranks and 8 microbatches. *Alive* counts whole shares of a rank: two microbatches in one of a rank's
# two stages count as one.

# %%
stages = {"GPipe": 4, "1F1B": 4, "Interleaved1F1B": 8, "LoopedBFS": 8, "InterleavedZeroBubble": 8, "ZBVZeroBubble": 8}
rows = {}
for name, num_stages in stages.items():
    step = plan.schedule(name, num_stages, 8)
    rows[name] = {"stages": num_stages, "bubble": f"{step.bubble:.1%}", "alive": f"{step.peak_live * 4 / num_stages:g}"}
pd.DataFrame(rows).T

# %%
plan.schedule("ZBVZeroBubble", 8, 8, (0.01, 0.02))

# %% [markdown]
# ### Exercise 8.2: a short bubble in little memory
#
# A puzzle with several right answers. You have four ranks, and choose three things: `schedule`, one of the names in the
# table; `num_stages`, which is 4, or 8, 12, … if ranks have several; and `num_microbatches`.
#
# - The bubble must be **below 12 %**.
# - At most **6** microbatches may be alive on a rank, counted as in the table.
#
# Once it holds, look at the score: how many **messages** travel between ranks in a step? With each you pay its latency
# (notebook 2). Can you do with fewer?

# %%
### BEGIN SOLUTION 8.2
choice = {"schedule": "InterleavedZeroBubble", "num_stages": 4, "num_microbatches": 8}
### END SOLUTION

# %%
check("8.2")

# %%
check("8.2", on="ranks")

# %% [markdown]
# Played, and now measured, with stages that sleep: does the bubble come out as promised?

# %%
# %push choice

# %%
# %%distributed --watch --quiet
from torch import nn

from axon_course.exercises.nb08.stages import Sleeper
from axon_nb.parallel import Pipeline

per_stage = 0.02 * world_size / choice["num_stages"]  # more stages are shorter stages
sleepers = Pipeline.from_modules(
    [Sleeper(per_stage).to(device) for _ in range(choice["num_stages"])],
    schedule=choice["schedule"],
    num_microbatches=choice["num_microbatches"],
    loss=nn.functional.mse_loss,
)
samples = torch.ones(choice["num_microbatches"], 4, device=device)
for _ in range(2):  # in the first step, stages also learn which shapes they will receive
    dist.barrier()
    sleepers.step(samples, samples)

# %% [markdown]
# ## When one stage is slow
#
# So far all stages took equally long. Real models are not so kind: the last layer, which gives each word of the
# vocabulary a score, can take as long as several blocks.
#
# This model has 26 layers: an embedding that takes 1 ms per microbatch, 24 blocks of 2 ms, and an output layer of
# 11 ms. Each rank gets six blocks, which sounds fair. With 16 microbatches, the formula promises 3 / 19 = 16 %.
# **Guess** what it is now.

# %%
predict("8.e", bubble_percent=...)

# %%
layer_ms = [1] + 24 * [2] + [11]


def stage_times(layers_per_stage):
    """Return the milliseconds of each stage, if the stages take these numbers of layers."""
    rest, times = list(layer_ms), []
    for count in layers_per_stage:
        times.append(sum(rest[:count]))
        rest = rest[count:]
    return times


even = [7, 6, 6, 7]
stage_ms = stage_times(even)
# %push stage_ms
stage_ms

# %%
# %%distributed --watch --quiet --out spans
uneven = Sleeper(stage_ms[rank] / 1000).to(device)
many = torch.ones(16, 4, device=device)
run_order(one_f_one_b(rank, world_size, 16), uneven, many, many)

# %%
before = bubble(spans)
measured("8.e", bubble_percent=round(100 * before))

# %% [markdown]
# On paper it is 41 %. Everybody waits for rank 3. **The slowest stage sets the pace**, as one slow lorry does on a
# narrow road.
#
# ### Exercise 8.3: cut it elsewhere
#
# Give the number of layers of each stage, in order, so that at most **half of the bubble** is left. The score is the
# length of a step. (The embedding is layer 0, the output layer is number 25.)

# %%
### BEGIN SOLUTION 8.3
layers_per_stage = [8, 8, 7, 3]
### END SOLUTION

# %%
check("8.3")

# %%
stage_ms = stage_times(layers_per_stage)
# %push stage_ms
stage_ms

# %%
# %%distributed --watch --quiet --out spans
uneven = Sleeper(stage_ms[rank] / 1000).to(device)
run_order(one_f_one_b(rank, world_size, 16), uneven, many, many)

# %%
print(f"bubble, measured: {before:.0%} before, {bubble(spans):.0%} now")

# %% [markdown]
# Those who trained Llama 3 did just that: its first and its last stage have one layer fewer than the others. And
# `Pipeline.split(model, split="time")` measures each layer and cuts for you.
#
# ## What you know now
#
# - A **pipeline** gives each rank some layers, its **stage**. Ranks pass on activations, and pass back their gradients.
# - The **bubble** is the time in which ranks wait: (P - 1) / (M + P - 1). More **microbatches** make it smaller.
# - **GPipe** keeps all microbatches alive; **1F1B** at most as many as stages, with the same bubble.
# - Several stages per rank, and a backward in two halves, fill the bubble, for more messages or more memory.
# - The slowest stage sets the pace. And the orders of all ranks must fit together.

# %%
progress()

# %%
# %distributed stop

# %% [markdown]
# **Next:** in `09_experts`, every token asks for its own part of the model.
