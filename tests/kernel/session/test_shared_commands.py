"""Commands that notebooks and other programs share, as a notebook types them."""

from __future__ import annotations

import pytest

from tests.support.kernel import Kernel


def test_renamed_cluster_is_found_by_its_new_name(kernel: Kernel) -> None:
    kernel.ok("import axon_nb")
    old = kernel.value("axon_nb.current_cluster().name")
    new = f"{old}-again"
    try:
        assert kernel.ok(f"%distributed rename {new}").stdout.strip() == f"The cluster {old!r} is now {new!r}."
        assert kernel.value("axon_nb.current_cluster().name") == new
        found = kernel.value(
            "[one.name for one in __import__('axon_nb.doctor.clusters', fromlist=['_']).find_clusters()]"
        )
        assert new in found
        assert old not in found
    finally:
        kernel.ok(f"%distributed rename {old}")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("rename", "the following arguments are required: NEW"),
        ("rename a/b", "A cluster's name takes letters, digits, `.`, `_` and `-`; got 'a/b'."),
    ],
)
def test_bad_name_is_refused_in_one_sentence(kernel: Kernel, line: str, sentence: str) -> None:
    assert sentence in kernel.run(f"%distributed {line}").evalue


def test_explain_names_the_state(kernel: Kernel) -> None:
    assert kernel.ok("%distributed explain").stdout.startswith("No cell is running.")
