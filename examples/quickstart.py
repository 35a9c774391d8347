"""Quantise a mixture-of-experts model to FP4, explain, compile, generate, and compare with eager.

python examples/quickstart.py --family gpt_oss --format mxfp4
python examples/quickstart.py --model path/to/a/bf16/checkpoint
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch

import fp4_inductor

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 16, "moe_intermediate_size": 256, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 16, "intermediate_size": 256},
    "gpt_oss": {
        "num_local_experts": 16,
        "intermediate_size": 256,
        "sliding_window": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    },
    "olmoe": {"num_experts": 16, "intermediate_size": 256},
}
SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "num_experts_per_tok": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 2048,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def build_model(family: str, device: str, **sizes: Any) -> Any:
    """A random bf16 model of a transformers family, small enough to compile in a minute on two cores."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **sizes})
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device).eval()


def load_model(path: str, device: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(device).eval()


def generate(model: Any, prompt: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Greedy generation: new tokens [n], logits [n, vocabulary], and seconds."""
    start = time.perf_counter()
    out = model.generate(
        prompt,
        max_new_tokens=tokens,
        do_sample=False,
        cache_implementation="static",  # fixed shapes: one graph for the prompt, one for every later token
        disable_compile=True,  # model.compile decides; generate would add a torch.compile of its own
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences[0, prompt.shape[1] :], torch.cat(out.logits).float(), time.perf_counter() - start


def logit_difference(
    tokens: torch.Tensor, logits: torch.Tensor, eager_tokens: torch.Tensor, eager: torch.Tensor
) -> float:
    """Largest difference over the steps that had the same input, relative to the spread of the logits."""
    same = (tokens == eager_tokens).int().cumprod(0).sum()
    steps = min(int(same) + 1, len(tokens))
    return float((logits[:steps] - eager[:steps]).abs().max() / eager.std())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a bf16 checkpoint; by default a small random model")
    parser.add_argument("--family", choices=FAMILIES, default="qwen3_moe")
    parser.add_argument("--format", choices=("mxfp4", "nvfp4"), default="nvfp4")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--layers", type=int, default=SIZES["num_hidden_layers"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)

    # transformers caches its version checks, which Dynamo traces through as it should.
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
    if args.model:
        model = load_model(args.model, args.device)
    else:
        model = build_model(args.family, args.device, num_hidden_layers=args.layers)
    fp4_inductor.quantize_(model, args.format)
    prompt = torch.randint(3, model.config.vocab_size, (1, 16), device=args.device)

    report = fp4_inductor.explain(model, prompt, use_cache=False)
    print(report, "\n")
    if report.num_lowered == 0:
        raise SystemExit("no block was lowered")

    generate(model, prompt, 2)
    eager_tokens, eager_logits, eager_seconds = generate(model, prompt, args.tokens)

    model.compile(backend="fp4moe", fullgraph=True)
    _, _, compile_seconds = generate(model, prompt, args.tokens)
    tokens, logits, seconds = generate(model, prompt, args.tokens)

    difference = logit_difference(tokens, logits, eager_tokens, eager_logits)
    print(f"first generation, with compilation   {compile_seconds:8.1f} s")
    print(f"eager, dequantising in every call    {args.tokens / eager_seconds:8.1f} tokens/s")
    print(f'torch.compile(backend="fp4moe")      {args.tokens / seconds:8.1f} tokens/s')
    print(f"largest logit difference to eager    {difference:8.2%} of the logits' standard deviation")
    if not difference < 0.25:
        raise SystemExit("the compiled model differs from the eager one by more than rounding")


if __name__ == "__main__":
    main()
