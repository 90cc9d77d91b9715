"""The commands on a cluster that notebooks, `axon-nb` and agents share, each as one entry; and their errors.

`%distributed NAME` with its help and completion, `axon-nb NAME [--json]`, the request to a notebook's endpoint and the
tool of `axon-nb mcp` follow from the entry. What a command does is the function of that name in `cluster/commands.py`:
it takes the cluster and the options, and returns plain JSON values; `text` is what people read.

A request is one JSON object on a line, such as ``{"do": "status", "with": {}}``; the reply is ``{"ok": …}`` or
``{"error": {"code": …, "message": …}}``.
"""

from __future__ import annotations

import argparse
import enum
import inspect
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from axon_nb.errors import AxonError

REQUIRED: Any = object()
"""The default of an option that must be given."""


class Option(Struct, frozen=True):
    """An option of a command; the function has a parameter of that name."""

    name: str
    help: str
    default: Any = None
    type: type = str
    flag: str = ""
    """Such as ``--from``; empty: it stands without one."""
    metavar: str = ""
    many: bool = False

    @property
    def annotation(self) -> Any:
        """Its type, as a program that calls the tool sees it."""
        if self.many:
            return list[str]
        return self.type | None if self.default is None else self.type

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Let a command line accept it."""
        options: dict[str, Any] = {
            "metavar": self.metavar or None,
            "type": integer if self.type is int else self.type,
            "help": self.help,
        }
        is_needed = self.default is REQUIRED
        if not is_needed:
            options["default"] = self.default
        if self.flag:
            options |= {"dest": self.name, "required": is_needed}
        elif self.many or not is_needed:
            options["nargs"] = "*" if self.many else "?"
        parser.add_argument(self.flag or self.name, **options)


def integer(text: str) -> int:
    """Read a whole number for argparse."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer; got {text!r}") from None


RANKS = Option("ranks", "which ranks: 0 or 0,2-3 (default: all)", flag="--ranks", metavar="RANKS")


class ClusterCommand(Struct, frozen=True):
    """What all programs need to know of a command."""

    summary: str
    """Such as ``show where each rank is``."""
    example: str
    """Its arguments in an example, and behind two spaces what they do."""
    options: tuple[Option, ...] = ()
    changes: bool = False
    """Whether it can change something on the ranks, and so is refused unless the notebook has set ``share=on``."""
    needs_idle: bool = False
    """Whether it is refused while a cell runs."""
    in_notebook: bool = True
    """Whether there is a `%distributed NAME`."""
    tool: str = ""
    """What a model reads of it."""
    timeout_s: float = 60.0
    """How long a program waits for the reply, in seconds."""

    @property
    def defaults(self) -> dict[str, Any]:
        """The options that may be left out."""
        return {option.name: option.default for option in self.options if option.default is not REQUIRED}

    @property
    def parameters(self) -> list[inspect.Parameter]:
        """The options as parameters of a function."""
        empty, kind = inspect.Parameter.empty, inspect.Parameter.KEYWORD_ONLY
        return [
            inspect.Parameter(one.name, kind, default=self.defaults.get(one.name, empty), annotation=one.annotation)
            for one in self.options
        ]


COMMANDS: Mapping[str, ClusterCommand] = {
    "status": ClusterCommand(
        "show what each rank is doing",
        "  one row per rank",
        tool="Show what each rank is doing, its memory, which ranks are busy, and the result of the last cell.",
    ),
    "stacks": ClusterCommand(
        "show where each rank is",
        "--ranks 1  shows where rank 1 is, even while it is stuck",
        (RANKS,),
        tool='Show the Python stack of each rank; ranks at the same place share an entry. ranks: such as "0,2-3".',
    ),
    "explain": ClusterCommand(
        "say which rank the others wait for, and why",
        "  while a cell hangs: which rank the others wait for",
        tool="Say why a cell hangs: which rank the others wait for and where, or the deadlock. Use it first.",
    ),
    "vars": ClusterCommand(
        "show the variables of all ranks and which differ",
        "  one row per variable of the ranks",
        tool="List the variables on the ranks: type, shape, bytes, whether ranks agree. Names and types while busy.",
    ),
    "diff": ClusterCommand(
        "show where a variable differs between ranks",
        "model --from 0  shows where other ranks' model differs from that of rank 0",
        (
            Option("name", "a variable", REQUIRED, metavar="NAME"),
            Option("from_rank", "the rank to compare with (default: 0)", 0, int, "--from", "R"),
        ),
        needs_idle=True,
        tool="Show where a variable (tensor, model, array, table) differs from that of from_rank: values and shapes.",
    ),
    "rename": ClusterCommand(
        "give the cluster another name",
        "digits  `%distributed attach digits` finds it from then on",
        (Option("new_name", "its name from now on", REQUIRED, metavar="NEW"),),
        changes=True,
        tool="Give the cluster another name, for its user and for `cluster` in these tools.",
    ),
    "interrupt": ClusterCommand(
        "interrupt the running cell, as the stop button does",
        "",
        in_notebook=False,
        tool="Interrupt whatever cell runs, as the notebook's stop button does.",
    ),
    "repair": ClusterCommand(
        "replace dead ranks; all others keep their state",
        "--from 0  replaces a dead rank, with the variables of rank 0",
        (
            Option("ranks", "which ranks (default: those that are dead)", flag="--ranks", metavar="RANKS"),
            Option("from_rank", "copy R's variables", None, int, "--from", "R"),
            Option("host", "where (default: where they were)", flag="--on", metavar="HOST"),
            Option("names", "which variables (default: all that can be copied)", (), many=True),
        ),
        changes=True,
        needs_idle=True,
        tool="Replace the ranks that died; the others keep their variables. from_rank: a rank whose variables the new "
        "ones get, as replicas have them (DDP); else they start empty.",
        timeout_s=600.0,
    ),
}
"""By name."""


PLAN = ClusterCommand(
    "rank the layouts of a model on GPUs that you need not have",
    "7B --ranks 64 --card h100 --json",
    (
        Option("model", "the size of a GPT such as 7B, or a Hugging Face model", REQUIRED, metavar="MODEL"),
        Option("ranks", "number of GPUs", REQUIRED, int, "--ranks", "N"),
        Option("card", "a GPU's name (default: h100)", "h100", flag="--card"),
        Option("memory_gib", "GiB per GPU (default: the card's)", None, float, "--memory", "GIB"),
        Option("context", "tokens in a sample (default: 2048)", 2048, int, "--context", "N"),
        Option("global_batch", "samples per step (default: 2 per GPU)", None, int, "--batch", "N"),
        Option("max_ep", "most ranks that share the experts (default: all that can)", None, int, "--max-ep", "N"),
        Option(
            "max_cp", "most ranks that share a sequence (default: as many as leave each 4,096 tokens)", None, int,
            "--max-cp", "N",
        ),
        Option("optimizer", "such as Muon or SGD (default: AdamW)", "AdamW", flag="--optimizer", metavar="NAME"),
        Option("top", "how many layouts (default: 5)", 5, int, "--top", "N"),
    ),
    tool="Rank the training layouts (data, expert, context, tensor, pipeline parallel) of a model.\n\n"
    'model: the size of a GPT such as "7B" or "13B", or a Hugging Face model. card: "h100", "a100" and so on.\n'
    "max_ep, max_cp: most ranks that share the experts, and a sequence (default: all that can; 4,096 tokens each).\n"
    'optimizer: its name in torch.optim, or "Muon".\n'
    "It takes half a minute of processor time.",
)  # fmt: skip
"""What needs no cluster."""


class ErrorCode(enum.StrEnum):
    """Why a request was not answered."""

    FAILED = "failed"
    """It was tried and failed, such as a cell that raised an exception."""
    BAD_REQUEST = "bad_request"
    """There is no such command, or its arguments are invalid."""
    NO_CLUSTER = "no_cluster"
    """There is no such cluster, or no notebook uses it."""
    REFUSED = "refused"
    """The notebook has not allowed it."""
    BUSY = "busy"
    """A cell is running; try again when it is done."""
    NO_REPLY = "no_reply"
    """The notebook did not reply in time."""

    @property
    def exit_status(self) -> int:
        """Exit status of `axon-nb` with this error."""
        return list(ErrorCode).index(self) + 1


class EndpointError(AxonError):
    """A request that was not answered.

    Args:
        code: Why.
        message: The same as a sentence, with the fix.
    """

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code

    def to_json(self) -> dict[str, Any]:
        """Return the error as programs read it."""
        return {"error": {"code": str(self.code), "message": str(self)}}
