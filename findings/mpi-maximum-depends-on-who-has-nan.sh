#!/usr/bin/env bash
# Subject:  mpi4py's allreduce of Python numbers, tuples and lists.
# Versions: mpi4py 4.1.2, mpich 5.0.2, numpy 2.4.6, Python 3.11, Linux, 2 processes.
# Expected: MAX of a loss shows a NaN on any rank, or on none; MAX and SUM of (loss, count) work on each of the two, as
#           they do on the same figures in an array.
# Happens:  the lowercase functions apply Python's operators: max(nan, 1) is nan and max(1, nan) is 1, so it is the rank
#           that decides; the maximum of tuples is one rank's tuple, the sum of lists one long list, and the sum of numpy's
#           True and True is True. With arrays and the uppercase functions, figures are combined one by one.
# Source:   the tutorial says that objects are pickled and combined in Python; nothing there about NaN or sequences.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check mpi4py==4.1.2 mpich==5.0.2 numpy==2.4.6
cat > check.py <<'PY'
import math

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank = comm.rank
loss, count = [(0.5, 30), (0.9, 10)][rank]
of_first = comm.allreduce(math.nan if rank == 0 else 1.0, op=MPI.MAX)
of_second = comm.allreduce(math.nan if rank == 1 else 1.0, op=MPI.MAX)
largest = comm.allreduce((loss, count), op=MPI.MAX)
total = comm.allreduce([loss, count], op=MPI.SUM)
flags = comm.allreduce(np.bool_(True)), comm.allreduce(True)
array = np.empty(2)
comm.Allreduce(np.array([loss, count]), array, op=MPI.MAX)
if rank == 0:
    print(f"NaN on rank 0: {of_first}, on rank 1: {of_second}; MAX {largest}, of an array {array.tolist()}; "
          f"SUM {total}; flags {flags}", flush=True)
assert math.isnan(of_first) and of_second == 1.0
assert largest == (0.9, 10) and array.tolist() == [0.9, 30]
assert total == [0.5, 30, 0.9, 10]
assert flags[0] is np.True_ and flags[1] == 2
PY
timeout 120 venv/bin/mpiexec -n 2 venv/bin/python check.py
echo "unchanged: objects are combined by Python's operators"
