"""`axon-nb course`: copies the notebooks of the course into a folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from axon_nb.errors import UsageError

__all__ = ["copy_course"]


def copy_course(folder: Path) -> str:
    """Copy the student edition into a folder, which is created; files that are there are kept.

    Returns:
        What was done, and how to start.

    Raises:
        UsageError: the folder cannot be written.
    """
    package = Path(__file__).parent
    shipped = package / "student"
    source = shipped if shipped.is_dir() else package.parents[1] / "course" / "student"
    notebooks, changed = [], []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for original in sorted(source.glob("*.ipynb")):
            copied = folder / original.name
            if not copied.exists():
                shutil.copyfile(original, copied)
            elif copied.read_bytes() != original.read_bytes():
                changed.append(copied)
            notebooks.append(copied)
    except OSError as error:
        raise UsageError(f"axon-nb course: cannot write to {folder} ({error.strerror}); name another folder.") from None
    kept = f"Changed, and kept as they are: {', '.join(path.name for path in changed)}.\n" if changed else ""
    return f"{kept}{len(notebooks)} notebooks are in {folder}. Start with `jupyter lab {notebooks[0]}`."
