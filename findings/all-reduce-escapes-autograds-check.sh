#!/usr/bin/env bash
# Subject:  all_reduce of a detached tensor (for a log, say) whose values autograd has saved for the backward pass.
# Versions: torch 2.13.0, numpy 2.4.6, Python 3.11, Linux, CPU, 2 processes, Gloo.
# Expected: detach() shares memory, so a change in place spoils the saved values, and backward raises "modified by an
#           inplace operation", as it does after add_ on the same detached tensor.
# Happens:  collectives do not count as changes: the tensor's version stays, backward raises nothing and uses the
#           reduced values. The gradient of exp is then too great by the number of ranks. No warning is given, as the
#           detached tensor needs no gradient. all_reduce(y.detach().clone()) is right.
# Source:   the documentation says that collectives work in place; I found no entry about the version. Autograd's page
#           says that its counter finds every such change.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > check.py <<'PY'
import math
import warnings

import torch
import torch.distributed as dist

warned = warnings.catch_warnings(record=True).__enter__()
warnings.simplefilter("always")
dist.init_process_group("gloo")
rank = dist.get_rank()


def gradient(change):
    """The gradient of sum(exp(x)) at 1, with something done to the detached exponentials before backward."""
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    loss = y.sum()
    change(y.detach())
    version = y._version
    try:
        loss.backward()
    except RuntimeError as error:
        return version, "inplace operation" in str(error)
    return version, round(x.grad[0].item(), 4)


results = {
    "nothing": gradient(lambda t: None),
    "add_": gradient(lambda t: t.add_(1)),
    "all_reduce of a clone": gradient(lambda t: dist.all_reduce(t.clone())),
    "all_reduce": gradient(lambda t: dist.all_reduce(t)),
    "broadcast": gradient(lambda t: dist.broadcast(t.mul(1 + rank) if rank == 0 else t, 0)),
}
if rank == 1:
    for name, (version, result) in results.items():
        print(f"{name}: version {version}, gradient {result}", flush=True)
right = round(math.e, 4)
assert results["nothing"] == results["all_reduce of a clone"] == (0, right)
assert results["add_"] == (1, True)
assert results["all_reduce"] == (0, round(2 * math.e, 4))
assert not [w for w in warned if "c10d" in str(w.message) or "inplace" in str(w.message)]
dist.barrier()
dist.destroy_process_group()
PY
GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 venv/bin/torchrun --standalone --nproc-per-node=2 \
    check.py 2> errors.txt || { cat errors.txt; exit 1; }
echo "unchanged: a collective changes saved values unseen"
