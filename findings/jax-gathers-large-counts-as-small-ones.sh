#!/usr/bin/env bash
# Subject:  jax's multihost_utils with integers of 64 bits and numbers of double precision.
# Versions: jax 0.10.2, jaxlib 0.10.2, numpy 2.4.6, Python 3.11, Linux, CPU, 2 processes.
# Expected: numpy arrays and Python numbers come back as they are, as these functions are for host data; or an error for
#           what does not fit, or the warning that jnp.asarray gives.
# Happens:  all is cut to 32 bits without a word: a count of 3,000,000,000 tokens is negative on all processes, 2**40 that
#           process 0 broadcasts arrives as 0, 1e-50 as 0.0, and assert_equal fails for equal large integers. With
#           jax_enable_x64 it is right.
# Source:   the documentation of jax_enable_x64 speaks of arrays; I found no issue about these functions.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cat > check.py <<'PY'
import sys
import warnings

import jax
import numpy as np
from jax.experimental import multihost_utils

rank, port = int(sys.argv[1]), sys.argv[2]
warned = warnings.catch_warnings(record=True).__enter__()
warnings.simplefilter("always")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)


def look():
    tokens = np.asarray([3_000_000_000, 7], dtype=np.int64)
    gathered = multihost_utils.process_allgather(tokens)[1].tolist()
    sent = multihost_utils.broadcast_one_to_all({"step": np.int64(2**40), "epsilon": 1e-50})
    try:
        multihost_utils.assert_equal(np.int64(2**40))
        equal = True
    except AssertionError:
        equal = False
    return gathered, int(sent["step"]), float(sent["epsilon"]), equal


cut = look()
silent = not [w for w in warned if "int64" in str(w.message) or "truncated" in str(w.message)]
jax.config.update("jax_enable_x64", True)
right = look()
if rank == 0:
    print(f"default: {cut}; with jax_enable_x64: {right}; no warning: {silent}", flush=True)
assert cut == ([3_000_000_000 - 2**32, 7], 0, 0.0, False) and silent
assert right == ([3_000_000_000, 7], 2**40, 1e-50, True)
jax.distributed.shutdown()
PY
port=$(venv/bin/python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
export JAX_PLATFORMS=cpu
timeout 120 venv/bin/python check.py 1 "$port" > other.txt 2>&1 &
timeout 120 venv/bin/python check.py 0 "$port" 2> errors.txt || { cat errors.txt; exit 1; }
wait $! || { cat other.txt; exit 1; }
echo "unchanged: large counts are cut to 32 bits unseen"
