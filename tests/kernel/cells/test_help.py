"""Every magic and command has help with an example; a typo gets the nearest name."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from axon_nb.magics.arguments import EXAMPLES
from tests.support.kernel import Kernel


def _commands(kernel: Kernel) -> list[str]:
    return list(kernel.value("list(get_ipython().magics_manager.registry['DistributedMagics'].commands())"))


def _magics(kernel: Kernel, kind: str) -> dict[str, str]:
    """The docstrings of our magics, by name."""
    found = kernel.value(
        f"{{name: magic.__doc__ or '' for name, magic in get_ipython().magics_manager.magics['{kind}'].items()"
        " if getattr(magic, '__module__', '').startswith('axon_nb.')}"
    )
    assert isinstance(found, dict)
    return found


def test_help_has_no_side_effects(kernel: Kernel) -> None:
    for name in _commands(kernel):
        reply = kernel.ok(f"%distributed {name} --help")
        assert reply.stdout.startswith(f"usage: %distributed {name}"), name
        assert name in EXAMPLES, f"magics/arguments.py has none for {name}"
        assert f"example:\n  {EXAMPLES[name]}" in reply.stdout
        assert f"%distributed {name}" in EXAMPLES[name]
    assert kernel.ok("%%distributed\n1").lines() == ["[ranks 0-3] 1"]


def test_every_magic_lists_its_options_and_an_example(kernel: Kernel) -> None:
    for name in _magics(kernel, "line").keys() - {"distributed"}:
        reply = kernel.ok(f"%{name} --help")
        assert reply.stdout.startswith(f"usage: %{name}"), name
        assert f"example:\n  {EXAMPLES[f'%{name}']}" in reply.stdout
    for name in _magics(kernel, "cell").keys() - {"local"}:
        reply = kernel.ok(f"%%{name} --help\n1")
        assert ("--memory" if name == "plan" else "--repeat") in reply.stdout
        assert f"example:\n  {EXAMPLES[f'%%{name}']}" in reply.stdout
    assert "Example: `%distributed start -n 4`" in kernel.ok("%distributed --help").stdout


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("%distributed start?", "%distributed start -n 4"),
        ("%distributed start ?", "%distributed start -n 4"),
        ("%distributed start -n 4??", "number of ranks"),
        ("%pull losses?", "%pull losses --ranks 0"),
    ],
)
def test_question_mark_shows_help(kernel: Kernel, code: str, said: str) -> None:
    assert said in kernel.ok(code).stdout


def test_help_lists_each_command_in_one_of_five_groups(kernel: Kernel) -> None:
    lines = kernel.ok("%distributed help").stdout.splitlines()
    assert [line for line in lines if line and " " not in line] == ["Run", "Look", "Repair", "Move", "Set"]
    listed = [line.split()[0] for line in lines if line.startswith("  ")]
    assert sorted(listed) == sorted({*_commands(kernel), "help"})
    assert listed[0] == "start"


def test_every_magic_has_a_docstring_with_an_example(kernel: Kernel) -> None:
    line, cell = _magics(kernel, "line"), _magics(kernel, "cell")
    assert {"distributed", "gather", "memory", "pull", "push", "scatter", "shards", "timeline", "watch"} <= set(line)
    assert {"distributed", "local", "plan", "rank"} <= set(cell)
    for sign, found in (("%", line), ("%%", cell)):
        for name, text in found.items():
            example = text.partition("Example: ")[2]
            assert f"`{sign}{name}" in example, name


@pytest.mark.parametrize(
    ("typed", "sentence"),
    {
        "%distributed statsu": "has no command 'statsu': did you mean `%distributed status`?",
        "%distributed repiar": "did you mean `%distributed repair`?",
        "%distributed xyzzy": "has no command 'xyzzy': `%distributed help` lists all.",
        "%distributed start --devcies cpu": "%distributed start has no '--devcies'; did you mean --devices?",
        "%distributed seed 0 --per-ranks": "did you mean --per-rank?",
        "%push t_x --rank 0": "%push has no '--rank'; did you mean --ranks?",
        "%pull t_x --shard": "did you mean --shards?",
        "%timeline --sav x.json": "did you mean --save?",
        "%%distributed --tiem\n1": "%%distributed has no '--tiem'; did you mean --time?",
        "%%rank 0 --quite\n1": "did you mean --quiet?",
    }.items(),
    ids=lambda value: value.partition("\n")[0],
)
def test_typo_suggests_the_nearest_name(kernel: Kernel, typed: str, sentence: str) -> None:
    reply = kernel.run(typed)
    assert reply.ename == "UsageError"
    assert sentence in reply.traceback


def test_no_command_shows_the_status_and_what_to_type(kernel: Kernel, new_kernel: Callable[..., Kernel]) -> None:
    reply = kernel.ok("%distributed")
    assert reply.stdout == "`%%distributed` runs a cell on all ranks; `%distributed help` lists all commands.\n"
    assert "running, 4 ranks" in reply.result
    other = new_kernel()
    assert other.ok("%load_ext axon_nb\n%distributed").lines() == [
        "No cluster is running. `%distributed start -n 4` starts one; `%distributed help` lists all commands."
    ]
