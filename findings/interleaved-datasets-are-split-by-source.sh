#!/usr/bin/env bash
# Subject:  datasets: two streams interleaved, then split_dataset_by_node for two ranks.
# Versions: datasets 5.2.0, Python 3.11, Linux; no process group is needed.
# Expected: each rank sees a part of the mixture: half of its examples from either source.
# Happens:  if the number of shards does not divide by the ranks, each rank takes every second example;
#           interleave_datasets alternates, so rank 0 gets the first source alone and rank 1 the second. The same if
#           the sources are split first and then interleaved, since the choice of examples happens last. With two
#           shards each, and with probabilities, it is a mixture.
# Source:   the documentation says that each node keeps one example of world_size, not what that does to a mixture.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check datasets==5.2.0
cat > check.py <<'PY'
from datasets import Dataset, interleave_datasets
from datasets.distributed import split_dataset_by_node

ENGLISH, FRENCH = ([f"{language}{i}" for i in range(8)] for language in ("en", "fr"))


def stream(texts: list[str], shards: int):
    return Dataset.from_dict({"text": texts}).to_iterable_dataset(num_shards=shards)


def sources(stream_of_rank) -> list[str]:
    return sorted({example["text"][:2] for example in stream_of_rank})


def of_ranks(shards: int, **options) -> list[list[str]]:
    mixture = interleave_datasets([stream(ENGLISH, shards), stream(FRENCH, shards)], **options)
    return [sources(split_dataset_by_node(mixture, rank=rank, world_size=2)) for rank in range(2)]


def mixed_after(rank: int) -> list[str]:
    parts = [split_dataset_by_node(stream(texts, 1), rank=rank, world_size=2) for texts in (ENGLISH, FRENCH)]
    return sources(interleave_datasets(parts))


one, two = of_ranks(1), of_ranks(2)
drawn, after = of_ranks(1, probabilities=[0.5, 0.5], seed=0), [mixed_after(rank) for rank in range(2)]
print(f"one shard each: {one}; two shards: {two}; with probabilities: {drawn}; split first: {after}")
assert one == [["en"], ["fr"]]
assert after == one and two == drawn == [["en", "fr"], ["en", "fr"]]
print("unchanged: each rank gets one source")
PY
HF_HUB_OFFLINE=1 venv/bin/python check.py 2> errors.txt || { cat errors.txt; exit 1; }
