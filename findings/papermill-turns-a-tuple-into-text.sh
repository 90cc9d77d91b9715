#!/usr/bin/env bash
# Subject:  a tuple among the parameters of papermill.execute_notebook, as a shape or a pair of limits.
# Versions: papermill 2.7.0, ipykernel 7.4.0, nbclient 0.11.0, Python 3.11, Linux.
# Expected: a tuple, or the list that JSON makes of it (the saved parameters hold one), or an error, as for arrays and
#           sets.
# Happens:  the notebook gets the text "(8, 16)", also inside lists and dicts: len(shape) is 7, a loop over it runs over
#           characters, and shape[0] is "(". A list arrives as a list, so the same call works with [8, 16]. Nothing
#           warns.
# Source:   papermill's translators know text, numbers, truth values, None, dicts and lists, and write all others as
#           text; nteract/papermill#55 (open) asks for the types of the notebook's own defaults. I found no entry on
#           tuples.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check papermill==2.7.0 ipykernel==7.4.0 nbclient==0.11.0 nbformat==5.11.1
cat > check.py <<'PY'
import warnings

import nbformat
import papermill
from nbformat.v4 import new_code_cell, new_notebook

BODY = """print(type(shape).__name__, len(shape), shape[0])
print(type(listed).__name__, len(listed), listed[0])
print([type(pair).__name__ for pair in pairs], type(limits["rate"]).__name__)"""
cells = [new_code_cell("shape, listed, pairs, limits = (4, 4), [4, 4], [], {}"), new_code_cell(BODY)]
cells[0].metadata["tags"] = ["parameters"]
kernel = {"name": "python3", "display_name": "", "language": "python"}
nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernel}), "in.ipynb")
parameters = {"shape": (8, 16), "listed": [8, 16], "pairs": [(1, 2), [3, 4]], "limits": {"rate": (0, 1)}}
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    done = papermill.execute_notebook("in.ipynb", "out.ipynb", parameters, progress_bar=False)
print("injected:", done.cells[1].source.replace("\n", "; "))
printed = "".join(one.text for one in done.cells[2].outputs)
print(printed)
assert printed.splitlines() == ["str 7 (", "list 2 8", "['str', 'list'] str"], printed
assert list(nbformat.read("out.ipynb", 4).metadata.papermill.parameters.shape) == [8, 16]
assert not [w for w in warned if "tuple" in str(w.message).lower()]
print("unchanged: a tuple becomes text")
PY
export HOME="$folder" IPYTHONDIR="$folder/ipython"
venv/bin/python check.py 2> errors.txt || { cat errors.txt; exit 1; }
