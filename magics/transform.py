"""`%%distributed` on a cell's first line becomes an awaited call: widgets stay clickable while the cell runs."""

from __future__ import annotations

from IPython.core.getipython import get_ipython

__all__ = ["awaited_cells"]

_MAGICS = ("distributed", "rank")


def awaited_cells(lines: list[str]) -> list[str]:
    """An input transformer: a cell that begins with one of our magics becomes one awaited call; others stay."""
    if not lines or not lines[0].startswith("%%"):
        return lines
    name, _, arguments = lines[0][2:].strip().partition(" ")
    shell = get_ipython()
    if name not in _MAGICS or shell is None or not shell.autoawait or arguments.strip() in ("?", "??"):
        return lines
    body = "".join(lines[1:])
    call = f"get_ipython().magics_manager.registry['CellMagics'].run({name!r}, {arguments.strip()!r}, {body!r})"
    return [f"await {call}\n"]
