"""A mixture of experts in any of many spellings: each choice is made apart, so that they meet in every combination."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from fp4_inductor.formats import BlockFormat, get_format
from fp4_inductor.quant import dequantize
from fp4_inductor.spec import ActivationSpec, GateUpOrder

Tensor = torch.Tensor
HIDDEN, INNER, EXPERTS = 64, 96, 5
TABLE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]

FORMS = ("sorted", "gathered", "dense", "loop")
ROUTERS = ("softmax", "late softmax", "sigmoid", "biased sigmoid", "log softmax")
RENORMS = ("no", "sum", "sum and epsilon", "l1 norm")
ACTIVATIONS = ("silu", "x sigmoid(x)", "gelu", "tanh gelu", "relu squared", "limited", "alpha")
DEQUANTISATIONS = ("ours", "table", "ldexp")
COMBINES = ("index_add", "index_put", "scatter_add", "sum", "einsum", "bmm")
ORDERS = ("gate_up", "up_gate", "interleaved", "apart")


@dataclass(frozen=True)
class Spelling:
    form: str
    router: str
    renorm: str
    activation: str
    dequantisation: str
    combine: str
    order: str
    fmt: str
    top_k: int
    k_first: bool
    bias: bool
    weights_in_bf16: bool
    weigh_first: bool
    factor: float
    batch: int
    tokens: int
    dynamic: bool

    @property
    def activation_spec(self) -> ActivationSpec:
        knobs = {"limited": {"limit": 3.0}, "alpha": {"alpha": 1.702, "beta": 1.0, "limit": 7.0}}
        kinds = {"gelu": "gelu", "tanh gelu": "gelu_tanh", "relu squared": "relu2"}
        return ActivationSpec(kinds.get(self.activation, "silu"), **knobs.get(self.activation, {}))  # type: ignore[arg-type]

    @property
    def orders(self) -> tuple[GateUpOrder, ...]:
        """What w13 may be read as."""
        if self.order == "apart":
            return (GateUpOrder.GATE_UP, GateUpOrder.UP_GATE)
        return (GateUpOrder(self.order),)


class SpelledMoE(nn.Module):
    """``forward``: hidden ``[B, S, H]`` to the same shape."""

    def __init__(self, spelling: Spelling) -> None:
        super().__init__()
        self.spelling, self.fmt = spelling, get_format(spelling.fmt)
        self.gate = nn.Parameter(torch.randn(EXPERTS, HIDDEN).bfloat16(), requires_grad=False)
        self.register_buffer("correction", torch.randn(EXPERTS) * 0.1)
        first = {"w1": INNER, "w3": INNER} if spelling.order == "apart" else {"w13": 2 * INNER}
        for name, rows, columns in (*((name, rows, HIDDEN) for name, rows in first.items()), ("w2", HIDDEN, INNER)):
            self._hold(name, rows, columns)

    def _hold(self, name: str, rows: int, columns: int) -> None:
        fmt = self.fmt
        self.register_buffer(name, torch.randint(0, 256, (EXPERTS, rows, columns // 2), dtype=torch.uint8))
        low = 121 if fmt.scale_encoding == "e8m0" else 0x28
        scale = torch.randint(low, low + 5, (EXPERTS, rows, columns // fmt.block_size), dtype=torch.uint8)
        self.register_buffer(f"{name}_scale", scale.view(fmt.scale_dtype))
        self.register_buffer(f"{name}_global", torch.rand(EXPERTS, 1) + 0.5 if fmt.has_global_scale else None)
        self.register_buffer(f"{name}_bias", torch.randn(EXPERTS, rows).bfloat16() if self.spelling.bias else None)

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.reshape(-1, HIDDEN)
        ids, weights = self.route(tokens)
        run = {"sorted": self.sorted, "gathered": self.gathered, "dense": self.dense, "loop": self.loop}
        out = run[self.spelling.form](tokens, ids, weights)
        return hidden + out.reshape(hidden.shape).to(hidden.dtype)

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        spelling = self.spelling
        logits = F.linear(tokens, self.gate).float()
        if spelling.router == "late softmax":
            values, ids = logits.topk(spelling.top_k, dim=-1)
            weights = values.softmax(-1)
        else:
            score = {"softmax": lambda x: x.softmax(-1), "log softmax": lambda x: x.log_softmax(-1).exp()}
            scores = score.get(spelling.router, torch.sigmoid)(logits)
            choice = scores + self.correction if spelling.router == "biased sigmoid" else scores
            ids = choice.topk(spelling.top_k, dim=-1).indices
            weights = scores.gather(1, ids)
        if spelling.renorm == "sum":
            weights = weights / weights.sum(-1, keepdim=True)
        elif spelling.renorm == "sum and epsilon":
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        elif spelling.renorm == "l1 norm":
            weights = F.normalize(weights, p=1.0, dim=-1)
        weights = weights * spelling.factor
        return ids, weights.bfloat16() if spelling.weights_in_bf16 else weights

    def weight(self, name: str) -> Tensor:
        """``[E, N, K]``, or ``[E, K, N]`` where weights lie so."""
        codes, scale, factor = getattr(self, name), getattr(self, f"{name}_scale"), getattr(self, f"{name}_global")
        if self.spelling.dequantisation == "ours":
            found = dequantize(codes, scale, factor, self.fmt)
        else:
            found = _spelled_weight(codes, scale, factor, self.fmt, by_power=self.spelling.dequantisation == "ldexp")
        return found.mT.contiguous() if self.spelling.k_first else found

    def n_first(self, name: str) -> Tensor:
        return self.weight(name).mT if self.spelling.k_first else self.weight(name)

    def biased(self, name: str, rows: Tensor, ids: Tensor | None = None) -> Tensor:
        """``rows`` of the experts ``ids``, or of all experts, with their biases."""
        bias = getattr(self, f"{name}_bias")
        if bias is None:
            return rows
        return rows + (bias[:, None] if ids is None else bias[ids])

    def activate(self, project) -> Tensor:  # type: ignore[no-untyped-def]
        """The inner rows, from ``project(name)``."""
        order = self.spelling.order
        if order == "apart":
            return self.gated(project("w1"), project("w3"))
        both = project("w13")
        if order == "interleaved":
            return self.gated(both[..., ::2], both[..., 1::2])
        gate, up = both.chunk(2, dim=-1)
        return self.gated(gate, up) if order == "gate_up" else self.gated(up, gate)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        kind = self.spelling.activation
        if kind == "limited":
            return F.silu(gate.clamp(max=3.0)) * up.clamp(-3.0, 3.0)
        if kind == "alpha":
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            return (up + 1) * (gate * torch.sigmoid(gate * 1.702))
        acts = {
            "silu": F.silu,
            "x sigmoid(x)": lambda x: torch.sigmoid(x) * x,
            "gelu": F.gelu,
            "tanh gelu": lambda x: F.gelu(x, approximate="tanh"),
            "relu squared": lambda x: F.relu(x).pow(2),
        }
        return up * acts[kind](gate)

    def sorted(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        flat = ids.reshape(-1)
        perm = flat.argsort(stable=True)
        by_expert, token = flat[perm], perm // self.spelling.top_k
        offs = torch.histc(by_expert.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).cumsum(0).to(torch.int32)

        def project(name: str, rows: Tensor) -> Tensor:
            weight = self.weight(name) if self.spelling.k_first else self.weight(name).mT
            return self.biased(name, F.grouped_mm(rows, weight, offs=offs), by_expert)

        out = project("w2", self.activate(lambda name: project(name, x[token])))
        return self.combine(out, x, weights, perm)

    def gathered(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        flat = ids.reshape(-1)

        def project(name: str, rows: Tensor) -> Tensor:
            if self.spelling.k_first:
                out = torch.bmm(rows[:, None], self.weight(name)[flat])[:, 0]
            else:
                out = torch.bmm(self.weight(name)[flat], rows[..., None])[..., 0]
            return self.biased(name, out, flat)

        rows = x.repeat_interleave(self.spelling.top_k, dim=0)
        return self.combine(project("w2", self.activate(lambda name: project(name, rows))), x, weights, None)

    def combine(self, out: Tensor, x: Tensor, weights: Tensor, perm: Tensor | None) -> Tensor:
        """Rows ``[T*k, H]``, of slots ``perm`` if they are sorted, to ``[T, H]``."""
        top_k, how = self.spelling.top_k, self.spelling.combine
        if how in ("index_add", "index_put", "scatter_add"):
            token = torch.arange(x.shape[0] * top_k) // top_k if perm is None else perm // top_k
            flat = weights.reshape(-1) if perm is None else weights.reshape(-1)[perm]
            rows = (out * flat[:, None]).to(x.dtype)
            if how == "index_add":
                return torch.zeros_like(x).index_add_(0, token, rows)
            if how == "index_put":
                return torch.zeros_like(x).index_put((token,), rows, accumulate=True)
            return torch.zeros_like(x).scatter_add(0, token[:, None].expand(-1, HIDDEN), rows)
        if self.spelling.weigh_first:
            flat = weights.reshape(-1) if perm is None else weights.reshape(-1)[perm]
            slots = self.unsorted(out * flat[:, None], perm)
            return slots.sum(1)
        slots = self.unsorted(out, perm)
        if how == "sum":
            return (slots * weights[..., None]).sum(1)
        if how == "einsum":
            return torch.einsum("tkh,tk->th", slots, weights.to(slots.dtype))
        return torch.bmm(weights[:, None].to(slots.dtype), slots)[:, 0]

    def unsorted(self, rows: Tensor, perm: Tensor | None) -> Tensor:
        return (rows if perm is None else rows[perm.argsort()]).reshape(-1, self.spelling.top_k, HIDDEN)

    def dense(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        scores = torch.zeros(x.shape[0], EXPERTS, dtype=weights.dtype).scatter(1, ids, weights)

        def project(name: str, rows: Tensor) -> Tensor:
            return self.biased(name, torch.bmm(rows, self.n_first(name).mT))

        inner = self.activate(lambda name: project(name, x[None].expand(EXPERTS, -1, -1)))
        out = project("w2", inner)
        if self.spelling.combine in ("einsum", "bmm"):
            return torch.einsum("eth,te->th", out, scores.to(out.dtype))
        return (out * scores.mT[..., None]).sum(0)

    def loop(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for expert in range(EXPERTS):

            def project(name: str, rows: Tensor, expert: int = expert) -> Tensor:
                bias = getattr(self, f"{name}_bias")
                return F.linear(rows, self.n_first(name)[expert], None if bias is None else bias[expert])

            out = project("w2", self.activate(lambda name: project(name, x)))
            weight = (weights * (ids == expert)).sum(-1, keepdim=True)
            total = total + out * weight
        return total


def _spelled_weight(codes: Tensor, scale: Tensor, factor: Tensor | None, fmt: BlockFormat, *, by_power: bool) -> Tensor:
    table = torch.tensor(TABLE)
    values = table[torch.stack((codes & 15, codes >> 4), dim=-1).long()].flatten(-2)
    values = values.unflatten(-1, (-1, fmt.block_size))
    if fmt.scale_encoding == "e8m0" and by_power:
        values = torch.ldexp(values, scale.to(torch.int32)[..., None] - 127)
    elif fmt.scale_encoding == "e8m0":
        values = values * torch.exp2(scale.float() - 127)[..., None]
    else:
        values = values * scale.float()[..., None]
    values = values.flatten(-2)
    return (values if factor is None else values * factor[..., None]).bfloat16()
