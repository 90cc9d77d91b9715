"""What all live views are: widgets of one script and one style, told of in one line where widgets are not shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anywidget

from axon_nb.widgets.assets import STATIC, script, style

__all__ = ["STATIC", "View"]


class View(anywidget.AnyWidget):
    """Subclasses name their script and style as files; what these share with others is put in here."""

    def __init_subclass__(cls, **options: Any) -> None:
        for name, load in (("_esm", script), ("_css", style)):
            if isinstance(path := vars(cls).get(name), Path):
                setattr(cls, name, load(path.stem))
        super().__init_subclass__(**options)

    def __repr__(self) -> str:
        """Shown where widgets are not, besides the saved picture."""
        return "A live view, for which this front end needs ipywidgets; a picture of it is beside it."
