#!/usr/bin/env bash
# Subject:  a plotly figure that was written as JSON and read again, in Python: the numbers of its traces.
# Versions: plotly 7.1.0 against 5.24.1, numpy 2.4.6, Python 3.11.
# Expected: pio.from_json(figure.to_json()) gives the same figure: figure.data[0].y holds the numbers, as an array or a
#           tuple, so a program can add to it, smooth it or compare it with a newer run.
# Happens:  with arrays of NumPy, y of the figure that was read is a dict of a type and a base64 text. len() of it is 2
#           for every curve; max() of it is the text "dtype"; a copy from another trace draws well, as only the browser
#           decodes. Lists stay lists. go.Figure(figure.to_dict()) does the same. 5.24.1 gave the numbers.
# Source:   plotly/plotly.py#5110 and #5340 (open) are about the JSON text itself, which others cannot read; I found no
#           entry about plotly's own reader. pio.from_json's documentation promises a figure from a JSON string.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat > check.py <<'PY'
import sys

import numpy as np
import plotly
import plotly.graph_objects as go
import plotly.io as pio

curve = np.array([0.9, 0.5, 0.25])
figure = go.Figure([go.Scatter(y=curve), go.Scatter(y=curve.tolist())])
again = pio.from_json(figure.to_json())
rebuilt = go.Figure(figure.to_dict())
of_array, of_list = again.data[0].y, again.data[1].y
print(plotly.__version__, "- of an array:", of_array, "- of a list:", of_list)
assert list(of_list) == [0.9, 0.5, 0.25]
assert list(figure.data[0].y) == [0.9, 0.5, 0.25]
if sys.argv[1] == "old":
    assert list(of_array) == list(rebuilt.data[0].y) == [0.9, 0.5, 0.25]
else:
    assert isinstance(of_array, dict) and set(of_array) == {"dtype", "bdata"}
    assert len(of_array) == 2 and max(of_array) == "dtype"
    assert isinstance(rebuilt.data[0].y, dict)
    assert pio.from_json(again.to_json()).data[0].y == of_array  # nor does a second round bring the numbers
PY
python3 -m venv venv
for pair in "old 5.24.1" "new 7.1.0"; do
    set -- $pair
    venv/bin/pip install --quiet --no-compile --disable-pip-version-check plotly=="$2" numpy==2.4.6
    venv/bin/python check.py "$1"
done
echo "unchanged: a figure that was read back holds text in place of numbers"
