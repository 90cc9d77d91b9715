"""Find tensors that are created without a device although they belong on the rank's, in the examples and the library.

On a rank with a GPU they would lie on the CPU, beside a model on the GPU. Each call must say `device=`, be it
`device="cpu"`, or be followed by `.to(…)` in the same expression. Autocast and gradient scalers must not name a kind of
device as text, either. Prints each place; returns 1 if there are any.

    python -m scripts.devices
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FACTORIES = frozenset({
    "arange", "empty", "eye", "frombuffer", "full", "linspace", "ones", "rand", "randint", "randn", "randperm",
    "tensor", "zeros",
})  # fmt: skip
"""Functions of torch that make a tensor on the CPU by default."""
ON_HOST = frozenset({"frombuffer"})
"""Those that always create it there, and accept no device."""
NAMED = frozenset({"GradScaler", "autocast"})
"""Functions that take the kind of device as their first argument."""
FOLDERS = ("examples", "axon_nb/comm", "axon_nb/engine", "axon_nb/parallel")
ON_CPUS = ("axon_nb/comm/shared_memory", "axon_nb/engine/self_test", "examples/02_collectives")
"""Files whose tensors are on CPUs by their nature; the example's ranks are mock ranks in the notebook's process."""


def files() -> list[Path]:
    """Return the files that are searched."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return sorted(path for path in found if not path.relative_to(ROOT).as_posix().startswith(ON_CPUS))


def places(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and fix of each call in `source` that leaves its device open."""
    tree = ast.parse(source)
    moved = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "to"
        for inner in ast.walk(node.func.value)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name = node.func.attr
        of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        has_device = any(keyword.arg in ("device", None) for keyword in node.keywords)
        if of_torch and name in FACTORIES - ON_HOST and not has_device and id(node) not in moved:
            yield node.lineno, f'torch.{name} without a device: pass `device=device`, or `device="cpu"` if intended'
        elif name in NAMED and node.args and isinstance(node.args[0], ast.Constant):
            yield node.lineno, f"{name} for one kind of device: pass `device.type`"


def main() -> int:
    """Print each place; return 1 if there are any."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in files()
        for line, text in places(path.read_text(encoding="utf-8"))
    ]
    print("\n".join(found), end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
