"""Sizes and manners of the source."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from source_tree import ROOT, parse, python_files

FILES = {str(path.relative_to(ROOT)): path for path in python_files()}
PROSE = {
    path.name: path for pattern in ("*.md", "*.toml", "*.txt", "Makefile", ".ci/run") for path in ROOT.glob(pattern)
}
UNSUITABLE = {
    "a path of somebody's machine": re.compile(r"""(?<![\w.~}])/(?:work|home|root|opt|Users)/\w"""),
    "the number of an issue": re.compile(r"\bissue #\d", re.IGNORECASE),
    "the circumstances of its writing": re.compile(r"\b(?:this|a|the) session\b", re.IGNORECASE),
}


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(parse(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of code: a long signature or docstring makes nothing harder to follow."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


@pytest.mark.parametrize("name", FILES)
def test_files_and_functions_are_small(name: str) -> None:
    limit = 600 if name.startswith("fp4_inductor/kernels/") else 400
    lines = FILES[name].read_text(encoding="utf-8").count("\n")
    assert lines <= limit
    long = {f.name: body_lines(f) for f in functions(FILES[name]) if body_lines(f) >= 60}
    assert not long, f"functions of 60 lines or more: {long}"


@pytest.mark.parametrize("name", FILES)
def test_files_say_what_they_are(name: str) -> None:
    assert ast.get_docstring(parse(FILES[name])), "a module docstring is missing"


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith(("fp4_inductor/", "patterns/"))])
def test_no_error_is_swallowed_blindly(name: str) -> None:
    for node in ast.walk(parse(FILES[name])):
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else "everything"
            reraises = any(isinstance(child, ast.Raise) for child in ast.walk(node))
            assert reraises or caught not in ("everything", "Exception", "BaseException"), f"line {node.lineno}"


@pytest.mark.parametrize("name", [*FILES, *PROSE])
def test_the_project_speaks_of_itself_alone(name: str) -> None:
    text = (FILES.get(name) or PROSE[name]).read_text(encoding="utf-8")
    for what, pattern in UNSUITABLE.items():
        found = pattern.search(text)
        assert found is None, f"{what}: {found.group()!r}"


def test_every_skip_has_a_reason() -> None:
    for name, path in FILES.items():
        if not name.startswith("tests/"):
            continue
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Attribute) and node.attr == "skip" and ast.unparse(node) == "pytest.mark.skip":
                raise AssertionError(f"{name}:{node.lineno}: a test that is always skipped is dead code")
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("pytest.skip", "pytest.mark.skipif"):
                given = [k.arg for k in node.keywords]
                has_reason = "reason" in given or (node.func.attr == "skip" and node.args)  # type: ignore[attr-defined]
                assert has_reason, f"{name}:{node.lineno}: a skip without a reason"
