"""The table of what AxonML offers is whole and true: every name is in it, all of ours is there, and so is each test."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from collections import Counter
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from scripts import parity_table

ROOT = Path(__file__).resolve().parents[2]


def resolve(path: str) -> Any:
    """What a dotted path names: a module, or an attribute of one, as far down as it goes."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            found = _attribute(found, name)
        return found
    raise AssertionError(f"{path}: there is no such module")


def _attribute(owner: Any, name: str) -> Any:
    declared = inspect.isclass(owner) and any(name in vars(base).get("__annotations__", {}) for base in owner.__mro__)
    if declared and not hasattr(owner, name):
        return None  # an attribute of every object, such as a model's `module`
    return getattr(owner, name)


def parameters(target: Any) -> set[str]:
    """Names of the arguments that a function or a class takes."""
    return set(inspect.signature(target.__init__ if inspect.isclass(target) else target).parameters)


@cache
def named_tests(file: str) -> set[str]:
    """The tests of a file, from its text alone."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_name_is_in_the_table_once() -> None:
    known = [name for topic in parity_table.read_list()["topic"] for name in topic["names"]]
    reported = [row["theirs"] for row in parity_table.read_names()]
    assert Counter(known) == Counter(reported)
    assert max(Counter(known).values()) == 1


def test_every_example_is_in_the_table_once() -> None:
    documents = parity_table.read_list()["document"]
    known = [(document["title"], example) for document in documents for example in document["examples"]]
    reported = [(row["document"], row["example"]) for row in parity_table.read_examples()]
    assert Counter(known) == Counter(reported)
    assert max(Counter(known).values()) == 1


def test_all_our_names_are_in_the_table() -> None:
    wrong = []
    for row in parity_table.read_names():
        assert row["ours"], f"{row['theirs']} is nothing here"
        for word in row["ours"].split():
            path, _, keywords = word.partition("(")
            try:
                target = resolve(path)
            except (AssertionError, AttributeError) as error:
                wrong.append(f"{row['theirs']}: {word}: {error}")
                continue
            wanted = {keyword.removesuffix("=") for keyword in keywords.removesuffix(")").split(",") if keyword}
            if wanted and (missing := wanted - parameters(target)):
                wrong.append(f"{row['theirs']}: {path} takes no {', '.join(sorted(missing))}")
    assert not wrong, "\n".join(wrong)


def test_named_tests_exist_in_the_suite() -> None:
    wrong = []
    for row in [*parity_table.read_names(), *parity_table.read_examples()]:
        assert row["proof"], f"{row} has no test"
        for node in row["proof"].split():
            file, _, test = node.partition("::")
            if not (ROOT / file).exists() or test not in named_tests(file):
                wrong.append(node)
    assert not wrong, "\n".join(sorted(set(wrong)))


def test_every_test_was_run_or_has_a_reason() -> None:
    _, runs = parity_table.read_runs()
    wrong = sorted(set(parity_table.named_tests()) - runs.keys())
    assert not wrong, "nobody has run these; run `python -m scripts.parity_run`:\n" + "\n".join(wrong)


def test_row_counts_only_if_one_of_its_tests_ran() -> None:
    row = {"theirs": "a", "ours": "b", "note": "", "proof": "tests/x.py::test_one tests/x.py::test_two"}
    for places, proven in (
        ({}, 0),
        ({"tests/x.py::test_one": "GPU: not run", "tests/x.py::test_two": "not run: needs mpiexec"}, 0),
        ({"tests/x.py::test_one": "GPU: not run", "tests/x.py::test_two": "CPU, slow tier"}, 1),
    ):
        assert parity_table.summary([row], "here", places).startswith(f"{proven} of 1 lines have a test that ran")


SKIPS = """
import pytest

@pytest.mark.gpu
def test_card():
    pytest.skip("needs a CUDA device")

@pytest.mark.slow
def test_long():
    pass

@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_both(number):
    pass

@pytest.mark.parametrize("number", [1, 2])
def test_partly(number):
    if number == 1:
        pytest.skip("not here")

@pytest.mark.skipif(True, reason="needs mpiexec")
def test_never():
    pass
"""


def test_skipped_tests_count_as_not_run(tmp_path: Path) -> None:
    (tmp_path / "test_skips.py").write_text(SKIPS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: 1\n    slow: 2\n")
    code = (
        "import json, sys, pytest\nfrom scripts.parity_run import Recorder\nrecorder = Recorder()\n"
        "pytest.main(['-p', 'no:cacheprovider', '--rootdir', sys.argv[1], sys.argv[1]], plugins=[recorder])\n"
        "print(json.dumps(recorder.runs()))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    runs = json.loads(done.stdout.splitlines()[-1])
    assert {test.partition("::test_")[2]: place for test, place in runs.items()} == {
        "card": "GPU: not run",
        "long": "CPU, slow tier",
        "both": "CPU",
        "partly": "CPU",
        "never": "not run: needs mpiexec",
    }


def test_the_page_is_up_to_date() -> None:
    assert parity_table.main(["--check"]) == 0


def test_stale_row_is_detected() -> None:
    """What the checks above rest on."""
    assert resolve("axon_nb.parallel.FSDP.module") is None
    assert "strategy" in parameters(resolve("axon_nb.parallel.FSDP"))
    assert "nothing" not in parameters(resolve("axon_nb.comm.recv"))
    for path in ("axon_nb.parallel.FSDP.nothing", "axon_nb.nothing"):
        try:
            resolve(path)
        except AttributeError:
            continue
        raise AssertionError(f"{path} was found")
    assert "test_the_page_is_up_to_date" in named_tests("tests/parity/test_table.py")
