"""The architecture: imports go down only, recognition and kernel backends never meet, Triton stays in kernels/."""

from __future__ import annotations

import pytest
from source_tree import imports, module_level_imports, modules

FLOORS = (
    # floor, column, modules; a name stands for the modules below it too
    (0, "words", ("errors", "reasons", "formats", "spec", "device", "options")),
    (1, "numbers", ("quant", "reference", "plan", "random_layer", "timing", "autotune", "layouts", "kernels")),
    (2, "backends", ("backends",)),
    (2, "recognition", ("matching", "patterns")),
    (3, "stages", ("select", "tuned_plan", "emit", "host_memory", "fold", "compile_ahead", "report", "verify")),
    (3, "stages", ("probe", "exact_weights")),
    (4, "way", ("lowering_pass",)),
    (5, "doors", ("dynamo_backend", "post_grad_pass", "_explain", "modules", "quantize", "checkpoint", "bench")),
    (5, "doors", ("experts_interface", "graph_breaks", "input_names")),
    (5, "doors", ("doctor", "doctor_tools", "__main__", "")),
)
MODULES = modules()


def place(module: str) -> tuple[int, str]:
    """Floor and column of a module, by the first part of its name below the package."""
    head = module.removeprefix("fp4_inductor").lstrip(".").split(".")[0]
    for floor, column, names in FLOORS:
        if head in names:
            return floor, column
    raise AssertionError(f"{module} stands on no floor: add it to FLOORS")


def own_imports(name: str) -> set[str]:
    """Modules of this package that ``name`` imports."""
    found = set()
    for imported in imports(name, MODULES[name]):
        while imported.startswith("fp4_inductor") and imported not in MODULES:
            imported = imported.rpartition(".")[0]
        if imported in MODULES and imported != name:
            found.add(imported)
    return found


def test_the_table_names_what_exists_and_the_reader_works() -> None:
    assert place("fp4_inductor.backends.base") == (2, "backends")
    assert place("fp4_inductor.patterns.probing") == (2, "recognition")
    assert {"fp4_inductor.spec", "fp4_inductor.plan"} <= own_imports("fp4_inductor.backends.base")
    assert "fp4_inductor.quant.e2m1" in own_imports("fp4_inductor.quant.dequantize")


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_down_only(name: str) -> None:
    floor, column = place(name)
    # A package's __init__ is on its package's floor; the root is only the list of public names.
    wrong = [
        imported
        for imported in sorted(own_imports(name))
        if imported != "fp4_inductor" and not (place(imported)[0] < floor or place(imported) == (floor, column))
    ]
    assert not wrong, f"{name} (floor {floor}, {column}) may not import {wrong}"


@pytest.mark.parametrize("name", MODULES)
def test_only_kernels_import_triton_at_module_level(name: str) -> None:
    if not name.startswith("fp4_inductor.kernels."):
        assert "triton" not in module_level_imports(MODULES[name])


@pytest.mark.parametrize("name", MODULES)
def test_imports_inside_the_package_are_relative(name: str) -> None:
    assert "fp4_inductor" not in module_level_imports(MODULES[name])
