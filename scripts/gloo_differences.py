"""Write the table of docs/design/shared_memory.md that says what torchrun's Gloo refuses or computes otherwise.

Runs every collective with every dtype and reduction on two ranks, over shared memory and over Gloo. `--check` writes
nothing and fails if the table is out of date; a test does that, because the ranks take seconds.
"""

from __future__ import annotations

import itertools
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._C._distributed_c10d import FileStore

from axon_nb.comm.shared_memory.group import BACKEND, register
from axon_nb.comm.shared_memory.segment.pages import REDUCE_OPERATIONS, unlike_gloo
from axon_nb.torch_api import torch_api
from scripts.generated_page import ROOT, write_or_check

TARGET = ROOT / "docs" / "design" / "shared_memory.md"
BEGIN, END = "<!-- scripts/gloo_differences.py writes this table -->\n", "<!-- end of the table -->\n"
SIZE = 2
TIMEOUT = timedelta(seconds=60)
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)

Tensor = torch.Tensor


def _reductions(rank: int, op: Any, out: Tensor, parts: list[Tensor]) -> dict[str, Callable[[], Any]]:
    def twice() -> Tensor:
        for _ in range(2):
            dist.all_reduce(out, op)
        return out

    def reduce() -> Tensor:
        dist.reduce(out, 0, op)
        return out if rank == 0 else out.new_empty(0)

    return {
        "all_reduce": twice,
        "reduce": reduce,
        "reduce_scatter": lambda: dist.reduce_scatter(out, parts, op) or out,
        "reduce_scatter_tensor": lambda: _single("reduce_scatter", out, torch.cat(parts), op) or out,
    }


def _movements(rank: int, _: Any, own: Tensor, parts: list[Tensor]) -> dict[str, Callable[[], Any]]:
    out, whole, is_root = torch.zeros_like(own), torch.cat(parts), rank == 0

    def message() -> Tensor:
        if is_root:
            dist.send(own, 1)
        else:
            dist.recv(out, 0)
        return out

    return {
        "all_gather": lambda: dist.all_gather(parts, own) or torch.cat(parts),
        "all_gather_into_tensor": lambda: _single("all_gather", whole, own) or whole,
        "all_to_all": lambda: dist.all_to_all(parts, [own, own.clone()]) or torch.cat(parts),
        "all_to_all_single": lambda: dist.all_to_all_single(out, own) or out,
        "broadcast": lambda: dist.broadcast(own, 0) or own,
        "gather": lambda: dist.gather(own, parts if is_root else None) or torch.cat(parts),
        "scatter": lambda: dist.scatter(out, parts if is_root else None) or out,
        "send, recv": message,
    }


def _single(name: str, *args: Any) -> Any:
    return getattr(torch_api(), f"{name}_single")(*args)


def _tensors(rank: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    values = torch.tensor([[1, 3, 2, 0], [1, 2, 5, 1]][rank], dtype=torch.float32)
    return values.to(dtype, copy=True), [values.to(dtype, copy=True), values.flip(0).to(dtype)]


def _outcome(call: Callable[[], Tensor]) -> str:
    try:
        return call().contiguous().view(torch.uint8).numpy().tobytes().hex()
    except Exception as error:
        return "! " + re.sub(r"[^ -~]", " ", str(error).splitlines()[0])


def _run(rank: int, folder: str, backend: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    register()
    store = FileStore(f"{folder}/store-{backend}", SIZE)
    dist.init_process_group(backend, store=store, rank=rank, world_size=SIZE, timeout=TIMEOUT)
    found: dict[tuple[str, str, str], str] = {}
    for dtype, reduction in itertools.product(DTYPES, ("", *REDUCE_OPERATIONS)):
        op = getattr(dist.ReduceOp, reduction, None)
        if reduction == "PREMUL_SUM":
            op = vars(dist)["_make_nccl_premul_sum"](2.0)
        calls = _reductions if reduction else _movements
        for call in calls(rank, op, *_tensors(rank, dtype)):
            # With fresh tensors: what an earlier call has changed is not the same on both.
            outcome = _outcome(calls(rank, op, *_tensors(rank, dtype))[call])
            found[call, reduction, str(dtype).removeprefix("torch.")] = outcome
    torch.save(found, f"{folder}/{backend}-{rank}")
    dist.barrier()
    dist.destroy_process_group()


def differences() -> dict[tuple[str, str, str], str]:
    """Return how Gloo differs, by call, reduction and dtype: its error, or ``other values``.

    Raises:
        AssertionError: `unlike_gloo`, by which ranks say so, knows other differences.
    """
    start: Any = vars(mp)["start_processes"]
    answers: dict[str, list[dict[tuple[str, str, str], str]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for backend in (BACKEND, "gloo"):
            start(_run, (folder, backend), SIZE, start_method="fork")
            answers[backend] = [torch.load(f"{folder}/{backend}-{rank}") for rank in range(SIZE)]
    found: dict[tuple[str, str, str], str] = {}
    refused, other = set[Any](), set[Any]()
    for key in answers["gloo"][0]:
        mine, gloo = ([answer[key] for answer in answers[backend]] for backend in (BACKEND, "gloo"))
        errors = [text[2:] for text in gloo if text.startswith("! ")]
        if mine != gloo and not all(text.startswith("! ") for text in mine):
            found[key] = errors[0] if errors else "other values"
            (refused if errors else other).add(_subject(*key))
    known = {"refuses it": set[Any](), "computes other values": set[Any](), "": set[Any]()}
    for key in answers["gloo"][0]:
        operation, reduction, dtype = subject = _subject(*key)
        if any(not answer[key].startswith("! ") for answer in answers[BACKEND]):
            known[unlike_gloo(operation, dtype) or unlike_gloo(operation, dtype, reduction)].add(subject)
    messages = {subject for subject in known["refuses it"] if subject[0] == "send, recv"}
    assert refused == known["refuses it"] - messages, refused ^ known["refuses it"]
    assert other == known["computes other values"], other ^ known["computes other values"]
    return found


def _subject(call: str, reduction: str, name: str) -> tuple[str, str, torch.dtype]:
    """What a rank tells apart: an operation or a reduction, and the dtype."""
    return "" if reduction else call, reduction, getattr(torch, name)


def render(found: dict[tuple[str, str, str], str] | None = None) -> str:
    """Return the page with a new table."""
    found = differences() if found is None else found
    before, _, rest = TARGET.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + _table(found) + END + rest.partition(END)[2]


def _table(found: dict[tuple[str, str, str], str]) -> str:
    moving = {call for call, reduction, _ in found if not reduction}
    everywhere: dict[str, list[str]] = {}
    for name in dict.fromkeys(dtype for _, _, dtype in found):
        own = {key: what for key, what in found.items() if key[2] == name}
        if len(set(own.values())) == 1 and {call for call, reduction, _ in own if not reduction} == moving:
            everywhere.setdefault(next(iter(own.values())), []).append(name)
    rows: dict[tuple[str, str], dict[str, list[str]]] = {}
    for (call, reduction, dtype), what in found.items():
        if dtype not in itertools.chain.from_iterable(everywhere.values()):
            text = re.sub(r" (Byte|Char|Int|Long)$", "", what)
            text = re.sub(r"^(all_)?reduce does", "it does", text)
            rows.setdefault((reduction, text), {}).setdefault(call, []).append(dtype)
    lines = [f"| every collective | {', '.join(names)} | {_quoted(what)} |" for what, names in everywhere.items()]
    for (reduction, what), calls in rows.items():
        dtypes: dict[tuple[str, ...], list[str]] = {}
        for call, names in calls.items():
            dtypes.setdefault(tuple(names), []).append(f"`{call}`")
        condition = f" with {reduction}" if reduction else ""
        lines += [f"| {', '.join(same)}{condition} | {', '.join(k)} | {_quoted(what)} |" for k, same in dtypes.items()]
    return "| call | dtypes | on Gloo |\n|---|---|---|\n" + "".join(f"{line}\n" for line in lines)


def _quoted(what: str) -> str:
    return what if what == "other values" else f'raises "{what}"'


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the table; return the exit status."""
    return write_or_check(TARGET, render, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
