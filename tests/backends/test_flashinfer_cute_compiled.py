"""FlashInfer takes our calls as they are and compiles its CuTe-DSL kernels for them, all on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from flashinfer_stand_in import real

HERE = Path(__file__).parent
GEMMS = ["BlockScaledContiguousGatherGroupedGemmKernel", "Sm100BlockScaledContiguousGroupedGemmFinalizeFusionKernel"]
KERNELS = {
    # device and backend: blocks, with what is compiled for them and launched
    ("sm_100", "flashinfer_cutedsl"): {
        "nvfp4:bf16:8": (["Sm100W4A16GroupedGemmKernel"] * 2, [*["Sm100W4A16GroupedGemmKernel"] * 2, "moe_unpermute"]),
        "nvfp4:nvfp4:8": (GEMMS, [*GEMMS, "moe_unpermute"]),
        "mxfp4:mxfp8:8": (GEMMS, GEMMS),
    },
    ("sm_103", "flashinfer_cutedsl"): {"nvfp4:nvfp4:300": (GEMMS, [*GEMMS, "moe_unpermute"])},
    ("sm_120", "flashinfer_b12x"): {
        "nvfp4:bf16:8": (["W4A16FusedMoeKernel", "W4A16TopKSumKernel"],) * 2,
        "nvfp4:nvfp4:64": (["MoEStaticKernel"], ["static"]),
        "mxfp4:mxfp4:8": (["MoEMicroKernel"], ["micro"]),
        "mxfp4:mxfp4:600": (["_DynamicMoELaunch"], ["dynamic"]),
    },
    ("sm_121", "flashinfer_b12x"): {"nvfp4:nvfp4:2": (["MoEMicroKernel"], ["micro"])},
}


@pytest.mark.slow
@pytest.mark.parametrize("target", KERNELS, ids="-".join)
def test_kernels_compile_for_our_calls(target: tuple[str, str], tmp_path: Path) -> None:
    real("fused_moe.b12x_fused_moe")
    arch, backend = target
    found = {entry["block"]: (entry["compiled"], entry["launched"]) for entry in _run(arch, backend, tmp_path)}
    assert found == KERNELS[target]
    cubins = sorted(tmp_path.glob("*.cubin"))
    assert len(cubins) >= len({name for compiled, _ in found.values() for name in compiled})
    assert all(cubin.name.endswith(f".{arch}a.cubin") for cubin in cubins)
    assert all(cubin.read_bytes()[:4] == b"\x7fELF" for cubin in cubins)


def _run(arch: str, backend: str, folder: Path) -> list[dict[str, list[str]]]:
    paths = [str(HERE.parents[1]), str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CUTE_DSL_ARCH": f"{arch}a",
        "CUTE_DSL_KEEP_CUBIN": "1",
        "CUTE_DSL_DUMP_DIR": str(folder),
        "FLASHINFER_WORKSPACE_BASE": str(folder / "workspace"),
    }
    command = [sys.executable, str(HERE / "flashinfer_on_cpu.py"), arch, backend, *KERNELS[arch, backend]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
