"""The parts of a report on GPUs, in the order in which they matter when a machine is lent for minutes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

DONE = "AXON_NB_GPU_BOX_DONE"
"""Environment variable of an item: the tests that have a result, as a JSON list."""

_KILLED_WITH_ONE_CARD = "a kernel that takes half a minute"
_CONNECT = "a peer does not connect"
_OTHER_HANGS = ("a peer skips a collective", "a receive without a send", "a peer is killed")
_DOCTOR = """
import json
from axon_nb.doctor.examine import examine
for section in json.loads(examine().json())["sections"].values():
    for finding in section["findings"]:
        if finding["label"] not in ("Python", "axon_nb"):
            print(json.dumps({finding["label"]: f"{finding['value']} {finding['message']}".strip()}))
"""


@dataclass(frozen=True, slots=True)
class Item:
    """One process of a part."""

    name: str
    arguments: tuple[str, ...]
    """Of Python. Each line that it prints and that is a JSON object is a result: of a test if it has ``test``, else
    figures."""
    limit_s: float
    gpus: int = 1
    """Number of GPUs without which it does not run."""
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Part:
    """Items about one subject."""

    name: str
    items: Sequence[Item]


def _tests(file: str, limit_s: float, *, gpus: int = 1, **env: str) -> Item:
    pytest = (
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.gpu.json_lines",
        "-p",
        "no:cacheprovider",
        f"--timeout={limit_s / 2:g}",
    )
    return Item(file, (*pytest, f"tests/gpu/{file}.py"), limit_s, gpus, env)


def _drill(kind: str, way: str, *, gpus: int = 1, **env: str) -> Item:
    return Item(f"{kind}: {way}", ("-m", "tests.gpu.drill", "--kind", kind, "--way", way), 60.0, gpus, env)


def _figures(name: str, *arguments: str, limit_s: float = 60.0) -> Item:
    return Item(name, ("-m", "benchmarks.gpu", "--only", name, *arguments), limit_s, gpus=0)


_BLOCKING = {"TORCH_NCCL_USE_COMM_NONBLOCKING": "0"}
_SECOND_CLASS = {"TORCH_DIST_USE_NCCL2": "1"}
"""Ranks use torch's own default from 2.15 on; without that class, the tests are skipped."""
_RECOVERY = ("test_nccl_recovery", "test_cuda", "test_nccl_world", "test_offload")

PARTS: tuple[Part, ...] = (
    Part("doctor", [Item("doctor", ("-c", _DOCTOR), 60.0, gpus=0)]),
    Part("smoke", [_tests("test_smoke", 180.0, gpus=0)]),
    Part("tests", [_tests(file, 120.0) for file in _RECOVERY]),
    Part(
        "drills",
        [
            _drill(_CONNECT, "abort"),
            _drill(_KILLED_WITH_ONE_CARD, "abort"),
            *(_drill(kind, "abort", gpus=2) for kind in _OTHER_HANGS),
        ],
    ),
    Part("figures", [_figures(name) for name in ("fence", "torchrun", "transfer", "recovery", "collectives")]),
    Part("plans", [_tests("test_plan_memory", 240.0), _figures("calibrate", limit_s=120.0)]),
    Part("tests, blocking connections", [_tests(file, 120.0, **_BLOCKING) for file in _RECOVERY[:2]]),
    Part("tests, torch's second NCCL class", [_tests(file, 120.0, **_SECOND_CLASS) for file in _RECOVERY[:2]]),
    Part(
        "drills, torch's second NCCL class",
        [
            *(_drill(kind, "abort", **_SECOND_CLASS) for kind in (_CONNECT, _KILLED_WITH_ONE_CARD)),
            *(_drill(kind, "abort", gpus=2, **_SECOND_CLASS) for kind in _OTHER_HANGS),
        ],
    ),
    Part(
        "other drills",
        [_drill(kind, way, gpus=1) for kind in (_CONNECT, _KILLED_WITH_ONE_CARD) for way in ("destroy", "timeout")]
        + [_drill(kind, way, gpus=2) for kind in _OTHER_HANGS for way in ("destroy", "timeout")],
    ),
)
