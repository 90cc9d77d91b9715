"""What all live views are: widgets that front ends without widgets tell of in one line."""

from __future__ import annotations

import anywidget

__all__ = ["View"]


class View(anywidget.AnyWidget):
    """A widget of one script and one style."""

    def __repr__(self) -> str:
        """Shown where widgets are not, besides the saved picture."""
        return "A live view, for which this front end needs ipywidgets; a picture of it is beside it."
