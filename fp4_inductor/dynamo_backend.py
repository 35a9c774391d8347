"""The ``fp4moe`` door: ``torch.compile(model, backend="fp4moe", options={...})``.

Everything but the MoE blocks is Inductor's: this wraps the ``inner_compile`` of ``compile_fx``, where the
graph is functional and decomposed and Inductor's cache has not been asked yet.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .device import DeviceInfo
from .emit import fused_calls
from .errors import UnmatchedError
from .exact_weights import references, values_at_hand
from .graph_breaks import report_broken_experts
from .input_names import name_inputs, names_of_inputs
from .lowering_pass import Lowering, fold_and_compile, lower
from .options import Options, split_options
from .probe import forget_trials
from .report import LoweringReport, dump_graph, dump_report

logger = logging.getLogger(__name__)


def fp4moe(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **_unused: Any,
) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor, its FP4 MoE blocks lowered to fused ops.

    Args:
        mode: as for Inductor. ``torch.compile`` refuses ``mode`` beside ``options``; then say
            ``options={"mode": ...}``.
        options: ``fp4moe.*`` keys are fields of ``Options``; the rest is Inductor's.

    Raises:
        UnknownNameError, InvalidOptionError: a bad ``fp4moe.*`` option.
        NoBackendError, UnmatchedError: a wish that cannot be met, see ``Options``.
    """
    ours, inductors = split_options(options)
    mode = inductors.pop("mode", mode)
    return compile_with(gm, example_inputs, ours, mode=mode, inductor_options=inductors)


def compile_with(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    *,
    mode: str | None = None,
    inductor_options: Mapping[str, Any] | None = None,
    device: DeviceInfo | None = None,
    on_report: Callable[[LoweringReport], None] | None = None,
    generate_code: bool = True,
) -> Callable[..., Any]:
    """``fp4moe`` with the doors' extras.

    Args:
        device: choose kernels for this device instead of the one that holds the activations.
        on_report: is given each graph's report.
        generate_code: False stops after lowering, tries no kernel and runs the graph as written.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    wrapper = torch._TorchCompileInductorWrapper(mode=mode, options=dict(inductor_options or {}), dynamic=None)
    patches = {**wrapper.config, **_our_patches(options, wrapper.config)}
    if any(isinstance(value, torch.Tensor) and value.is_meta for value in example_inputs):
        patches["joint_graph_constant_folding"] = False  # on the meta device it takes every value for a constant
    user_tuning = wrapper.config.get("coordinate_descent_tuning", config.coordinate_descent_tuning)
    inner = functools.partial(
        _inner_compile,
        options=options,
        device=device,
        on_report=on_report,
        generate_code=generate_code,
        input_names=names_of_inputs(gm),
        inputs=references(example_inputs),
        later_patches={"coordinate_descent_tuning": user_tuning},
    )
    # A hit in AOTAutograd's cache never comes back to us, so where a report is owed it stays off.
    # A bundled cache would try to store our callable.
    use_cache = functorch_config.enable_autograd_cache and generate_code and not functorch_config.bundled_autograd_cache
    with functorch_config.patch(enable_autograd_cache=use_cache):
        compiled = compile_fx(gm, list(example_inputs), inner_compile=inner, config_patches=patches)
    assert callable(compiled)  # text only where a package is written, which has another entry
    return compiled


def _our_patches(options: Options, user: Mapping[str, Any]) -> dict[str, Any]:
    from torch._inductor import config

    from .post_grad_pass import CacheKeyPass

    users_pass = user.get("post_grad_custom_pre_pass", config.post_grad_custom_pre_pass)
    return {
        "post_grad_custom_pre_pass": CacheKeyPass(options, users_pass),
        # Freezing would turn packed weights into dense constants before anybody can recognise them.
        "freezing": False,
        # It makes AOTAutograd decompose a gathered bmm into mul and sum on CUDA, which hides the expert
        # GEMM; it is given back before Inductor generates code.
        "coordinate_descent_tuning": False,
    }


def _inner_compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options,
    device: DeviceInfo | None,
    on_report: Callable[[LoweringReport], None] | None,
    generate_code: bool,
    input_names: Sequence[str],
    inputs: Sequence[weakref.ref[torch.Tensor] | None],
    later_patches: dict[str, Any],
    **kwargs: Any,
) -> Any:
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    compile_inner = config.patch(later_patches)(compile_fx_inner)
    name_inputs(gm.graph, input_names)
    as_written = None if generate_code else fx.GraphModule(gm, _copy_graph(gm))
    lowering = None
    if _may_rewrite(gm, kwargs, on_report):
        lowering = _lower(gm, options, device, generate_code, values_at_hand(gm.graph, inputs))
    if lowering is not None:
        broken = report_broken_experts(gm.graph, lowering.report)
        if broken is not None and options.strict:
            raise UnmatchedError("lowering with fp4moe.strict", needed="experts in one graph", got=str(broken))
        if on_report is not None:
            on_report(lowering.report)
        elif broken is not None:
            _warn_once(broken)
    if as_written is not None:
        return make_boxed_func(as_written.forward)
    if lowering is None or not lowering.report.num_lowered:
        return compile_inner(gm, example_inputs, **kwargs)
    static_input_idxs = kwargs.pop("static_input_idxs", ())
    compile_graph = functools.partial(config.patch(_outside_cuda_graphs(gm.graph))(compile_inner), **kwargs)
    release = options.release_original_weights
    return fold_and_compile(gm, example_inputs, static_input_idxs, lowering, compile_graph, release_originals=release)


def _outside_cuda_graphs(graph: fx.Graph) -> dict[str, Any]:
    """Keep GPU calls that read a scalar on the host out of CUDA graphs, which would repeat its first value."""
    from torch._inductor import config

    ops = {
        op
        for node, op in fused_calls(graph)
        if node.meta["val"].is_cuda and any(arg.meta["val"].device.type == "cpu" for arg in node.all_input_nodes)
    }
    return {"custom_should_partition_ops": [*config.custom_should_partition_ops, *sorted(ops)]} if ops else {}


def _lower(
    gm: fx.GraphModule,
    options: Options,
    device: DeviceInfo | None,
    try_kernels: bool,
    values: Mapping[fx.Node, torch.Tensor],
) -> Lowering:
    dump_graph("FP4MOE BEFORE", gm)
    lowering = lower(gm.graph, options, device, try_kernels=try_kernels, values=values)
    gm.recompile()
    dump_report(lowering.report)
    return lowering


def _may_rewrite(
    gm: fx.GraphModule, kwargs: Mapping[str, Any], on_report: Callable[[LoweringReport], None] | None
) -> bool:
    """Only whole inference graphs: a fused op has no gradient."""
    from torch._inductor import config

    from .patterns.packed import packed_roots

    if kwargs.get("is_backward", False):
        return False
    if kwargs.get("is_inference", False) and config.use_post_grad_passes:
        return True
    if anchors := packed_roots(gm.graph):
        cause = (
            "a graph that needs gradients is compiled as written; "
            "call the model under torch.no_grad() or torch.inference_mode()"
            if not kwargs.get("is_inference", False)
            else 'mode="lite" skips graph passes, so the graph is compiled as written'
        )
        note = f"{len(anchors)} FP4 weights found, but {cause}"
        _warn_once(note)
        if on_report is not None:
            on_report(LoweringReport(num_graphs=1, notes=[note]))
    return False


@functools.cache
def _warn_once(message: object) -> None:
    logger.warning("%s", message)


def _copy_graph(gm: fx.GraphModule) -> fx.Graph:
    graph = fx.Graph()
    output = graph.graph_copy(gm.graph, {})
    graph.output(output)
    return graph


def _reset() -> None:
    _warn_once.cache_clear()
    forget_trials()
    if trees := sys.modules.get("torch._inductor.cudagraph_trees"):
        trees.reset_cudagraph_trees()


fp4moe.reset = _reset  # type: ignore[attr-defined]  # torch._dynamo.reset() calls it
