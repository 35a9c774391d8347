"""What is installed from a built wheel is the whole package; editable installs would hide a forgotten folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from source_tree import PACKAGE_FOLDERS, ROOT

SHIPPED = (".py", ".typed", ".cpp", ".h", ".cu")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for folder in ("fp4_inductor", "patterns"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(target)]
    subprocess.run([*command, str(source)], check=True)
    (built,) = target.glob("*.whl")
    return zipfile.ZipFile(built)


def expected_files() -> set[str]:
    found = set()
    for package, folder in PACKAGE_FOLDERS.items():
        for path in folder.rglob("*"):
            if path.suffix in SHIPPED:
                found.add(str(Path(*package.split(".")) / path.relative_to(folder)))
    return found


def test_the_wheel_holds_every_file(wheel: zipfile.ZipFile) -> None:
    expected = expected_files()
    assert "fp4_inductor/patterns/__init__.py" in expected
    assert "fp4_inductor/py.typed" in expected
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == expected


def test_the_wheel_registers_the_backend(wheel: zipfile.ZipFile) -> None:
    (entry_points,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    lines = wheel.read(entry_points).decode().split("\n")
    assert lines[:2] == ["[torch_dynamo_backends]", "fp4moe = fp4_inductor.dynamo_backend:fp4moe"]
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
