"""Folded weights stay true: each rule that keeps them so, on a graph with one counted re-layout."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn

from fp4_inductor.emit import PREPARED
from fp4_inductor.fold import PREPARED_WEIGHTS, FoldedCall, fold

library = torch.library.Library("fp4_inductor_test", "FRAGMENT")
library.define("relayout(Tensor w) -> Tensor")
runs: list[list[bool]] = []
"""One entry a run of the re-layout: which of the watched tensors were alive then."""
watched: list[weakref.ref[torch.Tensor]] = []


def relayout(w: torch.Tensor) -> torch.Tensor:
    runs.append([ref() is not None for ref in watched])
    return w.t().contiguous()


library.impl("relayout", relayout, "CompositeExplicitAutograd")
torch.library.register_fake("fp4_inductor_test::relayout", lambda w: w.new_empty(w.shape[::-1]), lib=library)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.ops.fp4_inductor_test.relayout(self.weight)


graphs: list[fx.GraphModule] = []


def folding_backend(gm: fx.GraphModule, example_inputs: list[Any], **_: Any) -> Callable[..., Any]:
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner(gm: fx.GraphModule, example_inputs: list[Any], **kwargs: Any) -> Any:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.fp4_inductor_test.relayout.default):
            node.meta[PREPARED] = "w"
        folding = fold(gm, example_inputs, kwargs["static_input_idxs"])
        graphs.append(gm)
        kwargs["static_input_idxs"] = list(folding.static_input_idxs)
        return FoldedCall(folding, compile_fx_inner(gm, list(folding.example_inputs), **kwargs))

    with functorch_config.patch(enable_autograd_cache=False):
        return compile_fx(gm, example_inputs, inner_compile=inner)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    runs.clear()
    watched.clear()
    graphs.clear()
    yield
    torch._dynamo.reset()


def check(compiled: Callable[..., torch.Tensor], layer: Layer, x: torch.Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), x @ layer.weight.t())


def newest_prepared() -> torch.Tensor:
    value = next(reversed(PREPARED_WEIGHTS._entries.values())).value
    assert value is not None
    return value


def test_relayout_runs_once_and_leaves_the_graph() -> None:
    layer = Layer()
    compiled = torch.compile(layer, backend=folding_backend)
    for _ in range(3):
        check(compiled, layer, torch.randn(5, 6 - 2))
    assert len(runs) == 1
    targets = [node.target for node in graphs[0].graph.nodes]
    assert torch.ops.fp4_inductor_test.relayout.default not in targets
    assert "fp4_prepared_0_w" in targets


def test_recompile_for_other_batch_sizes_shares_the_prepared_weight() -> None:
    layer = Layer()
    compiled = torch.compile(layer, backend=folding_backend)
    for batch in (3, 5, 9, 1):
        check(compiled, layer, torch.randn(batch, 4))
    assert len(graphs) >= 2
    assert len(runs) == 1


def test_second_model_of_the_same_class_gets_its_own_weights_without_recompiling() -> None:
    first, second = Layer(), Layer()
    compiled = [torch.compile(layer, backend=folding_backend) for layer in (first, second)]
    x = torch.randn(5, 4)
    check(compiled[0], first, x)
    check(compiled[1], second, x)
    check(compiled[0], first, x)
    assert len(runs) == 2
    assert len(graphs) <= 2


def test_in_place_update_is_seen() -> None:
    layer = Layer()
    compiled = torch.compile(layer, backend=folding_backend)
    check(compiled, layer, torch.randn(5, 4))
    layer.weight.add_(1)
    check(compiled, layer, torch.randn(5, 4))
    assert len(runs) == 2


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_is_seen(assign: bool) -> None:
    layer = Layer()
    compiled = torch.compile(layer, backend=folding_backend)
    check(compiled, layer, torch.randn(5, 4))
    layer.load_state_dict({"weight": torch.randn(6, 4)}, assign=assign)
    check(compiled, layer, torch.randn(5, 4))


def test_assigning_data_is_seen() -> None:
    layer = Layer()
    compiled = torch.compile(layer, backend=folding_backend)
    check(compiled, layer, torch.randn(5, 4))
    layer.weight.data = torch.randn(6, 4)
    check(compiled, layer, torch.randn(5, 4))
    assert len(runs) == 2


def test_an_update_that_cannot_be_seen_can_be_told() -> None:
    layer = Layer()
    compiled = torch.compile(layer, backend=folding_backend)
    check(compiled, layer, torch.randn(5, 4))
    layer.weight.data.copy_(torch.randn(6, 4))
    torch.autograd.graph.increment_version(layer.weight)
    check(compiled, layer, torch.randn(5, 4))
    assert len(runs) == 2


def test_a_stale_copy_is_freed_before_the_new_one_is_made() -> None:
    layer = Layer()
    compiled = torch.compile(layer, backend=folding_backend)
    check(compiled, layer, torch.randn(5, 4))
    watched.append(weakref.ref(newest_prepared()))
    layer.weight.add_(1)
    check(compiled, layer, torch.randn(5, 4))
    assert runs == [[], [False]]


def test_deleting_the_model_frees_the_prepared_weight_though_the_code_lives() -> None:
    gc.collect()  # models of earlier tests
    before = len(PREPARED_WEIGHTS)
    layer = Layer()
    compiled = torch.compile(layer, backend=folding_backend)
    check(compiled, layer, torch.randn(5, 4))
    assert len(PREPARED_WEIGHTS) == before + 1
    prepared = weakref.ref(newest_prepared())
    del layer, compiled
    gc.collect()
    assert prepared() is None
    assert len(PREPARED_WEIGHTS) == before


def test_one_graph_serves_layers_compiled_one_by_one() -> None:
    layers = [Layer() for _ in range(4)]
    x = torch.randn(5, 4)
    for layer in layers:
        layer.compile(backend=folding_backend)
    for _ in range(3):
        for layer in layers:
            check(layer, layer, x)
    assert len(runs) == 4


def test_a_weight_that_is_an_argument_is_not_folded() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ torch.ops.fp4_inductor_test.relayout(w)

    compiled = torch.compile(function, backend=folding_backend)
    for _ in range(2):
        x, w = torch.randn(5, 4), torch.randn(6, 4)
        torch.testing.assert_close(compiled(x, w), x @ w.t())
    assert torch.ops.fp4_inductor_test.relayout.default in [node.target for node in graphs[0].graph.nodes]


def test_works_under_inference_mode() -> None:
    with torch.inference_mode():
        layer = Layer()
    compiled = torch.compile(layer, backend=folding_backend)
    with torch.inference_mode():
        for _ in range(2):
            x = torch.randn(5, 4)
            torch.testing.assert_close(compiled(x), x @ layer.weight.t())


def test_a_warm_cache_serves_another_process_with_other_weights(tmp_path: Any) -> None:
    script = textwrap.dedent("""
        import sys, torch
        sys.path.insert(0, sys.argv[1])
        import test_fold as t
        torch.manual_seed(int(sys.argv[2]))
        layer = t.Layer()
        compiled = torch.compile(layer, backend=t.folding_backend)
        t.check(compiled, layer, torch.randn(5, 4))
        from torch._dynamo.utils import counters
        print("hits", counters["inductor"]["fxgraph_cache_hit"])
    """)
    folder = __file__.rpartition("/")[0]
    import os

    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    outputs = [
        subprocess.run(
            [sys.executable, "-c", script, folder, str(seed)], env=env, check=True, capture_output=True, text=True
        ).stdout
        for seed in (1, 2)
    ]
    assert outputs[0].split() == ["hits", "0"]
    assert outputs[1].split() == ["hits", "1"]
