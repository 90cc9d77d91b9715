#!/usr/bin/env bash
# Subject:  pickle of a list of views of one tensor, and broadcast_object_list, which pickles.
# Versions: torch 2.13.0, numpy 2.4.6, Python 3.11, Linux, CPU, 2 processes, Gloo.
# Expected: pickle stores what is shared once, as torch.save and copy.deepcopy do; at worst each row is stored by
#           itself, as with NumPy. What shared memory before (tied weights in a state dict) shares it after.
# Happens:  each view carries the whole matrix: 100 rows take 100 times the matrix. After the trip nothing is shared: a
#           tied weight has become two. The object collectives, queues of other libraries and pushes of notebooks pickle
#           like that, so the rows of 40 MB make 4 GB. clone() of each row helps.
# Source:   pytorch/pytorch#145665 (open): a storage is pickled twice; #65604 (open): a slice brings the whole.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > check.py <<'PY'
import io
import pickle

import numpy as np
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()


def size_of_save(value) -> int:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.tell()


matrix = torch.zeros(100, 1000)
rows = list(matrix)
whole, listed = len(pickle.dumps(matrix)), len(pickle.dumps(rows))
of_numpy = len(pickle.dumps(list(np.zeros((100, 1000), np.float32))))
cloned = len(pickle.dumps([row.clone() for row in rows]))
if rank == 0:
    print(f"bytes: matrix {whole}, its rows {listed}, saved {size_of_save(rows)}, of NumPy {of_numpy}, clones {cloned}")
assert listed > 95 * whole and max(size_of_save(rows), of_numpy, cloned) < 2 * whole

layer = torch.nn.Linear(3, 3, bias=False)
state = [{"embedding": layer.weight.detach(), "head": layer.weight.detach()}]
assert state[0]["embedding"].data_ptr() == state[0]["head"].data_ptr()
dist.broadcast_object_list(state, 0)
tied = state[0]["embedding"].data_ptr() == state[0]["head"].data_ptr()
if rank == 1:
    print("tied after broadcast_object_list:", tied, flush=True)
assert rank == 0 or not tied
dist.barrier()
dist.destroy_process_group()
PY
GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 venv/bin/torchrun --standalone --nproc-per-node=2 \
    check.py 2> errors.txt || { cat errors.txt; exit 1; }
echo "unchanged: each row brings the whole matrix"
