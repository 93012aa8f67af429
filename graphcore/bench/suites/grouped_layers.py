"""Whole layers of suite grouped: routes, both products, SwiGLU and the weighted sum of each token.

Ours in the nodes that a captured layer has, against the ways of transformers' own experts; what the
router chose is given to both. Results are compared with float64 for a few tokens.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from graphcore_kernels import moe_grouped_gemm, read_fault, route_plan
from graphcore_kernels.route_layout import Shapes, output_shapes, table_shapes

from graphcore.bench.suites.grouped_cases import DENSE, READ, Routing, Shape, draw
from graphcore.bench.suites.grouped_operands import call_count, spread
from graphcore.bench.suites.grouped_ways import Product
from graphcore.bench.targets import Target
from graphcore.driver import Driver, Stream
from graphcore.errors import ConfigurationError, GraphcoreError

GROUPED_EXPERTS, BATCHED_EXPERTS, EAGER_EXPERTS = (
    f"transformers {name}" for name in ("grouped_mm", "batched_mm", "eager")
)

_TOKENS, _SMALL_TOKENS = (1, 64, 4096), (5,)
_MOST_READ = 512
_CHECKED = 6  # tokens
_TARGET = Target(vs_best_peer=1.0)
_BOUND = 2e-2  # of bfloat16 in between
_MOST_GATHERED = 1 << 33  # bytes of weights that batched_mm copies together


@dataclass(frozen=True, slots=True)
class LayerCase:
    """A layer of ``shape.experts`` experts, ``shape.depth`` wide, each ``shape.columns`` inside."""

    shape: Shape
    tokens: int
    target: Target = _TARGET
    skew: str = "uniform"
    precision: str = "bf16"

    @property
    def name(self) -> str:
        return f"{self.shape.name} T={self.tokens}"

    @property
    def bound(self) -> str:
        """READ or DENSE."""
        return READ if self.tokens <= _MOST_READ else DENSE

    @property
    def flops(self) -> int:
        """Of a call, in its three matrices."""
        return 6 * self.tokens * self.shape.top_k * self.shape.depth * self.shape.columns

    def weight_bytes(self, experts_hit: float) -> float:
        """Of the experts that are hit."""
        return experts_hit * 3 * self.shape.depth * self.shape.columns * 2


def layer_cases(*, small: bool = False) -> list[LayerCase]:
    """All cases; ``small``: for the emulated driver."""
    sizes = (8, 3, 32, 16) if small else (128, 8, 2048, 768)
    shape = Shape("qwen3-layer", *sizes)
    return [LayerCase(shape, tokens) for tokens in (_SMALL_TOKENS if small else _TOKENS)]


@dataclass(frozen=True)
class LayerCall:
    """One layer with its weights, rows and routes.

    Args:
        case: Which.
        routing: What the router chose.
        ids: The same on the device.
        x: ``[tokens, depth]``.
        scale: ``[tokens, top_k]``: the router's weights.
        gate_up: ``[experts, 2 * columns, depth]``, all of gate first.
        down: ``[experts, depth, columns]``.
    """

    case: LayerCase
    routing: Routing
    ids: torch.Tensor
    x: torch.Tensor
    scale: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    def error(self, out: torch.Tensor) -> float:
        """Of a result against float64 for some tokens; infinite with a NaN in it."""
        if not bool(torch.isfinite(out).all()):
            return float("inf")
        tokens = spread(self.case.tokens, _CHECKED)
        expected = torch.stack([self._token(token) for token in tokens])
        return float((out[tokens].double() - expected).norm() / expected.norm())

    def _token(self, token: int) -> torch.Tensor:
        x, parts = self.x[token].double(), []
        for choice, expert in enumerate(self.routing.ids[token].tolist()):
            gate, up = (self.gate_up[expert].double() @ x).chunk(2)
            inner = torch.nn.functional.silu(gate) * up * self.scale[token, choice].double()
            parts.append(self.down[expert].double() @ inner)
        return torch.stack(parts).sum(0)


class LayerOperands:
    """Calls of a case on rotated layers; as :class:`GroupedOperands` for products."""

    def __init__(self, case: LayerCase, device: str, cached: int) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(29)
        first = draw(case, generator)
        needed = case.weight_bytes(first.hit)
        layers = [self._weights(device) for _ in range(max(1, -(-cached // int(needed))))]
        count = max(len(layers), call_count(needed, case.flops, device))
        self.calls = [
            self._call(first if at == 0 else draw(case, generator), layers[at % len(layers)])
            for at in range(count)
        ]

    @property
    def experts_hit(self) -> float:
        """Of a call, on average."""
        return sum(call.routing.hit for call in self.calls) / len(self.calls)

    def check(self, name: str, outs: Sequence[torch.Tensor], run: Callable[[], object]) -> float:
        """As of :class:`GroupedOperands`."""
        for out in outs:
            out.fill_(float("nan"))
        if outs[0].is_cuda:
            torch.cuda.synchronize(outs[0].device)
        run()
        error = max(self.calls[at].error(outs[at]) for at in (0, -1))
        if not error <= _BOUND:
            raise GraphcoreError(
                f"bench grouped: {self.case.name}: arm {name}: expected an error of {_BOUND:g} at "
                f"most against float64, got {error:g}"
            )
        return error

    def _weights(self, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self.case.shape
        options: Any = {"dtype": torch.bfloat16, "device": device}
        gate_up = torch.randn(shape.experts, 2 * shape.columns, shape.depth, **options)
        down = torch.randn(shape.experts, shape.depth, shape.columns, **options)
        return gate_up.mul_(shape.depth**-0.5), down.mul_(shape.columns**-0.5)

    def _call(self, routing: Routing, layer: tuple[torch.Tensor, torch.Tensor]) -> LayerCall:
        options: Any = {"dtype": torch.bfloat16, "device": layer[0].device}
        return LayerCall(
            case=self.case,
            routing=routing,
            ids=routing.ids.to(layer[0].device),
            x=torch.randn(self.case.tokens, self.case.shape.depth, **options),
            scale=torch.rand(routing.ids.shape, **options).softmax(dim=1),
            gate_up=layer[0],
            down=layer[1],
        )


def ours(driver: Driver, stream: Stream, calls: Sequence[LayerCall]) -> list[Product]:
    """Four nodes: routes, gate and up with SwiGLU, down, and the sum of each token's rows."""
    del stream
    return [_ours(driver, call) for call in calls]


def _ours(driver: Driver, call: LayerCall) -> Product:
    shape, device = call.case.shape, call.x.device
    tables = _tensors(table_shapes(shape.experts, shape.experts), device)
    for name in ("slot_for_expert", "expert_for_slot"):  # every expert is at home
        tables[name].copy_(torch.arange(shape.experts))
    tables["is_open"].fill_(1)
    routes = _tensors(output_shapes(shape.experts, *call.ids.shape), device)
    plan = route_plan.plan(call.ids, tables, routes, weights=call.scale)
    inner = call.x.new_empty(call.ids.numel(), shape.columns)
    out, error = torch.empty_like(call.x), torch.zeros(1, dtype=torch.int32, device=device)
    where = (routes["offsets"], routes["slots"])
    up = moe_grouped_gemm.plan(
        call.x, call.gate_up, *where, inner, gather=routes["gather"], activation="swiglu",
        error=error, driver=driver,
    )  # fmt: skip
    down = moe_grouped_gemm.plan(
        inner, call.down, *where, out, scale=routes["scale"], scatter=routes["scatter"],
        error=error, driver=driver,
    )  # fmt: skip

    def launch(stream: Stream) -> None:
        for each in (plan, up, down):
            each.launch(stream)

    def check() -> None:
        fault = read_fault(int(error))
        if fault is not None or int(routes["report"][0]):
            raise GraphcoreError(f"bench grouped: {call.case.name}: {fault}, {routes['report']}")

    return Product(launch, out, check)


def _tensors(shapes: Shapes, device: torch.device) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
        for name, (dtype, shape) in shapes.items()
    }


def experts_of(implementation: str) -> Any:
    """The way of transformers' experts of that name, of the architecture Qwen3-MoE."""

    def way(driver: Driver, stream: Stream, calls: Sequence[LayerCall]) -> list[Product]:
        del driver, stream
        gathered = calls[0].case.weight_bytes(calls[0].ids.numel())
        if implementation == "batched_mm" and gathered > _MOST_GATHERED:
            raise ConfigurationError(
                f"batched_mm: expected weights of {_MOST_GATHERED >> 30} GiB at most, gathered "
                f"for every route, got {gathered / (1 << 30):.0f}"
            )
        return [_experts(call, implementation) for call in calls]

    return way


def _experts(call: LayerCall, implementation: str) -> Product:
    family = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    shape = call.case.shape
    config = importlib.import_module("transformers").Qwen3MoeConfig(
        hidden_size=shape.depth,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        moe_intermediate_size=shape.columns,
    )
    config._experts_implementation = implementation
    with torch.device("meta"):
        experts = family.Qwen3MoeExperts(config)
    for name, weights in (("gate_up_proj", call.gate_up), ("down_proj", call.down)):
        setattr(experts, name, torch.nn.Parameter(weights, requires_grad=False))

    def launch(stream: Stream) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = experts(call.x, call.ids, call.scale)
        return found

    return Product(launch)


LAYER_PEERS: Mapping[str, Any] = {
    name: experts_of(name.split()[1]) for name in (GROUPED_EXPERTS, BATCHED_EXPERTS, EAGER_EXPERTS)
}
