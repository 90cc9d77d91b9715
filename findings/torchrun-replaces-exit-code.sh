#!/usr/bin/env bash
# Subject:  the exit code of torchrun when a worker ends with a code of its own.
# Versions: torch 2.13.0, numpy 2.4.6, Python 3.11, Linux, CPU, 2 processes.
# Expected: torchrun ends with the code of the worker that failed first, which its report calls the root cause, as
#           mpirun, srun and Python's runpy hand a code on: schedulers map codes to "queue again" or "give up".
# Happens:  torchrun ends with 1, whatever the worker said. The code stands only in the text of the report. `torchrun
#           --no-python` is the same. A job that asks to be queued again with exit code 75 is not.
# Source:   the documentation of torchrun says that a failure of a worker makes it fail, without a code. I found no
#           entry.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > worker.py <<'PY'
import os
import sys

sys.exit(int(sys.argv[1]) if os.environ["RANK"] == "1" else 0)
PY
cat > worker.sh <<'SH'
#!/usr/bin/env bash
[ "$RANK" = 1 ] && exit "$1"
exit 0
SH
chmod +x worker.sh
export OMP_NUM_THREADS=1
check() {
    local code=0 name=$1 worker=$2
    shift 2
    venv/bin/torchrun --standalone --nproc-per-node=2 "$@" > output.txt 2> report.txt || code=$?
    echo "$name: the worker ends with $worker, torchrun with $code; its report says: $(grep -m1 -o 'exitcode  *: [0-9-]*' report.txt || true)"
    [ "$worker" = 0 ] || grep -q "exitcode *: $worker " report.txt
    [ "$code" = "$([ "$worker" = 0 ] && echo 0 || echo 1)" ]
}
direct=0
RANK=1 venv/bin/python worker.py 75 || direct=$?
[ "$direct" = 75 ]
check "a script" 0 worker.py 0
check "a script" 75 worker.py 75
check "a program" 75 --no-python ./worker.sh 75
echo "unchanged: each failure becomes 1"
