"""The activation of products whose columns do not stand last, as those of column vectors ``[S, N, 1]`` do not."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ..matching import NoMatch
from .activation import IdentifiedActivation, identify_activation
from .graph_tools import aten, shape
from .probing import cone
from .signature import Memo


def identify_in_columns(
    result: fx.Node, gemm_outputs: Sequence[fx.Node], column: int, intermediate_size: int, memo: Memo
) -> IdentifiedActivation:
    """As ``identify_activation``, where columns are dimension ``column``, from the last, of products and result.

    Raises:
        NoMatch: it is none of the catalogue.
    """
    if column == -1:
        return identify_activation(result, gemm_outputs, intermediate_size, memo)
    rank = len(shape(result))
    column += rank
    if any(len(shape(output)) != rank for output in gemm_outputs):
        raise NoMatch("{} regroups the columns of {}", result.name, gemm_outputs[0].name, node=result)
    piece = fx.Graph()
    piece.owning_module = result.graph.owning_module
    copies: dict[fx.Node, fx.Node] = {}
    given: list[fx.Node] = []
    for place, output in enumerate(gemm_outputs):
        given.append(piece.placeholder(f"rows_{place}"))
        given[-1].meta["val"] = output.meta["val"].movedim(column, -1)
        back = [*range(column), rank - 1, *range(column, rank - 1)]
        copies[output] = piece.call_function(aten.permute.default, (given[-1], back))
        copies[output].meta["val"] = output.meta["val"]
    for node in cone([result], gemm_outputs):
        copies[node] = piece.node_copy(node, copies.__getitem__)
    last = [*(axis for axis in range(rank) if axis != column), column]
    end = piece.call_function(aten.permute.default, (copies[result], last))
    end.meta["val"] = result.meta["val"].movedim(column, -1)
    found = identify_activation(end, given, intermediate_size, memo)
    originals = {copy: node for node, copy in copies.items()}
    scalars = {operand: originals[node] for operand, node in found.scalars.items()}
    return IdentifiedActivation(found.spec, found.order, scalars)
