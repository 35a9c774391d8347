"""Capture the ATen graphs that our passes see: at ``inner_compile``, and in Inductor's post-grad pre pass."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

Level = Literal["inner", "post_grad"]


class _Captured(Exception):
    """Leaves the compiler as soon as the graph is in hand, before any code is generated."""


def _captured(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, _Captured):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def _stop_when_captured() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Dynamo wraps what a backend raises
        if not _captured(error):
            raise


def _backend(level: Level, graphs: list[fx.GraphModule]) -> Callable[[fx.GraphModule, Sequence[Any]], Any]:
    from torch._functorch import config as functorch_config
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def keep(gm: fx.GraphModule) -> None:
        with unset_fake_temporarily():  # which would make the copies of constants fake
            graphs.append(copy.deepcopy(gm))
        raise _Captured

    def inner(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        if level == "inner":
            keep(gm)
        return compile_fx_inner(gm, example_inputs, **kwargs)

    def post_grad(graph: fx.Graph) -> None:
        assert graph.owning_module is not None
        keep(graph.owning_module)

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        patches: dict[str, Any] = {"fx_graph_cache": False}
        if level == "post_grad":
            patches["post_grad_custom_pre_pass"] = post_grad
        with config.patch(patches), functorch_config.patch(enable_autograd_cache=False):
            return compile_fx(gm, example_inputs, inner_compile=inner)

    return backend


def capture(
    model: torch.nn.Module | Callable[..., Any],
    *inputs: Any,
    dynamic: bool | None = False,
    level: Level = "inner",
    mark_dynamic: bool = False,
    **kwargs: Any,
) -> fx.GraphModule:
    """The inference graph of ``model(*inputs, **kwargs)`` at ``level``, as one graph.

    ``mark_dynamic`` marks dim 1 (dim 0 of 1-D inputs) of each tensor input dynamic, and nothing else.
    """
    torch._dynamo.reset()
    graphs: list[fx.GraphModule] = []
    if mark_dynamic:
        for value in inputs:
            if isinstance(value, torch.Tensor):
                torch._dynamo.mark_dynamic(value, min(1, value.dim() - 1))
    compiled = torch.compile(model, backend=_backend(level, graphs), dynamic=dynamic, fullgraph=True)
    with torch.no_grad(), _stop_when_captured(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled(*inputs, **kwargs)
    torch._dynamo.reset()
    (graph,) = graphs
    return graph
