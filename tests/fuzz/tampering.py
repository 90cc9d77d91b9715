"""What a cell may do to its own process before it fails: replaced libraries, odd exceptions, limits, skipped calls."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Mapping

from tests.fuzz.fault import STOPPED, Fault

_KEEP = "t_kept = dict(vars({0}))"
_RESTORE = "vars({0}).update(t_kept)"
_REPLACED = {
    "a closed stdout": ("with open(os.devnull, 'w') as file: sys.stdout = file", ""),
    "no streams": ("sys.stdout = sys.stderr = None", ""),
    "a stderr that cannot be flushed": (
        "class Stream:\n    def write(self, text): pass\nt_kept, sys.stderr = sys.stderr, Stream()",
        "sys.stderr = t_kept",
    ),
    "functions of json": (f"{_KEEP.format('json')}\njson.dumps = json.loads = None", _RESTORE.format("json")),
    "functions of pickle": (f"{_KEEP.format('pickle')}\npickle.dumps = pickle.loads = None", _RESTORE.format("pickle")),
    "print and open": (
        f"{_KEEP.format('builtins')}\nbuiltins.print = builtins.open = None",
        _RESTORE.format("builtins"),
    ),
    "removed builtins": ("for name in ('len', 'isinstance', 'getattr', 'print'): delattr(builtins, name)", ""),
    "the default device": ("torch.set_default_device('meta')", "torch.set_default_device(None)"),
    "the default dtype": ("torch.set_default_dtype(torch.float64)", "torch.set_default_dtype(torch.float32)"),
    "no gradients": ("torch.set_grad_enabled(False)", "torch.set_grad_enabled(True)"),
    "warnings that raise": ("warnings.simplefilter('error')", "warnings.resetwarnings()"),
    "no environment": ("t_kept = dict(os.environ)\nos.environ.clear()", "os.environ.update(t_kept)"),
    "no working directory": (
        "t_kept = os.getcwd()\nos.chdir(folder := tempfile.mkdtemp())\nos.rmdir(folder)",
        "os.chdir(t_kept)",
    ),
    "files that nobody may read": ("t_kept = os.umask(0o777)", "os.umask(t_kept)"),
    "no garbage collection": ("gc.disable()", "gc.enable()"),
    "a trace function": ("sys.settrace(lambda *_: None)", "sys.settrace(None)"),
}
"""What one rank does, and what undoes it; empty: axon_nb or nothing has to."""
_HANDLERS = ("signal.SIG_DFL", "signal.SIG_IGN", "lambda *_: None", "lambda *_: 1 / 0")

_EXCEPTIONS = {
    "its text raises": "class Odd(Exception):\n    def __str__(self): raise RuntimeError('no text')\nraise Odd",
    "its text is a number": "class Odd(Exception):\n    def __str__(self): return 5\nraise Odd",
    "its text takes a second": (
        "class Odd(Exception):\n    def __str__(self):\n        time.sleep(1)\n        return 'slow'\nraise Odd"
    ),
    "it has no name": (
        "class Kind(type):\n    @property\n    def __name__(cls): raise RuntimeError('no name')\n"
        "class Odd(Exception, metaclass=Kind): pass\nraise Odd"
    ),
    "it has no module": "Odd = type('Odd', (Exception,), {'__module__': None})\nraise Odd",
    "10 MB of text": "raise ValueError('x' * 10_000_000)",
    "a surrogate": "raise ValueError('\\ud800')",
    "control characters": "raise ValueError('\\0\\x1b[2J\\r\\x07')",
    "an argument that cannot be pickled": "raise ValueError(threading.Lock())",
    "a group": "raise ExceptionGroup('several', [ValueError('one'), TypeError('two')])",
    "a cycle of causes": "a, b = ValueError('a'), ValueError('b')\na.__cause__, b.__cause__ = b, a\nraise a",
    "a deep recursion": "def down(n): return down(n + 1)\ndown(0)",
    "code without a file": "exec(compile('1 / 0', 'nowhere.py', 'exec'))",
    "StopIteration": "next(iter(()))",
    "CancelledError": "raise asyncio.CancelledError",
    "a BaseException": "class Odd(BaseException): pass\nraise Odd('base')",
    "an alarm's handler": (
        "signal.signal(signal.SIGALRM, lambda *_: 1 / 0)\nsignal.setitimer(signal.ITIMER_REAL, 0.2)\n"
        "while True: time.sleep(0.001)"
    ),
}

_LIMITS = {
    "threads": (
        "t_kept = threading.stack_size(2**45)",  # 32 TiB: refused, as each new thread is at a limit of processes
        "threading.stack_size(t_kept)",
    ),
    "files": (
        (
            "t_kept = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
            "resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) + 2, t_kept[1]))"
        ),
        "resource.setrlimit(resource.RLIMIT_NOFILE, t_kept)",
    ),
    "locked memory": (
        (
            "t_kept = resource.getrlimit(resource.RLIMIT_MEMLOCK)\n"
            "resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, t_kept[1]))"
        ),
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, t_kept)",
    ),
}

_SKIPPED = {
    "an asynchronous call that nobody waits for": (
        "if rank == ODD: dist.all_reduce(torch.ones(1), async_op=True)\ndist.barrier()",
        "barrier at line",
    ),
    "monitored_barrier on one rank": ("if rank == ODD: dist.monitored_barrier()", "monitored_barrier at line"),
    "recv from anyone": ("if rank == ODD: dist.recv(torch.ones(1))", "for a message from any"),
    "splits": (
        (
            "splits = [1, 1, 1, 2] if rank == ODD else [1] * 4\n"
            "dist.all_to_all_single(torch.ones(4), torch.ones(sum(splits)), [1] * 4, splits)"
        ),
        "bytes",
    ),
    "reductions": (
        "dist.all_reduce(torch.ones(9), op=dist.ReduceOp.MAX if rank == ODD else dist.ReduceOp.SUM)",
        "(?s)MAX.*SUM|SUM.*MAX",
    ),
    "a step of DDP": (
        "if rank != ODD: models['ddp'](torch.ones(BATCH, WIDTH)).sum().backward()",
        "backward pass of a DDP model",
    ),
    "a subgroup's call": ("if rank == 0: dist.all_reduce(torch.ones(9), group=pair)", "for rank 1"),
    "an object": ("if rank != ODD: dist.all_gather_object([None] * 4, rank)", "for rank ODD"),
}

_IMPORTS = (
    "import asyncio, builtins, gc, json, os, pickle, resource, signal, sys, tempfile, threading, time, warnings\n"
)


def _on_one(rank: int, code: str) -> str:
    return f"if rank == {rank}:\n{textwrap.indent(code or 'pass', '    ')}\n"


def replaced(rng: random.Random, message: str) -> Fault:
    """One rank replaces what axon_nb shares with it, then one fails or the user interrupts."""
    if rng.random() < 0.2:
        handler, odd = rng.choice(_HANDLERS), rng.randrange(4)
        code = _IMPORTS + _on_one(odd, f"signal.signal(signal.SIGINT, {handler})") + "while True: time.sleep(0.1)"
        moments = (rng.uniform(0.1, 0.8),)
        says = "KeyboardInterrupt|ZeroDivisionError"
        ends = ("CellError", *STOPPED)
        return Fault("replaced", f"handler {handler}", code, ends, says, moments)
    return _tampered("replaced", rng, message, _REPLACED)


def odd_exception(rng: random.Random, message: str) -> Fault:
    """An exception that is hard to show ends one rank's cell, as the others wait for it."""
    what, odd = rng.choice(list(_EXCEPTIONS)), rng.randrange(4)
    code = f"{_IMPORTS}{_on_one(odd, _EXCEPTIONS[what])}dist.barrier()"
    return Fault("odd exception", what, code, ("CellError",), rf"^\[rank {odd}\]")


def limit(rng: random.Random, message: str) -> Fault:
    """One rank reaches a limit of its process, as a rank fails."""
    return _tampered("limit", rng, message, _LIMITS)


def _tampered(kind: str, rng: random.Random, message: str, ways: Mapping[str, tuple[str, str]]) -> Fault:
    what, odd, fails = rng.choice(list(ways)), rng.randrange(4), rng.randrange(4)
    code, undo = ways[what]
    code = f"{_IMPORTS}{_on_one(odd, code)}if rank == {fails}: raise ValueError({message!r})\ndist.barrier()"
    says = rf"(?s)^\[rank {fails}\].*ValueError: {message}"
    undo = _IMPORTS + _on_one(odd, undo) if undo else ""
    return Fault(kind, f"{what} on rank {odd}", code, ("CellError",), says, undo=undo)


def skipped_call(rng: random.Random, message: str) -> Fault:
    """Some ranks skip a call, or make another one."""
    what, odd = rng.choice(list(_SKIPPED)), rng.randrange(4)
    code, says = (text.replace("ODD", str(odd)) for text in _SKIPPED[what])
    return Fault("skipped call", what, code, ("CellError",), says)
