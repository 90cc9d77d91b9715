#!/usr/bin/env bash
# Subject:  a lazy stack of TensorDicts of which one has an entry more, as gathered from ranks, made contiguous.
# Versions: tensordict 0.15.3, torch 2.13.0, numpy 2.4.6, Python 3.11, Linux, CPU.
# Expected: contiguous() changes the memory only, or raises for entries that cannot be stacked, as torch.stack of the
#           same TensorDicts and the stack's own to_dict() do.
# Happens:  the entry that only some have is left out of the result, without a word. keys() and items() leave it out
#           before that; it is still there in each element, and the text of the stack shows it as exclusive.
#           maybe_dense_stack, advised by the error of torch.stack, makes such stacks.
# Source:   the documentation says that a lazy stack keeps its inputs and stacks entries when they are read. I found no
#           entry about contiguous.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6 tensordict==0.15.3
cat > check.py <<'PY'
import warnings

import torch
from tensordict import TensorDict

warned = warnings.catch_warnings(record=True).__enter__()
warnings.simplefilter("always")
parts = [TensorDict({"loss": torch.ones(1), "grad_norm": torch.ones(1)}, []), TensorDict({"loss": torch.zeros(1)}, [])]
stack = TensorDict.maybe_dense_stack(parts)
dense = stack.contiguous()
print("made by maybe_dense_stack:", type(stack).__name__, "with", list(stack.keys()))
print("contiguous:", type(dense).__name__, "with", list(dense.keys()), "- the first element:", list(stack[0].keys()))
assert type(stack).__name__ == "LazyStackedTensorDict" and list(stack.keys()) == ["loss"]
assert "grad_norm" in repr(stack) and set(stack[0].keys()) == {"loss", "grad_norm"}
assert type(dense).__name__ == "TensorDict" and list(dense.keys()) == ["loss"]
assert set(dense[0].keys()) == {"loss"}
assert not [w for w in warned if "exclusive" in str(w.message) or "key" in str(w.message)]
for name, use in (("torch.stack", lambda: torch.stack(parts)), ("to_dict", stack.to_dict)):
    try:
        use()
    except RuntimeError as error:
        print(f"{name}: RuntimeError: {str(error)[:80]}")
        assert "exclusive" in str(error)
    else:
        raise AssertionError(name)
print("unchanged: contiguous leaves entries out")
PY
OMP_NUM_THREADS=1 venv/bin/python check.py 2> errors.txt || { cat errors.txt; exit 1; }
