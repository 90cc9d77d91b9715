#!/usr/bin/env bash
# Subject:  a DataFrame given to map_sync of an ipyparallel view, and to scatter and gather.
# Versions: ipyparallel 9.2.0, ipykernel 7.4.0, pandas 3.1.1, numpy 2.4.6, Python 3.11, Linux, 2 engines.
# Expected: what Python's map gives, each column's name once; or the rows, since scatter deals a frame out by rows; or
#           an error. And gather is the inverse of scatter.
# Happens:  the frame is cut by rows for the engines, but each engine then loops over its piece, which yields column
#           names: every name comes once for each engine, ["a", "b", "a", "b"], and no value is ever seen. With one
#           engine the result equals Python's. A Series works. gather of a scattered frame is a list of the pieces.
# Source:   the documentation of map says that it is like Python's map; that of scatter and gather speaks of sequences.
#           I found no entry about frames.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check ipyparallel==9.2.0 ipykernel==7.4.0 pandas==3.1.1 numpy==2.4.6
cat > check.py <<'PY'
import logging

import ipyparallel as ipp
import pandas as pd


def shout(item):
    return str(item).upper()


frame = pd.DataFrame({"a": [1, 2, 3, 4], "b": [5, 6, 7, 8]})
with ipp.Cluster(n=2, log_level=logging.ERROR) as client:
    both, one = client[:], client[:1]
    plain = list(map(shout, frame))
    mapped, alone = both.map_sync(shout, frame), one.map_sync(shout, frame)
    series = both.map_sync(shout, frame["a"])
    both.scatter("part", frame, block=True)
    pieces, gathered = both.pull("part", block=True), both.gather("part", block=True)
print("Python's map:", plain, "one engine:", alone, "two engines:", mapped, "a Series:", series)
print("pieces:", [piece["a"].tolist() for piece in pieces], "gathered:", type(gathered).__name__, "of", len(gathered))
assert plain == alone == ["A", "B"]
assert mapped == ["A", "B", "A", "B"]
assert series == ["1", "2", "3", "4"]
assert [piece["a"].tolist() for piece in pieces] == [[1, 2], [3, 4]]
assert isinstance(gathered, list) and len(gathered) == 2 and not isinstance(gathered, pd.DataFrame)
print("unchanged: rows are dealt out, and names come back, once for each engine")
PY
export HOME="$folder" IPYTHONDIR="$folder/ipython"
PATH="$folder/venv/bin:$PATH" venv/bin/python check.py 2> errors.txt || { cat errors.txt; exit 1; }
