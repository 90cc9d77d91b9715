"""Which versions count as tested."""

from __future__ import annotations

import pytest

from axon_nb.records.hooks import TESTED, are_tested, install_command


@pytest.mark.parametrize(
    ("versions", "tested"),
    [
        ({"torch": "2.8.0"}, True),
        ({"torch": "2.15.9+cu132"}, True),
        ({"torch": "2.16.0.dev20261101"}, False),
        ({"torch": "2.7.1"}, False),
        ({"torch": "2.13.0", "ipykernel": "7.4.0", "ipython": "9.18.1", "ipyparallel": "9.2.0"}, True),
        ({"torch": "2.13.0", "ipykernel": "8.0.0a1"}, False),
        ({"ipython": "10"}, False),
        ({"torch": "unknown"}, False),
    ],
)
def test_tested_version_range_is_half_open(versions: dict[str, str], tested: bool) -> None:
    assert are_tested(versions) is tested


def test_fix_command_installs_tested_versions() -> None:
    lowest, above = TESTED["torch"]
    assert install_command("torch") == f'pip install "torch>={lowest},<{above}"'
