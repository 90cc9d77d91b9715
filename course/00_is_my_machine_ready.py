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
# tested. At the end there is a line to tell your teacher. Do it before the first session, so that nobody has to install
# anything in class.
#
# ## The machine
#
# The next cell loads axon_nb, and examines your computer. What needs your attention comes first, each with a way to fix
# it. A *note* is worth knowing, no more. The long list below is for people who help you.

# %%
# %load_ext axon_nb
# %distributed doctor

# %% [markdown]
# ## Two processes
#
# The course runs several processes at once, and lets them talk to each other. Here are two of them. One brings a 1, the
# other a 2, and both should go home with the sum.

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
# In this course a lot goes wrong on purpose. The next cell **has to fail**: one of the two raises an error, while the
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
# ## Tell your teacher

# %%
import os
import platform

import psutil
import torch

import axon_nb

talks = list(sums.values.values()) == [3.0, 3.0]
recovers = list(after.values.values()) == [6.0, 6.0]
print("READY" if talks and recovers else "NOT READY: send the whole page to your teacher")
print(
    f"axon_nb {axon_nb.__version__}, Python {platform.python_version()}, torch {torch.__version__}, "
    f"{os.cpu_count()} cores, {psutil.virtual_memory().available / 1024**3:.1f} GiB of memory free, "
    f"{torch.cuda.device_count()} GPUs"
)

# %% [markdown]
# Four ranks and the notebook need about 1.5 GiB of free memory. If you have less, close other programs; with two ranks
# (`%distributed start -n 2`) most of the course works, too. GPUs are not needed.
#
# An error instead of `READY`? Look at the first lines below `%distributed doctor`: each problem comes with a fix. Then
# choose *Kernel → Restart Kernel and Run All Cells*.
#
# **Next:** `01_one_program` starts four processes and lets them fail.
