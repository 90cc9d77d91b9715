"""An example of each magic and of each sub-command of `%distributed`, shown by its help."""

from __future__ import annotations

__all__ = ["EXAMPLES", "example_of"]

EXAMPLES = {
    "%%distributed": "%%distributed --ranks 0-1 --time    and below it: dist.all_reduce(torch.ones(8))",
    "%%rank": "%%rank 0                             and below it: print(model)",
    "%gather": "%gather predictions --as everyone    what %scatter dealt out comes together again",
    "%memory": "%memory model optimizer              or without names: all that the ranks' variables hold",
    "%pull": "%pull losses --ranks 0               binds what rank 0 has; of all ranks a dict without --ranks",
    "%push": "%push images labels                  all ranks get those of the notebook",
    "%scatter": "%scatter images labels               each rank gets its part",
    "%shards": "%shards model optimizer --gradients",
    "%timeline": "%timeline --save trace.json          for Perfetto; or %timeline alone: a live view",
    "%watch": "%watch                               before the cell that trains",
    "attach": "%distributed attach                  after the kernel was restarted",
    "auto": "%distributed auto on                 and `%distributed auto off`",
    "cancel": "%distributed cancel                  ends a cell that was started with --noblock",
    "config": "%distributed config keep_alive=10min  or without key=value: shows all settings",
    "debug": "%distributed debug --ranks 2         after a cell has failed on rank 2; `p loss` shows a variable",
    "diff": "%distributed diff model --from 0     where other ranks' model is not as that of rank 0",
    "doctor": "%distributed doctor               what to send along with an issue",
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


def example_of(prog: str) -> str:
    """What help shows of a magic, or of a command such as ``%distributed start``; empty: nothing."""
    example = EXAMPLES.get(prog.removeprefix("%distributed "))
    return f"\n\nexample:\n  {example}" if example else ""
