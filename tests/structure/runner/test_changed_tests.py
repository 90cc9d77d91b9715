"""`scripts/test --changed` selects what a change can break."""

from __future__ import annotations

import pytest

from scripts.changed_tests import ROOT, TESTS, select


def test_every_package_has_a_row_and_every_row_names_tests_that_exist() -> None:
    packages = {
        f"axon_nb/{folder.name}/" for folder in (ROOT / "axon_nb").iterdir() if (folder / "__init__.py").exists()
    }
    assert packages <= TESTS.keys()
    assert [path for tests in TESTS.values() for path in tests if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("changed", "selected"),
    [
        (["README.md", "docs/design/rooms.md"], []),
        ([".ci/landed", "tests/durations.json", "tests/promises.toml"], []),
        (
            ["axon_nb/plan/skeleton.py"],
            ["tests/kernel/views/test_plan_names.py", "tests/kernel/views/test_what_if.py", "tests/plan"],
        ),
        (["axon_nb/plan/skeleton.py", "magics/pull.py"], ["tests/front_ends", "tests/kernel", "tests/plan"]),
        (["pyproject.toml", "axon_nb/host/deaths.py"], ["tests"]),
        (["tests/host/resources/test_oom.py"], ["tests/host/resources/test_oom.py"]),
        (["tests/host/conftest.py"], ["tests/host"]),
        (
            ["tests/kernel/recovery/trained_model.py"],
            ["tests/kernel/recovery/test_interrupts.py", "tests/kernel/recovery/test_recovery.py"],
        ),
    ],
)
def test_change_selects_the_tests_that_run_it(changed: list[str], selected: list[str]) -> None:
    assert select(changed) == selected
