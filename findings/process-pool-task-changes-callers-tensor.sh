#!/usr/bin/env bash
# Subject:  tensors as arguments of concurrent.futures.ProcessPoolExecutor, and in queues of Python's multiprocessing.
# Versions: torch 2.13.0, numpy 2.4.6, joblib 1.6.0, Python 3.11, Linux, CPU.
# Expected: arguments are pickled, so a task works on its own copy, as with arrays and all other objects; sharing is
#           what torch.multiprocessing is for. joblib's processes do get copies.
# Happens:  a change in the task arrives in the caller's tensor: `import torch` alone registers its way to pickle with
#           Python's multiprocessing, and that moves the tensor to shared memory. What a queue holds changes too, when
#           the sender goes on with the tensor (a snapshot of weights is not one). NumPy arrays are copied as ever.
# Source:   pytorch/pytorch#70041 (open): the documentation speaks as if torch.multiprocessing had to be imported; pull
#           request 194436 notes that Python's queues do the same.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6 joblib==1.6.0
cat > check.py <<'PY'
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import torch
from joblib import Parallel, delayed


def centred(values):
    values -= values.mean()
    return float(values[0])


def first(queue, ready, answers):
    ready.wait()
    answers.put(float(queue.get()[0]))


def main():
    context = multiprocessing.get_context("spawn")
    tensor, array = torch.tensor([1.0, 3.0]), np.array([1.0, 3.0])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        results = [pool.submit(centred, values).result() for values in (tensor, array)]
    print("results", results, "- the caller's tensor:", tensor.tolist(), "array:", array.tolist())
    assert results == [-1.0, -1.0]
    assert tensor.tolist() == [-1.0, 1.0] and tensor.is_shared()
    assert array.tolist() == [1.0, 3.0]

    copied = torch.tensor([1.0, 3.0])
    assert Parallel(2)(delayed(centred)(values) for values in (copied, copied)) == [-1.0, -1.0]
    print("with joblib:", copied.tolist())
    assert copied.tolist() == [1.0, 3.0]

    queue, ready, answers = context.Queue(), context.Event(), context.Queue()
    weights = torch.zeros(2)
    reader = context.Process(target=first, args=(queue, ready, answers))
    reader.start()
    queue.put(weights)
    while not weights.is_shared():  # until the queue's thread has pickled it
        pass
    weights.fill_(7)
    ready.set()
    seen = answers.get()
    reader.join()
    print("put zeros into a queue, then filled with 7: the reader gets", seen)
    assert seen == 7


if __name__ == "__main__":
    main()
    print("unchanged: processes of Python's own pools share tensors")
PY
OMP_NUM_THREADS=1 venv/bin/python check.py 2> errors.txt || { cat errors.txt; exit 1; }
