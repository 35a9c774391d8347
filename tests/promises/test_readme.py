"""The README tells the truth about names: options, kernel backends, commands, code."""

from __future__ import annotations

import ast
import re
from dataclasses import fields

import pytest
from source_tree import ROOT

from fp4_inductor import Options, list_backends

README = (ROOT / "README.md").read_text(encoding="utf-8")
CODE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def first_column(heading: str) -> set[str]:
    """Names in the first column of the table under a heading."""
    section = README.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))


def test_every_option_is_documented() -> None:
    assert first_column("Options") == {f"fp4moe.{field.name}" for field in fields(Options)}


def test_every_kernel_backend_is_documented() -> None:
    assert first_column("Kernel backends") == set(list_backends())


@pytest.mark.parametrize("code", CODE, ids=[f"block{index}" for index in range(len(CODE))])
def test_code_parses_and_uses_public_names(code: str) -> None:
    import fp4_inductor

    used = {
        node.attr
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "fp4_inductor"
    }
    assert used <= set(fp4_inductor.__all__)


def test_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"\bmake (\w+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for script in set(re.findall(r"examples/\w+\.py", README)):
        assert (ROOT / script).exists(), script
