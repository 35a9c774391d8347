"""Write what the compiler sees, before and after the rewrite, into a folder of readable files.

    pip install 'fp4_inductor[inspect]'
    python examples/inspect_with_depyf.py --folder depyf_dump

The file of the rewritten graph shows one ``torch.ops.fp4_inductor...`` call a layer, which reads folded
weights named ``fp4_prepared_*`` and a comment with the line of model code it stands for.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from quickstart import FAMILIES, build_model

import fp4_inductor


def show(folder: Path) -> None:
    """Print the files that hold a fused op, and the lines that call it."""
    for file in sorted(folder.rglob("*.py")):
        lines = [line.strip() for line in file.read_text().splitlines() if "torch.ops.fp4_inductor" in line]
        if lines:
            print(f"{file}: {len(lines)} fused calls, the first one is")
            print(f"    {lines[0][:300]}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("depyf_dump"))
    parser.add_argument("--family", choices=FAMILIES, default="gpt_oss")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    try:
        import depyf
    except ImportError:
        raise SystemExit("depyf is not installed: pip install 'fp4_inductor[inspect]'") from None

    model = build_model(args.family, args.device, num_hidden_layers=args.layers)
    fp4_inductor.quantize_(model, "mxfp4")
    model.compile(backend="fp4moe", fullgraph=True)
    prompt = torch.randint(3, model.config.vocab_size, (1, 16), device=args.device)
    with torch.no_grad(), depyf.prepare_debug(str(args.folder)):
        model(prompt, use_cache=False)
    show(args.folder)


if __name__ == "__main__":
    main()
