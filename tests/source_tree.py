"""The project's own files, as the tests of promises read them."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE_FOLDERS = {"fp4_inductor": ROOT / "fp4_inductor", "fp4_inductor.patterns": ROOT / "patterns"}
FOLDERS = ("fp4_inductor", "patterns", "tests", "examples")


def modules() -> dict[str, Path]:
    """Every module of the package by its import name, packages by their ``__init__.py``."""
    found = {}
    for package, folder in PACKAGE_FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


def python_files() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(name: str, path: Path) -> set[str]:
    """Names that a module imports anywhere in its code: modules, and what is taken out of them."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found.update(f"{module}.{alias.name}" for alias in node.names)
    return found


def module_level_imports(path: Path) -> set[str]:
    """Top-level package names that are imported as soon as the module is: outside functions and type checking."""
    found: set[str] = set()
    stack: list[ast.stmt] = list(parse(path).body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            stack += node.orelse
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            stack += [child for child in ast.walk(node) if isinstance(child, ast.Import | ast.ImportFrom)]
    return found
