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
# # 0. Is my machine ready?
#
# **Can this computer run the course?**
#
# Run all cells: *Run → Run All Cells*. It takes less than a minute; the very first time up to two, as your PyTorch is
# tested. A `*` beside a cell means that it is still running. Near the end the page says `READY`, or what to fix. If you
# take the course in a class, do this before the first session.

# %%
# %load_ext axon_nb

# %% [markdown]
# ## Two processes
#
# The course runs several processes at once, and lets them talk to each other. Here are two. One brings a 1, the other a
# 2, and both should go home with the sum.

# %%
# %distributed start -n 2

# %%
# %%distributed --out sums
value = torch.tensor(rank + 1.0, device=device)
dist.all_reduce(value)
value.item()

# %% [markdown]
# ## A failure
#
# In this course a lot goes wrong on purpose. The next cell **has to fail**: one of the two raises an error while the
# other waits for it. The report says so, and the cell after it must work anyway.

# %% tags=["raises-exception"]
# %%distributed
if rank == 1:
    raise ValueError("this is planned")
dist.all_reduce(value)

# %%
# %%distributed --out after
dist.all_reduce(value)
value.item()

# %%
# %distributed stop

# %% [markdown]
# ## Ready?

# %%
import os
import platform

import psutil
import torch

import axon_nb

talks = list(sums.values.values()) == [3.0, 3.0]
recovers = list(after.values.values()) == [6.0, 6.0]
print("READY" if talks and recovers else "NOT READY: the report below says what to fix")
print(
    f"axon_nb {axon_nb.__version__}, Python {platform.python_version()}, torch {torch.__version__}, "
    f"{os.cpu_count()} cores, {psutil.virtual_memory().available / 1024**3:.1f} GiB of memory free, "
    f"{torch.cuda.device_count()} GPUs"
)

# %% [markdown]
# In a class, send these two lines to your teacher.
#
# Four processes and the notebook need about 1.5 GiB of free memory. If you have less, close other programs; most of the
# course works with two, too (`%distributed start -n 2`). You don't need a GPU.
#
# ## Something went wrong?
#
# The next cell examines your computer. Problems come first, each with a way to fix it; then choose *Kernel → Restart
# Kernel and Run All Cells*. A *note* is only worth knowing, and the long list is for people who help you.

# %%
# %distributed doctor

# %% [markdown]
# **Next:** `01_one_program` starts four processes and lets them fail.
