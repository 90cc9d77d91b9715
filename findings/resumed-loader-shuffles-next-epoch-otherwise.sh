#!/usr/bin/env bash
# Subject:  torchdata's StatefulDataLoader with shuffle and a generator of one's own, resumed in the middle of an epoch.
# Versions: torchdata 0.11.0, torch 2.13.0, numpy 2.4.6, Python 3.11, Linux, CPU, one process.
# Expected: the resumed run draws the rest of the epoch and then the epochs that the first run draws: the state holds the
#           generator's state, and how many workers there are makes no difference.
# Happens:  without workers the rest of the epoch is right, and each later epoch has another order than in the run that
#           was not interrupted: a resumed loader draws from the generator once more than the first one did. With one
#           worker, without a generator, or with a sampler that has the generator, all epochs are equal.
# Source:   meta-pytorch/data#1437 (closed) has an epoch that was skipped after a load, and orders that were equal; nothing
#           was found about the epochs after it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6 torchdata==0.11.0
cat > check.py <<'PY'
import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

DATA = list(range(12))


def loader(kind: str) -> StatefulDataLoader:
    own = torch.Generator().manual_seed(0)
    if kind == "a sampler with the generator":
        return StatefulDataLoader(DATA, batch_size=2, sampler=RandomSampler(DATA, generator=own))
    if kind == "no generator":
        torch.manual_seed(0)
        return StatefulDataLoader(DATA, batch_size=2, shuffle=True)
    workers = int(kind == "a generator and a worker")
    return StatefulDataLoader(DATA, batch_size=2, shuffle=True, generator=own, num_workers=workers)


def drawn(batches) -> list[int]:
    return [int(number) for batch in batches for number in batch]


def equal(kind: str) -> tuple[bool, bool]:
    """Whether the rest of the epoch, and the next epoch, are those of the run that goes on."""
    first = loader(kind)
    next(batches := iter(first))
    state = first.state_dict()
    rest, following = drawn(batches), drawn(first)
    resumed = loader(kind)
    resumed.load_state_dict(state)
    return drawn(resumed) == rest, drawn(resumed) == following


found = {
    kind: equal(kind)
    for kind in ("a generator", "a generator and a worker", "a sampler with the generator", "no generator")
}
for kind, (rest, following) in found.items():
    print(f"{kind}: rest of the epoch equal: {rest}, next epoch equal: {following}")
assert found.pop("a generator") == (True, False)
assert set(found.values()) == {(True, True)}
print("unchanged: after a resume later epochs differ")
PY
OMP_NUM_THREADS=1 venv/bin/python check.py 2> errors.txt || { cat errors.txt; exit 1; }
