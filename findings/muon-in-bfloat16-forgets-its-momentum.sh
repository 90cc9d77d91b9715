#!/usr/bin/env bash
# Subject:  torch.optim.Muon with nesterov=False on parameters in bfloat16.
# Versions: torch 2.13.0, numpy 2.4.6, Python 3.11, Linux, CPU.
# Expected: the momentum buffer is a running mean of the gradients, as it is for float32 parameters and for
#           nesterov=True: with a constant gradient g and momentum .5 it goes g/2, 3g/4, 7g/8.
# Happens:  after each step the buffer has norm 1, whatever the gradients were. The orthogonalization casts the buffer to
#           bfloat16, which returns the buffer itself where it has that type already, and divides it by its norm in
#           place. So the next step weighs a gradient of any size against a direction of length 1: a small gradient
#           hardly moves it, a large one drowns all that came before.
# Source:   pytorch/pytorch#194664 (August 2026) makes a copy; torch/optim/_muon.py of v2.13.0 makes none.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > check.py <<'PY'
import torch


def norms(dtype: torch.dtype, nesterov: bool) -> list[float]:
    """Norms of the momentum buffer over the norm of a constant gradient, after each of three steps."""
    weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=dtype))
    optimizer = torch.optim.Muon([weight], lr=0.0, momentum=0.5, nesterov=nesterov)
    gradient = (8.0 * torch.ones(4, 4).triu()).to(dtype)
    found = []
    for _ in range(3):
        weight.grad = gradient.clone()
        optimizer.step()
        buffer = optimizer.state[weight]["momentum_buffer"].float()
        found.append(round(float(buffer.norm() / gradient.float().norm()), 2))
    return found


usual = [0.5, 0.75, 0.88]
seen = {(dtype, nesterov): norms(dtype, nesterov) for dtype in (torch.float32, torch.bfloat16) for nesterov in (True, False)}
for (dtype, nesterov), found in seen.items():
    print(f"{dtype}, nesterov={nesterov}: {found} of the gradient's norm")
strange = seen.pop((torch.bfloat16, False))
assert all(found == usual for found in seen.values())
assert strange == [0.04, 0.04, 0.04]  # 1 over 8 * sqrt(10)
print("unchanged: without nesterov, the momentum of bfloat16 parameters is divided by its norm in each step")
PY
venv/bin/python check.py
