"""What torch computes wrong without an error: the list agrees with the installed torch, and an entry ends by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from axon_nb import wrong_numbers
from axon_nb.wrong_numbers import Fault, faults, faults_of, note
from scripts import versions
from scripts import wrong_numbers as reproductions


def test_list_agrees_with_the_installed_torch() -> None:
    listed = {one.name for one in faults_of(torch.__version__) if not one.gpus}
    found = {name for name, wrong in reproductions.reproduce().items() if wrong}
    assert found == listed, "run `make versions`, which updates axon_nb/wrong_numbers.toml"
    assert {one.name for one in faults() if not one.gpus} == set(reproductions.REPRODUCTIONS)


def test_entry_ends_with_the_first_version_that_is_right() -> None:
    fault = Fault("name", "what", "Do that.", "https://example.org", wrong=("2.12", "2.13"), right=("2.14",))
    assert [fault.is_in(version) for version in ("2.11.0", "2.13.2+cpu", "2.14.0", "2.16.0.dev1", "?")] == [
        *(True, True, False, False, False)
    ]


def test_run_of_a_version_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "list.toml"
    copy.write_text(wrong_numbers.DATA.read_text())
    for module in (wrong_numbers, reproductions):
        monkeypatch.setattr(module, "DATA", copy)
    monkeypatch.setattr(reproductions, "RELEASE", "2.99")
    reproductions.record({"max_of_nan": False, "bool_sum": True})
    after = {one.name: (one.wrong[-1], one.right[-1:]) for one in faults()}
    assert after["max_of_nan"] == (after["memory_layout"][0], ("2.99",))
    assert after["bool_sum"] == ("2.99", ())
    names = {one.name for one in faults_of("2.99.1")}
    assert "bool_sum" in names
    assert "max_of_nan" not in names


def test_page_has_the_list() -> None:
    assert versions.PAGE.read_text() == versions.page()


def test_start_counts_only_what_cells_can_meet() -> None:
    corrected = {one.name for one in faults() if one.is_corrected}
    assert corrected == {"bool_sum", "first_state_dict", "max_of_nan", "memory_layout"}
    assert corrected < {one.name for one in faults_of("2.15.0", "gloo")}
    assert note("2.15.0", "gloo").startswith("torch 2.15.0 computes 1 thing wrong")
