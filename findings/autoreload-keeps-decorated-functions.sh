#!/usr/bin/env bash
# Subject:  %autoreload 2 after an edit of a module whose functions were imported by name, where some have a decorator.
# Versions: ipython 9.18.1, ipykernel 7.4.0, nbclient 0.11.0, Python 3.11, Linux.
# Expected: `from steps import train` takes part: plain functions that were imported by name are renewed in place, so
#           one relies on it for all.
# Happens:  under its imported name, a function with functools.cache stays the old one from the first edit on, and one
#           with a decorator that wraps is renewed once and stays there from the second edit on; plain functions, and
#           all of them by the module's name, are new. So an edit takes effect in a part of the functions, and the first
#           trial misleads.
# Source:   IPython's documentation promises that functions imported by name are upgraded, and its list of caveats does
#           not speak of decorators; ipython/ipython#11099 (open) meets one that wraps.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check ipython==9.18.1 ipykernel==7.4.0 nbclient==0.11.0 nbformat==5.11.1
cat > check.py <<'PY'
import nbclient
from nbformat.v4 import new_code_cell, new_notebook

MODULE = '''
import functools
def timed(function):
    @functools.wraps(function)
    def wrapper(*arguments):
        return function(*arguments)
    return wrapper
def plain(): return {k}
@timed
def wrapped(): return {k}
@functools.cache
def cached(): return {k}
'''
EDIT = f"""import os, pathlib, time
def edit(k):
    path = pathlib.Path("steps.py")
    path.write_text({MODULE!r}.format(k=k))
    os.utime(path, (time.time() + 10 * k,) * 2)
edit(1)"""
SHOW = "print(plain(), wrapped(), cached(), '-', steps.plain(), steps.wrapped(), steps.cached())"
LOAD = "%load_ext autoreload\n%autoreload 2\nimport steps\nfrom steps import plain, wrapped, cached"
cells = [EDIT, LOAD, SHOW, "edit(2)", SHOW, "edit(3)", SHOW]
notebook = new_notebook(cells=[new_code_cell(text) for text in cells])
nbclient.NotebookClient(notebook, timeout=100).execute()
shown = [notebook.cells[number].outputs[0].text.strip() for number in (2, 4, 6)]
for text in shown:
    print("plain, wrapped, cached by name - by the module:", text)
assert shown == ["1 1 1 - 1 1 1", "2 2 1 - 2 2 2", "3 2 1 - 3 3 3"]
print("unchanged: decorated functions stay old under their imported names")
PY
export HOME="$folder" IPYTHONDIR="$folder/ipython"
venv/bin/python check.py 2> errors.txt || { cat errors.txt; exit 1; }
