"""Solutions, packed so that nobody reads one by scrolling or searching; `scripts/build_course.py` writes them."""

from __future__ import annotations

import base64
import json
import tomllib
import zlib
from datetime import date
from pathlib import Path

from axon_nb.errors import UsageError
from axon_nb.records.environment import CLASS_DIR

FILE = Path(__file__).with_name("answers.json")
"""The packed solutions by exercise."""
_LOCKS = "course.toml"


def pack(text: str) -> str:
    """Return a text compressed, in printable characters."""
    return base64.b85encode(zlib.compress(text.encode(), 9)).decode()


def unpack(exercise_id: str) -> str:
    """Return the cell that solves an exercise."""
    packed: dict[str, str] = json.loads(FILE.read_text(encoding="utf-8"))
    return zlib.decompress(base64.b85decode(packed[exercise_id])).decode()


def locked_until(exercise_id: str, today: date | None = None) -> date | None:
    """Return the date until which a teacher keeps a solution locked; None if it is open.

    `course.toml`, in the class's folder or beside the notebook, has a table ``[locked_until]`` from exercises
    (``"2.2"``), notebooks (``2``) or ``all`` to dates; the closest one counts.

    Raises:
        UsageError: the file cannot be read.
    """
    for folder in (CLASS_DIR.get(), "."):
        path = Path(folder) / _LOCKS
        if folder and path.is_file():
            try:
                dates = tomllib.loads(path.read_text(encoding="utf-8")).get("locked_until", {})
            except (OSError, ValueError) as error:
                raise UsageError(f"{path} cannot be read: {error}.") from None
            names = (exercise_id, exercise_id.partition(".")[0], "all")
            until = next((dates[name] for name in names if name in dates), None)
            return until if isinstance(until, date) and (today or date.today()) < until else None
    return None
