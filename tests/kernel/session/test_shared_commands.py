"""Commands that notebooks and other programs share, as a notebook types them."""

from __future__ import annotations

import pytest

from tests.support.kernel import Kernel


def test_renamed_cluster_is_found_by_its_new_name(ready: Kernel) -> None:
    old = ready.value("axon_nb.current_cluster().name")
    new = f"{old}-again"
    try:
        assert ready.ok(f"%distributed rename {new}").stdout.strip() == f"The cluster {old!r} is now {new!r}."
        assert ready.value("axon_nb.current_cluster().name") == new
        found = ready.value(
            "[one.name for one in __import__('axon_nb.doctor.clusters', fromlist=['_']).find_clusters()]"
        )
        assert new in found
        assert old not in found
    finally:
        ready.ok(f"%distributed rename {old}")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [("rename", "the following arguments are required: NEW"), ("rename ''", "A cluster's name must not be empty.")],
)
def test_bad_name_is_refused_in_one_sentence(ready: Kernel, line: str, sentence: str) -> None:
    assert sentence in ready.run(f"%distributed {line}").evalue


def test_explain_names_the_state(ready: Kernel) -> None:
    assert ready.ok("%distributed explain").stdout.startswith("No cell is running.")
