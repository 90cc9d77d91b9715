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
# # 10. Which layout?
#
# **A model of seven billion parameters, and 64 GPUs: does it fit, how fast is a step, and in which of 150 layouts?**
#
# In the notebooks before this one you have built the parts: data parallelism, sharding, tensor parallelism, pipelines.
# Now you choose among them. Nobody tries 150 layouts on 64 rented GPUs, so you predict first, and you learn how far
# you can believe a prediction.
#
# It takes about 75 minutes, of which your computer works for two. You need notebooks 03 to 06, and 08.

# %%
# %load_ext axon_nb
import pandas as pd

from axon_course import check, hint, measured, predict, progress, solution
from axon_nb import plan
from axon_nb.parallel.models import GPT, GPTConfig

GIB = 1024**3
seven = GPTConfig(vocab=32_000, context=2048, hidden=4096, heads=32, blocks=34)

# %% [markdown]
# ## Question 1: does it fit?
#
# Training with Adam keeps four numbers for each parameter: the parameter itself, its gradient, and Adam's two running
# means. In float32 a number takes 4 bytes. Together they are called the **model states**.
#
# The model has 7.1 billion parameters. **Guess**: how many GiB do its states take on *one* GPU? (A GiB is about a
# billion bytes.)

# %%
predict("10.a", gib_on_one_gpu=...)

# %%
alone = plan.memory(seven, 1, method="closed_form")
measured("10.a", gib_on_one_gpu=round(alone.peak_bytes / GIB))

# %% [markdown]
# No GPU that you can buy holds that. So the states must be shared out, as in notebook 05. ZeRO does it in three stages:
#
# | stage | every rank keeps whole | every rank keeps 1/n of |
# | --- | --- | --- |
# | 0 (that is DDP) | parameters, gradients, Adam's means | – |
# | 1 | parameters, gradients | Adam's means |
# | 2 | parameters | gradients, Adam's means |
# | 3 (FSDP) | – | parameters, gradients, Adam's means |
#
# ### Exercise 10.1: the bytes of a rank
#
# Write `states_bytes(parameters, ranks, stage)`: the bytes of the model states on one rank, with Adam in float32.
# Where the parameters cannot be divided evenly, ranks pad: each keeps as many as the largest share has.


# %%
def states_bytes(parameters, ranks, stage):
    """Return the bytes of parameters, gradients and Adam's two means on one of `ranks` ranks, for ZeRO's `stage`."""
    ### BEGIN SOLUTION 10.1
    share = -(-parameters // ranks)  # rounded up
    means = 2 * (share if stage >= 1 else parameters)
    gradients = share if stage >= 2 else parameters
    weights = share if stage >= 3 else parameters
    return 4 * (weights + gradients + means)
    ### END SOLUTION


# %%
check("10.1")

# %% [markdown]
# With your function, a table for any number of GPUs is one line. Look along the rows: stage 1 and 2 never get below
# what they keep whole, however many GPUs you add. Only stage 3 goes on shrinking.

# %%
sizes = {}
for ranks in (8, 64, 512):
    by_stage = [states_bytes(7_100_000_000, ranks, stage) for stage in range(4)]
    sizes[f"{ranks} GPUs"] = {f"stage {stage}": f"{held / GIB:.1f} GiB" for stage, held in enumerate(by_stage)}
pd.DataFrame(sizes)

# %% [markdown]
# The states are only what is there *between* two steps. Within a step there is more: activations, and the layers that
# FSDP gathers. `plan.memory` runs one step of one rank on tensors that have a shape but no numbers, and records the
# peak. **Guess** first: 8 GPUs, stage 3, one sample each. How many GiB at the worst moment?

# %%
predict("10.b", gib_at_the_peak=...)

# %%
step = plan.memory(seven, 8, mixed_precision="bfloat16", batch=1)
measured("10.b", gib_at_the_peak=round(step.peak_bytes / GIB, 1))

# %%
step

# %% [markdown]
# ## Question 2: how many samples a step?
#
# The **global batch** is what all ranks together process in one step. It belongs to the training, not to the machine:
# a batch that is too large wastes samples. Say it is 256 samples here. Only data parallelism shares samples out, so its
# degree must divide the batch. What happens if it does not? Run this, and read the last line.

# %% tags=["raises-exception"]
plan.search(seven, 64, 80, global_batch=100.5, mixed_precision="bfloat16")

# %% [markdown]
# A wrong question gets an answer at once, not after the job has waited in a queue for a night.
#
# ## Question 3: how fast?
#
# A layout is a way to write 64 as a product: `dp` (copies that see different samples) times `tp` (ranks that share each
# matrix) times `pp` (stages of a pipeline). Then there is what data parallelism shards (`strategy`), how many
# microbatches a pipeline has, and whether activations are kept or recomputed (`activation_checkpointing`).
#
# `plan.search` tries all that make sense. On 64 H100 with InfiniBand between hosts of 8, **guess** which degree of
# tensor parallelism wins.

# %%
predict("10.c", tp_of_the_fastest=...)

# %%
found = plan.search(seven, 64, 80, global_batch=256, mixed_precision="bfloat16")
measured("10.c", tp_of_the_fastest=found.best.tp)

# %%
found.figure()

# %% [markdown]
# Each point is a layout. To the right it needs more memory, further up it is slower; beyond the line it does not fit.
# The best ones keep `tp` small: NVLink inside a host is fast, but tensor parallelism talks twice per block, in the
# forward and in the backward, and nothing hides that.
#
# ## Is it true?
#
# A prediction is worth what was measured. So measure: your own ranks, a small model, three ways to train it. First
# `plan.calibrate` measures how fast your ranks compute and talk.

# %%
# %distributed start -n 2

# %%
import axon_nb

small = GPTConfig(vocab=256, context=64, hidden=128, heads=4, blocks=4)
here = plan.calibrate(cluster=axon_nb.current_cluster(), model=small, batch=8)
predicted = {
    strategy: 1e3 * plan.step_time(small, 2, strategy=strategy, batch=8, rates=here, links=here).total_s
    for strategy in ("ddp", "shard_grad_op", "full_shard")
}

# %% [markdown]
# Now the same three, for real.

# %%
# %%distributed --out seconds
import statistics
import time

from torch.nn.parallel import DistributedDataParallel

from axon_nb.parallel import FSDP
from axon_nb.parallel.models import GPT, GPTConfig

small = GPTConfig(vocab=256, context=64, hidden=128, heads=4, blocks=4)


def step_time(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(small.vocab, (8, small.context), device=device)
    rounds = []
    for _ in range(12):
        dist.barrier()
        began = time.perf_counter()
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rounds.append(time.perf_counter() - began)
    return statistics.median(rounds[2:])


torch.manual_seed(0)
times = {"ddp": step_time(DistributedDataParallel(GPT(small).to(device)))}
for strategy in ("shard_grad_op", "full_shard"):
    times[strategy] = step_time(FSDP(GPT(small).to(device), strategy=strategy))
times

# %%
import plotly.graph_objects as go

steps = {name: 1e3 * max(times[name] for times in seconds.values.values()) for name in predicted}
largest = 1.15 * max(*steps.values(), *predicted.values())
go.Figure(
    [
        go.Scatter(x=[0, largest], y=[0, largest], mode="lines", line_dash="dot", name="prediction = measurement"),
        go.Scatter(
            x=list(predicted.values()), y=list(steps.values()), mode="markers+text", text=list(predicted),
            textposition="top center", marker_size=12, name="your machine",
        ),
    ],
    {"xaxis_title": "predicted ms per step", "yaxis_title": "measured ms per step", "height": 380},
)  # fmt: skip

# %% [markdown]
# How far from the dotted line are your three points? On a laptop with other programs running, a step itself varies by
# half. Run the measurement again: does the *order* of the three change? An honest prediction names the winner, and is
# wrong about milliseconds.
#
# ## You are the consultant
#
# Three clients, three machines, the same model. For each, give a layout that fits and whose step is **within 10 % of
# the best** that `plan.search` finds. (Closer would be pretending: the estimate is not that good.) Write it as a
# dictionary with these six names:
#
# ```python
# {"dp": 8, "tp": 1, "pp": 1, "strategy": "full_shard", "num_microbatches": 1, "activation_checkpointing": True}
# ```
#
# `strategy` is `"ddp"` (stage 0), `"shard_grad_op"` (2) or `"full_shard"` (3); in a pipeline it is `"shard_grad_op"`.
# Without a pipeline, `num_microbatches` is 1. Think first, then try, and use `plan.search` last: you want to know why.
#
# ### Exercise 10.2: eight small cards
#
# One host, **8 GPUs with 24 GiB**, PCIe between them. Global batch 64. (Rates of an A100.)

# %%
### BEGIN SOLUTION 10.2
small_cards = {
    "dp": 1, "tp": 1, "pp": 8, "strategy": "shard_grad_op", "num_microbatches": 64, "activation_checkpointing": True,
}  # fmt: skip
### END SOLUTION

# %%
check("10.2")

# %% [markdown]
# ### Exercise 10.3: slow wires
#
# **64 GPUs with 80 GiB**, 8 to a host with NVLink inside, but only **25 Gbit/s Ethernet** between the hosts. Global
# batch 256.

# %%
### BEGIN SOLUTION 10.3
slow_wires = {
    "dp": 4, "tp": 8, "pp": 2, "strategy": "shard_grad_op", "num_microbatches": 16, "activation_checkpointing": False,
}  # fmt: skip
### END SOLUTION

# %%
check("10.3")

# %% [markdown]
# ### Exercise 10.4: long documents
#
# The 64 GPUs again, now with InfiniBand, but with a context of **16,384 tokens** and a global batch of 64.

# %%
### BEGIN SOLUTION 10.4
long_documents = {
    "dp": 64, "tp": 1, "pp": 1, "strategy": "full_shard", "num_microbatches": 1, "activation_checkpointing": False,
}  # fmt: skip
### END SOLUTION

# %%
check("10.4")

# %% [markdown]
# ## What you know now
#
# - Ask in this order: does it **fit**, is the **batch** right, is it **fast**?
# - Between steps there are the model states; the **peak** is within a step.
# - Keep the talkative axis on the fast wires: `tp` inside a host. On slow wires send little: pipelines send least.
# - A prediction names the winner; only a **measurement** knows milliseconds.

# %%
progress()

# %%
# %distributed stop

# %% [markdown]
# **Next:** in `11_bug_hunt` something is wrong on every page, and you find out what.
