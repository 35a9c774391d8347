"""CUDA graphs: captured calls follow their inputs and weights, share a device, and ask nothing of the host."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cuda_graphs import CapturedCall
from models import MoEStack, hidden_states, pack_experts, tiny_model, token_ids
from moe_cases import CLAMPED_SWIGLU, MoECase, make_case, poison_allocator
from test_dynamo_backend import WHOLE, assert_same_logits, logits
from tolerances import assert_close_per_token

from fp4_inductor.backends import get_backend
from fp4_inductor.device import DeviceInfo
from fp4_inductor.formats import FORMATS, MXFP4, NVFP4, BlockFormat
from fp4_inductor.plan import prepare, run_plan
from fp4_inductor.spec import GateUpOrder, Operand

pytestmark = pytest.mark.gpu
COUNTS = (1, 2, 3, 17, 64, 130, 1024)
GRAPHS = {**WHOLE, "mode": "reduce-overhead"}
PER_CALL = (Operand.HIDDEN, Operand.TOPK_IDS, Operand.TOPK_WEIGHTS)
formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)


class Block:
    """A fused call on prepared random weights: sizes of a real layer, few experts."""

    def __init__(self, fmt: BlockFormat, num_tokens: int, num_experts: int = 16, seed: int = 0) -> None:
        self.case: MoECase = make_case(
            fmt,
            num_tokens=num_tokens,
            num_experts=num_experts,
            top_k=4,
            hidden_size=1472,
            intermediate_size=736,
            activation=CLAMPED_SWIGLU,
            w13_order=GateUpOrder.INTERLEAVED,
            bias=True,
            seed=seed,
            device="cuda",
        )
        self.plan = get_backend("triton_w4a16").plan(self.case.spec, DeviceInfo.current(torch.device("cuda")))
        self.prepared = prepare(self.plan, self.case.operands)

    def __call__(self) -> torch.Tensor:
        return run_plan(self.plan, self.case.operands, self.prepared)

    def redraw(self, seed: int) -> None:
        """Other tokens and other experts, in the same memory."""
        rng = torch.Generator("cuda").manual_seed(seed)
        hidden, ids, weights = (self.case.operands[operand] for operand in PER_CALL)
        hidden.copy_(torch.randn(hidden.shape, generator=rng, device="cuda"))
        drawn = torch.rand(len(ids), self.case.spec.num_experts, generator=rng, device="cuda")
        ids.copy_(drawn.topk(ids.shape[1]).indices)
        weights.copy_(torch.rand(weights.shape, generator=rng, device="cuda"))


@contextmanager
def no_host_waits() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@formats
@pytest.mark.parametrize("num_tokens", COUNTS)
def test_replays_follow_their_inputs_bit_for_bit(num_tokens: int, fmt: BlockFormat) -> None:
    block = Block(fmt, num_tokens)
    graph = CapturedCall(block)
    for seed in range(4):
        block.redraw(seed)
        got = graph.replay().clone()
        assert torch.equal(got, block())
    assert_close_per_token(got, block.case.reference(), torch.bfloat16)


def test_replays_follow_all_tokens_to_one_expert_and_back() -> None:
    """From every expert used to one: numbers of tiles differ, grids do not."""
    block = Block(NVFP4, 130)
    graph = CapturedCall(block)
    ids = block.case.operands[Operand.TOPK_IDS]
    spread = ids.clone()
    for drawn in (torch.full_like(spread, 3), spread, torch.full_like(spread, -1), spread):
        ids.copy_(drawn)
        got = graph.replay().clone()
        assert torch.equal(got, block())
        assert bool((got == 0).all()) == bool((drawn < 0).all())


@formats
def test_replays_follow_weights_written_in_place(fmt: BlockFormat) -> None:
    block, other = Block(fmt, 3), Block(fmt, 3, seed=1)
    graph = CapturedCall(block)
    for _ in range(2):
        before = graph.replay().clone()
        for name, tensor in block.prepared.items():
            held = tensor.clone()
            tensor.copy_(other.prepared[name])
            other.prepared[name].copy_(held)
        after = graph.replay().clone()
        assert torch.equal(after, block())
        assert not torch.equal(after, before)


def test_graphs_alive_together_replay_in_any_order_on_two_streams() -> None:
    blocks = [Block(MXFP4, count, seed=count) for count in (2, 64, 1024)]
    graphs = [CapturedCall(block) for block in blocks]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    want = [block() for block in blocks]
    order = random.Random(0)
    for _ in range(10):
        torch.cuda.synchronize()
        for i in order.sample(range(3), 3):
            with torch.cuda.stream(streams[i % 2]):
                graphs[i].replay()
        torch.cuda.synchronize()
        assert all(torch.equal(graph.out, out) for graph, out in zip(graphs, want, strict=True))


@formats
@pytest.mark.parametrize("num_tokens", COUNTS)
def test_runs_repeat_bit_for_bit_beside_other_work(num_tokens: int, fmt: BlockFormat) -> None:
    """Work on another stream changes which program comes last."""
    block = Block(fmt, num_tokens)
    first, side = block(), torch.cuda.Stream()
    noise = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    for i in range(20):
        with torch.cuda.stream(side):
            for _ in range(i % 4):
                noise @ noise
        assert torch.equal(block(), first)
    torch.cuda.synchronize()


@pytest.mark.parametrize("num_tokens", COUNTS)
def test_calls_never_wait_for_the_device(num_tokens: int) -> None:
    block = Block(NVFP4, num_tokens)
    block()
    with no_host_waits():
        for _ in range(3):
            block()


@pytest.mark.parametrize("num_tokens", COUNTS)
def test_memory_is_bounded_by_activations_and_does_not_grow(num_tokens: int) -> None:
    """A pair's activation and product, the result, tables of the sort, and partial sums where programs share a block.

    Those are float32 [block, programs] of at most 1024 blocks of 128 x 16 with 8 programs each, and only where
    the pairs are few.
    """
    block = Block(MXFP4, num_tokens, num_experts=64)
    spec = block.case.spec
    block()
    poison_allocator()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        block()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    pairs = num_tokens * spec.top_k
    rows = spec.hidden_size + -(-spec.intermediate_size // 64) * 64
    tables = 4 * (4 * pairs + 4 * spec.num_experts + 2048) + 4 * 128 * (pairs // 128 + 1)
    shared = 4 * 1024 * 128 * 16 if pairs <= 256 else 0
    bound = 2 * (pairs * rows + num_tokens * spec.hidden_size) + tables + shared
    assert torch.cuda.max_memory_allocated() - before <= bound + 16 * 512  # the allocator's units


@contextmanager
def really_captured() -> Iterator[None]:
    """Inductor must not have fallen back to plain calls."""
    from torch._dynamo.utils import counters

    counters.clear()
    yield
    assert counters["inductor"]["cudagraph_skips"] == 0
    manager = torch._inductor.cudagraph_trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    assert manager is not None


def packed(family: str, fmt: str = "mxfp4", **kwargs: Any) -> torch.nn.Module:
    return pack_experts(tiny_model(family, **kwargs), fmt).cuda()


def stack(family: str = "qwen3_moe", fmt: str = "nvfp4", **kwargs: Any) -> torch.nn.Module:
    return MoEStack(packed(family, fmt, **kwargs))


def called(model: Callable[..., Any], hidden: torch.Tensor) -> torch.Tensor:
    torch.compiler.cudagraph_mark_step_begin()
    with torch.no_grad():
        return model(hidden).clone()  # type: ignore[no-any-return]


def assert_same_hidden(got: torch.Tensor, want: torch.Tensor) -> None:
    """Half of the tokens closely: rounding may send a token near a tie to another expert."""
    error = (got.double() - want.double()).norm(dim=-1) / want.double().norm(dim=-1)
    assert got.isfinite().all()
    assert float(error.median()) < 2e-2


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_a_decode_loop_under_cudagraph_trees(family: str, fmt: str) -> None:
    """Each step's tokens come from the last step's output."""
    model = packed(family, fmt)
    compiled = torch.compile(model, backend="fp4moe", options=GRAPHS)
    ids = token_ids(8, batch=4).cuda()
    with really_captured():
        for _ in range(10):
            torch.compiler.cudagraph_mark_step_begin()
            out = logits(compiled, ids)
            assert_same_logits(out, logits(model, ids), tolerance=0.2)
            ids = torch.cat([ids[:, 1:], out[:, -1:].argmax(-1)], dim=1)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_generation_with_a_static_cache(family: str) -> None:
    """A prefill and ten steps of one token; every step's logits are those of the whole sequence."""
    model = packed(family, use_cache=True)
    compiled = packed(family, use_cache=True)
    compiled.compile(backend="fp4moe", options=GRAPHS)
    with torch.no_grad():
        out = compiled.generate(
            token_ids(9).cuda(),
            max_new_tokens=10,
            min_new_tokens=10,
            do_sample=False,
            pad_token_id=0,
            cache_implementation="static",
            disable_compile=True,
            return_dict_in_generate=True,
            output_logits=True,
        )
    want = logits(model, out.sequences[:, :-1])[:, 8:]
    assert_same_logits(torch.stack(out.logits, dim=1).double(), want, tolerance=0.2)


@pytest.mark.parametrize("dynamic", [True, None], ids=["dynamic", "automatic"])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_token_counts_that_change_under_cudagraph_trees(family: str, dynamic: bool | None) -> None:
    from torch._dynamo.utils import counters

    model = stack(family)
    compiled = torch.compile(model, backend="fp4moe", dynamic=dynamic, options=GRAPHS)
    counts = [*COUNTS, *random.Random(1).sample(COUNTS * 2, 2 * len(COUNTS))]
    with really_captured():
        for seed, count in enumerate(counts):
            hidden = hidden_states(count, seed=seed).cuda()
            assert_same_hidden(called(compiled, hidden), called(model, hidden))
        assert counters["stats"]["unique_graphs"] <= 3  # one token, the first count, any count


def test_weights_and_biases_written_between_replays() -> None:
    model = stack("gpt_oss", layers=1)
    compiled = torch.compile(model, backend="fp4moe", options=GRAPHS)
    weights = dict(model.named_parameters()) | dict(model.named_buffers())
    codes = next(tensor for name, tensor in weights.items() if name.endswith("gate_up_proj_packed"))
    bias = next(tensor for name, tensor in weights.items() if name.endswith("down_proj_bias"))
    hidden = hidden_states(17).cuda()
    seen: list[torch.Tensor] = []
    for flipped in (0x88, 0x11, 0x99):
        outs = [called(compiled, hidden) for _ in range(3)]  # a warm-up, a capture and a replay at first
        for out in outs:
            assert_same_hidden(out, called(model, hidden))
        assert not any(torch.equal(outs[-1], old) for old in seen)
        seen += outs
        with torch.no_grad():
            codes.bitwise_xor_(flipped)
            bias.add_(0.25)


def test_two_models_take_turns() -> None:
    models = [stack(seed=seed) for seed in (1, 2)]
    compiled = [torch.compile(model, backend="fp4moe", options=GRAPHS) for model in models]
    order = random.Random(2)
    for step in range(16):
        i = order.randrange(2)
        hidden = hidden_states((3, 64)[step % 2], seed=step).cuda()
        assert_same_hidden(called(compiled[i], hidden), called(models[i], hidden))


@pytest.mark.parametrize("options", [WHOLE, GRAPHS], ids=["plain", "graphs"])
def test_compiled_calls_neither_wait_nor_grow(options: dict[str, Any]) -> None:
    compiled = torch.compile(stack(), backend="fp4moe", options=options)
    hidden = hidden_states(17).cuda()
    for _ in range(4):
        called(compiled, hidden)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with no_host_waits():
        for _ in range(50):
            called(compiled, hidden)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
