#!/usr/bin/env bash
# Subject:  webdataset's with_epoch on shards that are split between ranks.
# Versions: webdataset 1.0.2, torch 2.13.0, numpy 2.4.6, Python 3.11, Linux, 2 processes.
# Expected: an epoch of n samples is the next n of the stream, so that a short epoch (to validate often) comes round to all
#           data after a few of them.
# Happens:  each epoch begins at the first shard again: with epochs of 6 of 16 samples, a rank trains on the same 6 for
#           ever, and the other shards are never opened. Without with_epoch, one iterator that is kept and sliced goes on.
#           shuffle(seed=...) has the same order in each epoch, too.
# Source:   webdataset#310 saw it with its own shard list; the maintainer's advice elsewhere is resampled=True.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check webdataset==1.0.2 torch==2.13.0 numpy==2.4.6
cat > check.py <<'PY'
import itertools
import os
import time

import webdataset

rank = int(os.environ["RANK"])
if rank == 0:
    for shard in range(8):
        with webdataset.TarWriter(f"shard-{shard}.part") as out:
            for row in range(4):
                out.write({"__key__": f"{shard}_{row}", "cls": shard * 4 + row})
        os.rename(f"shard-{shard}.part", f"shard-{shard}.tar")
while not os.path.exists("shard-7.tar"):
    time.sleep(0.05)


def stream():
    urls = [f"shard-{number}.tar" for number in range(8)]
    return webdataset.WebDataset(urls, shardshuffle=False, nodesplitter=webdataset.split_by_node).decode()


def seen(epochs):
    return [[sample["cls"] for sample in epoch] for epoch in epochs]


short = stream().with_epoch(6)
epochs = seen(short for _ in range(5))
rows = iter(stream())
going_on = seen(itertools.islice(rows, 6) for _ in range(3))
shuffled = stream().shuffle(8, seed=1)
orders = seen(shuffled for _ in range(2))
own = [shard * 4 + row for shard in range(rank, 8, 2) for row in range(4)]
if rank == 1:
    print(f"five epochs: {epochs}; going on: {going_on}", flush=True)
assert epochs == [own[:6]] * 5
assert sum(going_on, []) == own
assert sorted(orders[0]) == own != orders[0] and orders[0] == orders[1]
PY
OMP_NUM_THREADS=1 venv/bin/torchrun --standalone --nproc-per-node=2 check.py 2> errors.txt || { cat errors.txt; exit 1; }
echo "unchanged: a short epoch has the same samples each time"
