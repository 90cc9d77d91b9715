#!/usr/bin/env bash
# Run `scripts/test` and the quickstart with the lowest dependency versions that pyproject.toml allows, and the newest:
#
#     scripts/dependencies.sh                      # both
#     scripts/dependencies.sh lowest               # only the lowest
#     scripts/dependencies.sh newest tests/engine  # only these tests
#
# OLDEST_PYTHON and NEWEST_PYTHON name the interpreters. Environments are created under .versions, and updated if they
# exist.
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:-}" in
    lowest | newest) sets=("$1") && shift ;;
    "") sets=(lowest newest) ;;
    *) echo "usage: scripts/dependencies.sh [lowest|newest [TEST ...]]" >&2 && exit 2 ;;
esac

uv=.versions/uv/bin/uv
if [[ ! -x $uv ]]; then
    python3 -m venv .versions/uv
    .versions/uv/bin/python -m pip install --quiet --disable-pip-version-check uv
fi

failed=()
for set in "${sets[@]}"; do
    case "$set" in
        lowest) python="${OLDEST_PYTHON:-python3.11}" choice=(--upgrade --resolution lowest-direct) ;;
        newest) python="${NEWEST_PYTHON:-python3.13}" choice=(--upgrade) ;;
    esac
    place=".versions/$set"
    echo "== $set, $python"
    [[ -x $place/bin/python ]] || "$uv" venv --quiet --no-python-downloads --python "$python" "$place"
    "$uv" pip install --quiet --python "$place/bin/python" "${choice[@]}" --editable '.[dev]' --editable ./course
    (
        export PATH="$PWD/$place/bin:$PATH" XDG_CACHE_HOME="$PWD/$place/cache"
        status=0
        python -m axon_nb.engine.self_test || status=1
        python scripts/run_notebook.py examples/01_quickstart.py --out "out/$set" || status=1
        VENV="$PWD/$place" scripts/test "$@" || status=1
        exit $status
    ) || failed+=("$set")
done
[[ ${#failed[@]} == 0 ]] || { echo "failed with the ${failed[*]} versions" >&2 && exit 1; }
