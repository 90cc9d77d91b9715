"""Makes tqdm and rich draw bars as text on ranks: their widgets have no model in the notebook.

tqdm's notebook bars become its text bars. rich takes the rank's output for a terminal: it moves its bars with control
sequences, which the notebook interprets.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

from axon_nb.compat.import_hooks import after_import


def install_text_bars() -> None:
    """Have bars drawn as text from now on, also in modules that are imported later."""
    after_import("tqdm.notebook", _draw_tqdm_as_text)
    after_import("rich.console", _draw_rich_as_text)


def _draw_tqdm_as_text(module: ModuleType) -> None:
    tqdm: Any = sys.modules["tqdm.std"].tqdm

    class TextBar(tqdm):
        """A text bar with the parameters of `tqdm.notebook.tqdm`."""

        def __init__(self, *args: Any, display: bool = True, **kwargs: Any) -> None:
            del display  # whether to show the widget at once
            super().__init__(*args, **kwargs)

    def trange(*args: Any, **kwargs: Any) -> TextBar:
        return TextBar(range(*args), **kwargs)

    vars(module).update(tqdm=TextBar, tqdm_notebook=TextBar, trange=trange, tnrange=trange)


def _draw_rich_as_text(module: ModuleType) -> None:
    init = module.Console.__init__

    @functools.wraps(init)
    def init_for_terminal(console: Any, **options: Any) -> None:
        options.setdefault("force_jupyter", False)
        if options.get("file") is None and options.get("force_terminal") is None:
            options["force_terminal"] = True
        init(console, **options)

    module.Console.__init__ = init_for_terminal
