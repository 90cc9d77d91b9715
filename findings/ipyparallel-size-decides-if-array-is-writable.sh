#!/usr/bin/env bash
# Subject:  a NumPy array that is an argument of a function on ipyparallel's engines, and is changed there in place.
# Versions: ipyparallel 9.2.0, ipykernel 7.4.0, numpy 2.4.6, Python 3.11, Linux, 1 engine.
# Expected: arguments are all read-only (the documentation says so of arrays), or all writable copies; how many elements
#           there are makes no difference, so what was tried with a small array holds for a large one.
# Happens:  an array of 100 numbers arrives read-only, one of 1000 writable: the same function raises ValueError for the
#           small one and changes the large one, without an effect on the client. An array that was pushed is alike. A
#           test with little data fails where the real run works, and an in-place step in the real run goes unnoticed.
# Source:   ipyparallel's page on details says that arrays arrive read-only, because they are not copied;
#           ipython/ipyparallel#742 and #70 meet the read-only side. I found no entry about large arrays.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check ipyparallel==9.2.0 ipykernel==7.4.0 numpy==2.4.6
cat > check.py <<'PY'
import logging

import ipyparallel as ipp
import numpy as np


def scale(values):
    try:
        values *= 2
    except ValueError as error:
        return str(error)
    return float(values[0])


def pushed():
    return {name: globals()[name].flags.writeable for name in ("little", "much")}


sizes = 3, 100, 1000, 300000
with ipp.Cluster(n=1, log_level=logging.ERROR) as client:
    view = client[:]
    arrays = [np.ones(size) for size in sizes]
    results = [view.apply_sync(scale, array)[0] for array in arrays]
    view.push({"little": arrays[0], "much": arrays[-1]}, block=True)
    kept = view.apply_sync(pushed)[0]
for size, result in zip(sizes, results):
    print(f"{size} numbers, doubled in place: {result}")
print("pushed arrays are writable:", kept)
assert all("read-only" in str(result) for result in results[:2])
assert results[2:] == [2.0, 2.0]
assert kept == {"little": False, "much": True}
assert all(array[0] == 1 for array in arrays)  # the client's own arrays
print("unchanged: small arrays are read-only, large ones are not")
PY
export HOME="$folder" IPYTHONDIR="$folder/ipython"
PATH="$folder/venv/bin:$PATH" venv/bin/python check.py 2> errors.txt || { cat errors.txt; exit 1; }
