"""What cells bind, use and mutate, which of them are live, and what produced a value."""

from __future__ import annotations

import ast

from axon_nb.export.effects import defining_statements, effects, live_cells

PREDEFINED = ("rank", "torch", "dist", "F")


def live(*cells: str, wanted: dict[int, list[str]] | None = None) -> list[bool]:
    return live_cells([ast.parse(cell) for cell in cells], wanted or {}, predefined=PREDEFINED)


def test_bound_used_and_changed_names() -> None:
    found = effects(ast.parse("import a.b\nfor i in x: y[i] += z.f(w, print(v))\nq = [k for k in m]").body)
    assert found.binds == {"a", "i", "q"}
    assert found.uses == {"x", "y", "z", "w", "v", "m"}
    assert found.changes == {"y", "z", "w"}


def test_loop_variables_of_comprehensions_are_local_on_every_python() -> None:
    code = "a = {k: v for k, v in m}\nb = {n for n in [[l for l in p] for p in q]}\ndef f(a=[i for i in j]): pass"
    assert effects(ast.parse(code).body).uses == {"m", "q", "j"}


def test_functions_use_names_of_the_enclosing_scope() -> None:
    found = effects(ast.parse("def f(a, *b):\n    c = a + d\n    return g(c, len(b))\nclass C(B):\n    e = f").body)
    assert found.binds == {"f", "C"}
    assert {"d", "g", "B"} <= found.uses
    assert not {"a", "b", "c", "len", "e"} & found.uses


def test_cells_that_nothing_depends_on_are_dead() -> None:
    assert live(
        "total = torch.ones(1)\ndist.all_reduce(total)",  # nobody asks for it
        "model = make()\noptimizer = torch.optim.SGD(model.parameters())",
        "print(model)",
        "for x in data: F.loss(model(x)).backward(); optimizer.step()",
        "print(sum(1 for p in model.parameters()))",
    ) == [False, True, False, True, True]


def test_abandoned_experiment_is_dead() -> None:
    train = "for x in data:\n    model(x).backward()\n    optimizer.step()"
    make = "model = make({})\noptimizer = SGD(model.parameters())"
    assert live(make.format(1), train, make.format(2), train, "score = test(model)") == [False, False, True, True, True]


def test_training_twice_is_live_both_times() -> None:
    train = "for x in data:\n    model(x).backward()\n    optimizer.step()"
    assert live("model = make()\noptimizer = SGD(model.parameters())", train, train) == [True, True, True]


def test_written_or_fetched_values_are_live() -> None:
    cells = ("a = 1", "torch.save(a, 'file')", "b = 2", "c = 3", "last = 0")
    assert live(*cells) == [True, True, False, False, True]
    assert live(*cells, wanted={2: ["b"]}) == [True, True, True, False, True]


def test_change_through_an_alias_counts() -> None:
    assert live("x = make()", "y = [x]", "y[0].append(1)", "print(x)") == [True, True, True, True]


def test_defining_statements_are_selected_individually() -> None:
    statements = ast.parse(
        "import numpy as np\nnoise = 3\nraw = np.arange(8)\nraw[0] = 5\nprint(noise)\n"
        "train, test = raw[:4], raw[4:]\nraw = None"
    ).body
    chosen, missing = defining_statements(["train"], statements)
    assert [ast.unparse(s) for s in chosen] == [
        "import numpy as np",
        "raw = np.arange(8)",
        "raw[0] = 5",
        "train, test = (raw[:4], raw[4:])",
    ]
    assert missing == set()
    assert defining_statements(["nowhere"], statements) == ([], {"nowhere"})
