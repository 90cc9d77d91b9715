"""What all live views are: widgets of one script and one style, described in one line where widgets are not shown."""

from __future__ import annotations

import anywidget

__all__ = ["View"]


class View(anywidget.AnyWidget):
    """Subclasses name their script and style: `_esm = script(...)`, `_css = style(...)`."""

    def __repr__(self) -> str:
        """Shown where widgets are not, besides the saved picture."""
        return "A live view, for which this front end needs ipywidgets; a picture of it is beside it."
