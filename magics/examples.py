"""An example of each sub-command of `%distributed`, shown by its help."""

from __future__ import annotations

from axon_nb.magics.arguments import HelpAsked

__all__ = ["EXAMPLES", "help_text"]

EXAMPLES = {
    "attach": "%distributed attach                  after the kernel was restarted",
    "auto": "%distributed auto on                 and `%distributed auto off`",
    "cancel": "%distributed cancel                  ends a cell that was started with --noblock",
    "config": "%distributed config keep_alive=600   or without a key: shows all settings",
    "debug": "%distributed debug --ranks 2         after a cell has failed on rank 2; `p loss` shows a variable",
    "diff": "%distributed diff model --from 0     where other ranks' model is not as that of rank 0",
    "export": "%distributed export train.py         the cells that ran, as a script for torchrun",
    "repair": "%distributed repair --from 0         a dead rank comes back with what rank 0 has",
    "restart": "%distributed restart                 all ranks anew, as many as before",
    "seed": "%distributed seed 0 --per-rank       seed 0 on rank 0, 1 on rank 1 and so on",
    "stacks": "%distributed stacks --ranks 1        where rank 1 is, also while it is stuck",
    "start": "%distributed start -n 4 --backend gloo",
    "status": "%distributed status                  a row for each rank",
    "stop": "%distributed stop                    ends all ranks; nothing is left behind",
    "sync": "%distributed sync model optimizer    all ranks get those of rank 0",
    "vars": "%distributed vars                    a row for each variable of the ranks",
}


def help_text(asked: HelpAsked, command: str) -> str:
    """The help of a command, with its example."""
    example = f"\n\nexample:\n  {EXAMPLES[command]}" if command in EXAMPLES else ""
    return f"{asked}{example}"
