"""Load a gpt-oss checkpoint with its experts still in MXFP4, compile, and generate.

python examples/load_gpt_oss.py --path path/to/gpt-oss-20b
python examples/load_gpt_oss.py              # writes a small random checkpoint in the same layout first
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import fp4_inductor


def write_small_checkpoint(folder: Path, layers: int) -> None:
    """A random checkpoint in the published layout, by the generator that the tests use."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "checkpoint"))
    from gpt_oss_writer import write_gpt_oss

    write_gpt_oss(folder, num_hidden_layers=layers, hidden_size=256, intermediate_size=256, num_local_experts=16)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, help="folder of a gpt-oss checkpoint")
    parser.add_argument("--prompt", help="text, where the checkpoint has a tokenizer")
    parser.add_argument("--layers", type=int, default=4, help="of the random checkpoint")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)

    with tempfile.TemporaryDirectory() as temporary:
        path = args.path or Path(temporary)
        if args.path is None:
            write_small_checkpoint(path, args.layers)
        model = fp4_inductor.load(path, device=args.device)
    packed = sum(p.numel() for name, p in model.named_parameters() if name.endswith(("_packed", "_block_scale")))
    print(f"loaded {type(model).__name__}: {packed / 2**20:.1f} MiB of packed experts")

    tokenizer = None
    if args.prompt:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path)
        prompt = tokenizer(args.prompt, return_tensors="pt").input_ids.to(args.device)
    else:
        prompt = torch.randint(3, model.config.vocab_size, (1, 16), device=args.device)

    print(fp4_inductor.explain(model, prompt, use_cache=False))
    model.compile(backend="fp4moe", fullgraph=True)
    for attempt in ("with compilation", "compiled"):
        start = time.perf_counter()
        out = model.generate(
            prompt,
            max_new_tokens=args.tokens,
            min_new_tokens=args.tokens,
            do_sample=False,
            cache_implementation="static",
            disable_compile=True,
        )
        print(f"{args.tokens / (time.perf_counter() - start):8.1f} tokens/s, {attempt}")
    new = out[0, prompt.shape[1] :]
    print(tokenizer.decode(new) if tokenizer else new.tolist())


if __name__ == "__main__":
    main()
