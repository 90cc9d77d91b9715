"""Write `course/axon_course/exercises/layouts.csv`: the layouts that notebook 10 of the course asks for.

python -m scripts.course_layouts            # a minute
"""

from __future__ import annotations

import pandas as pd

from axon_course.exercises.layouts import CASES, LAYOUTS


def layouts() -> pd.DataFrame:
    """Search the layouts of each exercise."""
    tables = [case.search().assign(exercise=exercise) for exercise, case in CASES.items()]
    found = pd.concat(tables, ignore_index=True).drop(columns="simulated")
    found = found[found.memory_gib.notna()]
    return found.round({"step_ms": 1, "memory_gib": 1})


def main() -> None:
    """Write the table."""
    layouts().to_csv(LAYOUTS, index=False)


if __name__ == "__main__":
    main()
