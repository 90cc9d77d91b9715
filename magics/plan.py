"""`%%plan`: run a cell on ranks that do not exist."""

from __future__ import annotations

from typing import Any

from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.display import display

from axon_nb import plan
from axon_nb.cluster.cells import source as cell_code
from axon_nb.errors import UsageError
from axon_nb.magics.arguments import LineParser, parse

_HIDDEN = ("In", "Out", "exit", "quit", "get_ipython", "open")


def plan_parser() -> LineParser:
    """Create the parser of `%%plan`."""
    parser = LineParser("%%plan", "Run the cell on ranks that do not exist: memory, collectives, time of a step.")
    parser.add_argument("-n", "--ranks", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument("--card", default="h100", help="a GPU's name such as h100 or a100, or cpu (default: h100)")
    parser.add_argument("--memory", type=float, metavar="GIB", help="GiB per rank (default: the card's)")
    parser.add_argument("--item", type=float, metavar="X", help="what .item() answers; without it, that is an error")
    parser.add_argument("--all", action="store_true", help="run every rank, not one of each kind")
    parser.add_argument("--out", metavar="NAME", help="bind the result to this name")
    return parser


@magics_class
class PlanMagics(Magics):
    """Plans of cells."""

    @cell_magic
    def plan(self, line: str, cell: str) -> None:
        """Run the cell on ranks that do not exist: memory by line, collectives, the time of a step, and its timeline.

        %%plan -n N [--card h100] [--memory GIB] [--item X] [--all] [--out NAME]

        -n N          number of ranks
        --card CARD   a GPU's name such as h100 or a100, or cpu; default: h100
        --memory GIB  GiB per rank; default: the card's
        --item X      what `.item()` answers; without it, reading a tensor's value is an error
        --all         run every rank, not one of each kind
        --out NAME    bind the result of `axon_nb.plan.run` to NAME

        The cell runs in another process with the notebook's variables that it names; it changes none of them. What it
        prints is lost.

        Example: `%%plan -n 64 --card h100`, and below it the code that trains.
        """
        options = parse(plan_parser(), line)
        if options is None:
            return
        if cell_code.is_empty(cell):
            raise UsageError("%%plan needs the code that trains, below its line.")
        file = f"In [{self.shell.execution_count}]"
        source = self.shell.transform_cell(cell_code.with_head(cell, f"%%plan {line}"))
        planned = plan.run(
            self._program(source, file, options.card),
            options.ranks,
            device=options.card,
            memory=options.memory,
            item=options.item,
            ranks="all" if options.all else "distinct",
            name=file,
        )
        if options.out:
            self.shell.user_ns[options.out] = planned
        display(planned)
        if planned.has_times:
            from axon_nb.widgets.open import show_planned

            show_planned(planned.spans, planned.title)

    def _program(self, source: str, file: str, card: str) -> Any:
        from axon_nb.plan.program.cell import cell_program

        variables = {name: value for name, value in self.shell.user_ns.items() if name not in _HIDDEN}
        return cell_program(source, file, variables, "cpu" if card == "cpu" else "cuda")
