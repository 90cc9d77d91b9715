"""Every magic and every command has help with an example; a mistyped command is told the nearest."""

from __future__ import annotations

import pytest

from axon_nb.magics.examples import EXAMPLES
from tests.kernel.driver import Kernel


def _commands(kernel: Kernel) -> list[str]:
    return list(kernel.value("list(get_ipython().magics_manager.registry['DistributedMagics'].commands())"))


def test_asking_for_help_does_nothing_else(kernel: Kernel) -> None:
    for name in _commands(kernel):
        reply = kernel.ok(f"%distributed {name} --help")
        assert reply.stdout.startswith(f"usage: %distributed {name}"), name
        assert name in EXAMPLES, f"magics/examples.py has none for {name}"
        assert f"example:\n  {EXAMPLES[name]}" in reply.stdout
    assert kernel.ok("%%distributed\n1").lines() == ["[ranks 0-3] 1"]


@pytest.mark.parametrize("code", ["%distributed start?", "%distributed start ?", "%distributed start -n 4??"])
def test_a_question_mark_asks_for_it_too(kernel: Kernel, code: str) -> None:
    reply = kernel.ok(code)
    assert "number of ranks" in reply.stdout
    assert "%distributed start -n 4" in reply.stdout


def test_cell_magics_tell_their_options(kernel: Kernel) -> None:
    assert "--repeat" in kernel.ok("%%distributed --help\n1").stdout


def test_every_magic_has_a_docstring_with_an_example(kernel: Kernel) -> None:
    kernel.ok(
        "t_magics = {kind + name: magic.__doc__ or '' for kind, found in "
        "(('%', get_ipython().magics_manager.magics['line']), ('%%', get_ipython().magics_manager.magics['cell'])) "
        "for name, magic in found.items() if getattr(magic, '__module__', '').startswith('axon_nb.')}"
    )
    found = kernel.value("t_magics")
    assert {"%distributed", "%push", "%pull", "%shards", "%%distributed", "%%rank", "%%local"} <= set(found)
    assert [name for name, text in found.items() if f"`{name} " not in text and f"`{name}`" not in text] == []


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ("statsu", "has no command 'statsu': did you mean `%distributed status`?"),
        ("repiar", "did you mean `%distributed repair`?"),
        ("xyzzy", "it is one of start, status"),
    ],
)
def test_the_nearest_command_is_suggested(kernel: Kernel, typed: str, sentence: str) -> None:
    assert sentence in kernel.run(f"%distributed {typed}").traceback
