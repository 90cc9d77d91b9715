#!/usr/bin/env bash
# Subject:  two ranks that log scalars into one folder, seen by a TensorBoard that was started before they end.
# Versions: tensorboard 2.21.0, numpy 2.4.6, Python 3.11, Linux.
# Expected: the live view shows what a view that is opened afterwards shows: the points of both files; or it says that
#           one folder is for one writer.
# Happens:  the live view goes over to the newer file for good, and shows no further point of the rank whose file has
#           the older name: that curve stops, and the run looks like one rank's. Opened afterwards, all points are
#           there, of both ranks under one name. A line in the server's log, hidden in a notebook, speaks of a file that
#           was updated.
# Source:   tensorflow/tensorboard#1011 and #1063: one writer for each folder; --reload_multifile=true reads all.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check tensorboard==2.21.0 numpy==2.4.6 "setuptools<81"
cat > check.py <<'PY'
import logging

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

logging.disable(logging.CRITICAL)
writers = [EventFileWriter("runs", filename_suffix=f".rank{rank}") for rank in range(2)]


def points(view) -> list[int]:
    view.Reload()
    return sorted(int(point.value) for point in view.Scalars("loss"))


live, seen = EventAccumulator("runs"), []
for step in range(4):
    for rank, writer in enumerate(writers):
        summary = Summary(value=[Summary.Value(tag="loss", simple_value=100 * rank + step)])
        writer.add_event(Event(step=step, summary=summary))
        writer.flush()
    seen.append(points(live))
    print("after step", step, "the live view has", seen[-1])
for writer in writers:
    writer.close()
late = points(EventAccumulator("runs"))
print("at the end, live:", points(live), "opened afterwards:", late)
assert seen[-1] == points(live) == [0, 100, 101, 102, 103]  # rank 0 stops after its first point
assert late == [0, 1, 2, 3, 100, 101, 102, 103]
print("unchanged: a live view keeps to the newest file of a folder")
PY
venv/bin/python check.py 2> errors.txt || { cat errors.txt; exit 1; }
