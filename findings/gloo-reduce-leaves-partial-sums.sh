#!/usr/bin/env bash
# Subject:  dist.reduce on Gloo: the tensors of the ranks that are not the destination.
# Versions: torch 2.13.0, numpy 2.4.6, Python 3.11, Linux, CPU, 3 processes.
# Expected: only the destination's tensor changes, as with NCCL; the others keep their own values, or all become
#           useless.
# Happens:  on the others, parts of the tensor are overwritten with different sums: of twelve equal numbers some stay,
#           some are sums of two ranks, and some are the total. Which elements it are depends on the ranks, their number
#           and the tensor's length, so a look at one element shows nothing. Local counts that are used after a reduce
#           for a log are wrong in places.
# Source:   pytorch/pytorch#76527 (open since 2022) describes it, #21480 (closed) too. The documentation says that only
#           the destination gets the final result, not what the others have.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > check.py <<'PY'
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
own = float(10**rank)
total = float(sum(10**r for r in range(size)))
for destination in 0, 1:
    values = torch.full((12,), own)
    dist.reduce(values, destination)
    for turn in range(size):
        if turn == rank:
            print(f"to rank {destination}: rank {rank} had {own:g}, has {values.tolist()}", flush=True)
        dist.barrier()
    if rank == destination:
        assert values.tolist() == [total] * 12
    else:
        assert values.ne(own).any() and len(set(values.tolist())) > 1  # neither kept nor one result
dist.barrier()
dist.destroy_process_group()
PY
GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 venv/bin/torchrun --standalone --nproc-per-node=3 \
    check.py 2> errors.txt || { cat errors.txt; exit 1; }
echo "unchanged: reduce writes partial sums into some elements of the others"
