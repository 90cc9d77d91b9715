#!/usr/bin/env bash
# Subject:  the exit code of MPICH's mpiexec (Hydra, also the base of Intel MPI's) when its processes fail.
# Versions: mpich 5.0.2 (the wheel), Linux.
# Expected: the code of the process that failed first, or the greatest one, or a fixed number: so that a batch script
#           can tell "out of memory" (say 1) from "asks to be queued again" (say 2).
# Happens:  the codes are combined bit by bit: processes that end with 1 and 2 make 3, and 3 and 5 make 7: a code that
#           no process had, which may well have a meaning of its own. Equal codes stay as they are. The other processes
#           are not ended either when one fails before MPI was initialized: mpiexec waits until all are done.
# Source:   pmodels/mpich#586 (closed) asks to print each code "instead of just OR'ing them"; ls1mardyn/ls1-mardyn#249
#           works around it in a CI. The manual page of mpiexec does not speak of exit codes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check mpich==5.0.2
cat > worker.sh <<'SH'
#!/usr/bin/env bash
# Ends with the code whose place in the arguments is the rank, after half a second for each rank.
sleep "0.$((PMI_RANK * 5))"
echo "rank $PMI_RANK done" >> "$FOLDER/done.txt"
shift "$PMI_RANK"
exit "$1"
SH
export FOLDER="$folder"
expect() {
    local expected=$1 code=0
    shift
    : > done.txt
    venv/bin/mpiexec -n "$#" bash worker.sh "$@" > output.txt 2>&1 || code=$?
    echo "processes ended with $*: mpiexec ends with $code; $(wc -l < done.txt) of $# came to their end"
    [ "$code" = "$expected" ] || { cat output.txt; echo "expected $expected"; exit 1; }
    [ "$(wc -l < done.txt)" = "$#" ]
}
expect 0 0 0
expect 2 0 2
expect 2 2 2
expect 3 1 2
expect 7 3 5
echo "unchanged: exit codes are combined bit by bit"
