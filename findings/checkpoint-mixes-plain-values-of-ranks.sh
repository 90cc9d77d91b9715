#!/usr/bin/env bash
# Subject:  numbers and plain tensors that differ between ranks in torch.distributed.checkpoint.save, such as a rank's
#           position in its data, its random state or its own loss.
# Versions: torch 2.13.0, numpy 2.4.6, Python 3.11, Linux, CPU, 2 processes.
# Expected: each rank gets back its own, or all get those of rank 0, or the save says that they differ.
# Happens:  equal names count as copies, and the planner spreads the writing of copies over the ranks: all ranks load
#           some values of rank 0 and others of rank 1, a mixture that no rank ever had, without a word. A name for
#           each rank keeps all.
# Source:   the documentation says that what is replicated is saved once, not by whom. I found no entry about values
#           that differ.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > check.py <<'PY'
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

dist.init_process_group("gloo")
rank = dist.get_rank()
folder = [tempfile.mkdtemp(dir=".")]
dist.broadcast_object_list(folder)
dcp.save({str(i): torch.full((i + 1,), float(rank)) for i in range(6)}, checkpoint_id=f"{folder[0]}/shared")
found = {str(i): torch.full((i + 1,), -1.0) for i in range(6)}
dcp.load(found, checkpoint_id=f"{folder[0]}/shared")
owners = [value[0].item() for value in found.values()]
every = [None, None]
dist.all_gather_object(every, owners)
dcp.save({f"position {rank}": 100 + rank}, checkpoint_id=f"{folder[0]}/own")
own = {f"position {rank}": 0}
dcp.load(own, checkpoint_id=f"{folder[0]}/own")
if rank == 0:
    print("the ranks whose six values both ranks load:", owners, flush=True)
assert every[0] == every[1] and set(owners) == {0.0, 1.0}
assert own == {f"position {rank}": 100 + rank}
dist.barrier()
if rank == 0:
    print("unchanged: a checkpoint mixes the ranks' values")
dist.destroy_process_group()
PY
GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 venv/bin/torchrun --standalone --nproc-per-node=2 \
    check.py 2> errors.txt || { cat errors.txt; exit 1; }
