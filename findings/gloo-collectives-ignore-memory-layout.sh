#!/usr/bin/env bash
# Subject:  broadcast and all_reduce on Gloo, of tensors of equal shape that lie in memory in different order: one
#           rank's is the transpose of a tensor, or in channels_last format.
# Versions: torch 2.13.0, numpy 2.4.6, Python 3.11, Linux, CPU, 2 processes.
# Expected: element (i, j) meets element (i, j), as in all of torch; or an error, as Gloo's send raises for such a
#           tensor.
# Happens:  the bytes are combined in the order in which they lie. Rank 1 receives other elements in each place; a sum
#           is of mixed elements, and the ranks end with different sums: a mean of weights is then no mean, on either
#           rank. A convolution's weight in channels_last on one rank only is scrambled like that.
# Source:   pytorch/pytorch#62283 (open) saw it with NCCL's send and recv, where Gloo raises; #192920 (open) is about
#           tensors with gaps on Gloo. The documentation asks for equal shapes only.
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
rank = dist.get_rank()


def show(*words) -> None:
    for turn in range(2):
        if turn == rank:
            print(f"rank {rank}:", *words, flush=True)
        dist.barrier()


whole = torch.arange(6.0).reshape(2, 3)
turned = whole.t().contiguous().t()  # the same elements, by columns in memory
assert torch.equal(whole, turned) and whole.stride() != turned.stride()

summed = whole.clone() if rank == 0 else turned.clone(memory_format=torch.preserve_format)
dist.all_reduce(summed)
show("the sum of twice", whole.tolist(), "is", summed.tolist())
assert not torch.equal(summed, whole * 2)
assert summed.tolist() == [[[0, 4, 3], [7, 6, 10]], [[0, 3, 6], [4, 7, 10]]][rank]  # not even equal

received = whole.clone() if rank == 0 else torch.zeros(3, 2).t()
dist.broadcast(received, 0)
show("after a broadcast of", whole.tolist(), "there is", received.tolist())
assert torch.equal(received, whole) == (rank == 0)
assert rank == 0 or received.tolist() == [[0, 2, 4], [1, 3, 5]]

kernel = torch.arange(16.0).reshape(2, 2, 2, 2)
weight = kernel.clone() if rank == 0 else torch.zeros_like(kernel).to(memory_format=torch.channels_last)
dist.broadcast(weight, 0)
same = int(weight.eq(kernel).sum())
show(f"{same} of 16 elements of the kernel are in place")
assert same == (16 if rank == 0 else 4)
dist.destroy_process_group()
PY
GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 venv/bin/torchrun --standalone --nproc-per-node=2 \
    check.py 2> errors.txt || { cat errors.txt; exit 1; }
echo "unchanged: elements meet in the order of memory"
