"""Running pieces of graphs: sizes that follow, dtypes that do not, and what must not be run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from capture import capture
from fp4_inductor.patterns.probing import cone, evaluate, grouped_mm
from fp4_inductor.patterns.resizing import probe_shapes, regroup
from fp4_inductor.patterns.steps import close
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fp4_inductor.matching import NoMatch

Tensor = torch.Tensor


def traced(fn: Callable[..., Tensor], *inputs: Tensor) -> tuple[fx.Node, list[fx.Node]]:
    functional = torch.func.functionalize(lambda *args: fn(*args), remove="mutations_and_views")
    graph = make_fx(functional, tracing_mode="fake")(*inputs).graph
    (result,) = next(iter(reversed(graph.nodes))).args
    return result, [node for node in graph.nodes if node.op == "placeholder"]


def run(fn: Callable[..., Tensor], traced_with: Tensor, value: Tensor, *, exact: bool = False) -> Tensor:
    result, (x,) = traced(fn, traced_with)
    return evaluate([result], {x: value}, exact=exact)[0]


@pytest.mark.parametrize(
    ("old_in", "new_in", "old_out", "new_out"),
    [((128, 6, 4), (2, 6, 4), (768, 4), (12, 4)), ((768, 4), (12, 4), (128, 6, 4), (2, 6, 4)),
     ((8, 48, 3, 32), (2, 24, 3, 32), (8, 48, 96), (2, 24, 96)), ((32, 10), (8, 10), (16, 2, 10), (4, 2, 10)),
     ((1, 32, 10), (1, 8, 10), (32, 1, 10), (8, 1, 10)), ((5,), (5,), (1, 5, 1), (1, 5, 1)), ((), (), (1,), (1,)),
     ((6, 1), (3, 1), (6,), (3,))],
)  # fmt: skip
def test_views_follow_their_input(
    old_in: tuple[int, ...], new_in: tuple[int, ...], old_out: tuple[int, ...], new_out: tuple[int, ...]
) -> None:
    assert tuple(regroup(old_in, new_in, old_out)) == new_out


def test_views_that_cannot_follow() -> None:
    with pytest.raises(NoMatch, match="cannot become"):
        regroup((97 * 3, 10), (64, 10), (97, 3, 10))


@pytest.mark.parametrize("shape", [(4, 9), (4096, 9), (97, 9), (8, 8192, 9), (1, 8192, 9)], ids=str)
def test_probe_shapes_are_small_first(shape: tuple[int, ...]) -> None:
    first, *others = probe_shapes(shape, 64)
    assert torch.Size(first[:-1]).numel() <= 64
    assert all(made[-1] == 9 and len(made) == len(shape) for made in (first, *others))


def elementwise(x: Tensor) -> Tensor:
    return (x.view(32, 2, 5) * 2).transpose(1, 2).reshape(64, 5).softmax(-1)


def test_row_wise_pieces_run_on_fewer_rows() -> None:
    few = torch.randn(4, 5, dtype=torch.float64)
    torch.testing.assert_close(
        run(elementwise, torch.randn(64, 5), few), (few * 2).view(2, 2, 5).mT.reshape(4, 5).softmax(-1)
    )


@pytest.mark.parametrize(
    "fn",
    [lambda x: x.flip(0), lambda x: x.roll(4, 0), lambda x: x.softmax(0), lambda x: x.cumsum(0), lambda x: x[:4],
     lambda x: x[0], lambda x: x[[1, 0]], lambda x: x - x.mean(), lambda x: x + torch.arange(64)[:, None],
     lambda x: torch.cat((x[32:], x[:32])), lambda x: x * torch.eye(64)[:, :1], lambda x: x.sort(0).values,
     lambda x: torch.gather(torch.rand(64, 5).new_ones(64, 5), 1, (x > 0).long()), lambda x: x.t() @ x],
)  # fmt: skip
def test_pieces_that_tell_rows_apart_do_not(fn: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(NoMatch):
        run(fn, torch.randn(64, 5), torch.randn(4, 5))
    result, (x,) = traced(fn, torch.randn(64, 5))
    if all(node.op == "placeholder" or "rand" not in str(node.target) for node in cone([result], [x])):
        evaluate([result], {x: torch.randn(64, 5)})  # at full size they are as good as any


def test_casts_do_nothing_in_a_formula_and_all_in_an_exact_run() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).float() + torch.full((), 1 / 3)

    value = torch.randn(7)
    assert run(fn, value, value).dtype == torch.float64
    torch.testing.assert_close(run(fn, value, value.double()), value.double() + 1 / 3, rtol=1e-15, atol=0)
    assert torch.equal(run(fn, value, value, exact=True), fn(value))


def test_narrow_floats_and_bits_belong_to_no_formula() -> None:
    with pytest.raises(NoMatch, match="rounds to"):
        run(lambda x: x.to(torch.float8_e4m3fn).float(), torch.randn(3), torch.randn(3))
    with pytest.raises(NoMatch, match="reinterprets"):
        run(lambda x: x.view(torch.int32).float(), torch.randn(3), torch.randn(3))


def test_uninitialised_memory_shows() -> None:
    def fn(x: Tensor) -> Tensor:
        out = torch.empty(4)
        out[:2] = x[:2]
        return out

    value = torch.randn(4)
    assert run(fn, value, value).isnan().tolist() == [False, False, True, True]


@pytest.mark.parametrize("chosen", ["default", "mode"])
def test_pieces_run_on_the_cpu_whatever_device_is_the_default(chosen: str) -> None:
    result, (x,) = traced(lambda x: torch.cat((x, torch.empty(1), torch.full((1,), 2.0))), torch.randn(3))
    if chosen == "default":
        torch.set_default_device("meta")
    try:
        with torch.device("meta") if chosen == "mode" else contextlib.nullcontext():
            (value,) = evaluate([result], {x: torch.ones(3, device="cpu")})
    finally:
        torch.set_default_device(None)
    assert value.nan_to_num(7.0).tolist() == [1.0, 1.0, 1.0, 7.0, 2.0]


def test_unforeseen_failures_are_no_matches() -> None:
    result, (x, y) = traced(lambda x, y: x @ y, torch.randn(3, 4), torch.randn(4, 5))
    with pytest.raises(NoMatch, match="cannot evaluate mm"):
        evaluate([result], {x: torch.randn(3, 4), y: torch.ones(4, 5, dtype=torch.int64)})
    with pytest.raises(NoMatch, match="is an input"):
        evaluate([result], {x: torch.randn(3, 4)})


def test_sizes_that_the_graph_computes() -> None:
    graph = capture(lambda x: torch.relu(x).reshape(x.shape[0] * 2, -1) + x.shape[0], torch.randn(6, 8), dynamic=True)
    (result,) = next(iter(reversed(graph.graph.nodes))).args[0]
    (relu,) = (node for node in graph.graph.nodes if "relu" in str(node.target))
    x = torch.randn(6, 8, dtype=torch.float64)
    assert torch.equal(evaluate([result], {relu: x})[0], x.reshape(12, -1) + 6)
    symbols = dict.fromkeys(relu.meta["val"].shape[0].node.expr.free_symbols, 10)
    x = torch.randn(10, 8, dtype=torch.float64)
    assert torch.equal(evaluate([result], {relu: x}, symbols=symbols)[0], x.reshape(20, -1) + 10)


def test_grouped_gemm() -> None:
    x, weight = torch.randn(9, 4, dtype=torch.float64), torch.randn(3, 4, 5, dtype=torch.float64)
    out = grouped_mm(x, weight, torch.tensor([2, 2, 7], dtype=torch.int32))
    torch.testing.assert_close(out[:7], torch.cat((x[:2] @ weight[0], x[2:7] @ weight[2])))
    assert out[7:].isnan().all()


def test_nothing_is_close_to_infinity_or_nan() -> None:
    one, infinity, nan = torch.ones(1), torch.full((1,), float("inf")), torch.full((1,), float("nan"))
    assert close(one, one + 1e-9)
    assert close(infinity, infinity)
    assert not close(one, infinity)
    assert not close(infinity, one)
    assert not close(one, -infinity)
    assert not close(nan, one)
    assert not close(one, nan)
    assert not close(one, one + 1e-5)
