"""moe_grouped_gemm on torch tensors: a whole layer of experts, and real sizes on a device."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

import pytest
from graphcore_kernels import moe_grouped_gemm
from helpers.isolated import run_script

import graphcore
from graphcore.driver import open_driver

torch = pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def _device():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device that torch can use")


@dataclass
class Routes:
    """Routes sorted by expert: offsets, slots, and for each row its token, route and weight."""

    offsets: torch.Tensor
    slots: torch.Tensor
    tokens: torch.Tensor
    routes: torch.Tensor
    weights: torch.Tensor
    chosen: torch.Tensor


def route(tokens: int, experts: int, top_k: int, device: str, seed: int = 0) -> Routes:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator)
    weights, chosen = scores.softmax(-1).topk(top_k)
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=experts)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    slots = torch.randperm(experts, generator=generator)
    tables = (offsets, slots, order // top_k, order)
    offsets, slots, rows, order = (table.int().to(device) for table in tables)
    weights = weights.flatten()[order.cpu().long()].float().to(device)
    return Routes(offsets, slots, rows, order, weights, chosen.to(device))


class Layer:
    """A layer of experts: SwiGLU of gate and up, then down, combined for each token."""

    def __init__(self, tokens, experts, top_k, hidden, inner, dtype, device):
        def random(*shape):
            return torch.randn(*shape, device=device, dtype=torch.float32).to(dtype)

        self.sizes = (tokens, experts, top_k, device)
        self.x = random(tokens, hidden)
        self.up = random(experts, 2 * inner, hidden) / hidden**0.5
        self.down = random(experts, hidden, inner) / inner**0.5
        self.routes = route(*self.sizes)
        rows = tokens * top_k
        self.inner = torch.empty(rows, inner, dtype=dtype, device=device)
        self.out = torch.empty_like(self.x)
        size = moe_grouped_gemm.workspace_bytes(rows, hidden)
        self.workspace = torch.empty(size, dtype=torch.uint8, device=device)
        self.error = torch.zeros(1, dtype=torch.int32, device=device)

    def change(self, seed: int) -> None:
        """Other routes, tokens and slots, in place; poison where results go."""
        other = route(*self.sizes, seed)
        for name in ("offsets", "slots", "tokens", "routes", "weights", "chosen"):
            getattr(self.routes, name).copy_(getattr(other, name))
        self.x.copy_(torch.randn_like(self.x, dtype=torch.float32))
        self.inner.fill_(torch.nan)
        self.out.fill_(torch.nan)

    def plans(self, **options):
        routes = self.routes
        return (
            moe_grouped_gemm.plan(
                self.x, self.up, routes.offsets, routes.slots, self.inner,
                gather=routes.tokens, activation="swiglu", error=self.error, **options,
            ),
            moe_grouped_gemm.plan(
                self.inner, self.down, routes.offsets, routes.slots, self.out,
                scale=routes.weights, scatter=routes.routes, workspace=self.workspace,
                error=self.error, **options,
            ),
        )  # fmt: skip

    def expected(self):
        """float32 [tokens, hidden], expert by expert, from the elements in F32."""
        routes, (tokens, experts, top_k, _) = self.routes, self.sizes
        ends = routes.offsets.tolist()
        parts = torch.zeros(tokens * top_k, self.x.shape[1], device=self.x.device)
        for expert in range(experts):
            rows = slice(ends[expert], ends[expert + 1])
            if rows.start == rows.stop:
                continue
            slot = int(routes.slots[expert])
            x = self.x[routes.tokens[rows].long()].float()
            gate, up = (x @ self.up[slot].float().T).chunk(2, -1)
            inner = (torch.nn.functional.silu(gate) * up).to(self.x.dtype).float()
            result = (inner @ self.down[slot].float().T) * routes.weights[rows, None]
            parts[routes.routes[rows].long()] = result
        return parts.view(tokens, top_k, -1).sum(1)

    def check(self, tolerance: float) -> None:
        expected, got = self.expected(), self.out.float()
        error = torch.linalg.vector_norm(got - expected, dim=1)
        assert (error <= tolerance * torch.linalg.vector_norm(expected, dim=1)).all()
        assert self.error.item() == 0


TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 2e-6}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_layer_of_experts_on_the_cpu_is_what_torch_makes_of_it(dtype):
    layer = Layer(5, 8, 2, 64, 32, dtype, "cpu")
    plans = layer.plans(driver=open_driver("emulated"))
    for seed in (1, 2):
        layer.change(seed)
        for plan in plans:
            plan.launch()
        layer.check(TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.usefixtures("_device")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_layer_of_experts_is_captured_by_torchs_own_capture(dtype):
    layer = Layer(37, 16, 4, 256, 128, dtype, "cuda")
    plans = layer.plans()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for plan in plans:
            plan.launch()
    for seed in range(1, 5):
        layer.change(seed)
        graph.replay()
        torch.cuda.synchronize()
        layer.check(TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.usefixtures("_device")
def test_a_layer_of_experts_is_three_nodes_of_a_capture_and_follows_its_tables():
    layer = Layer(8, 16, 4, 256, 128, torch.bfloat16, "cuda")
    plans = layer.plans()
    with graphcore.capture() as capture:
        for plan in plans:
            plan.launch()
    with capture.graph as graph, graph.instantiate() as made:
        assert graph.snapshot().summary()["kernel"] == 3
        for seed in range(1, 5):
            layer.change(seed)
            torch.cuda.synchronize()
            made.launch()
            torch.cuda.synchronize()
            layer.check(TOLERANCE[torch.bfloat16])


SIZES = {
    "Qwen3-30B up": (128, 8, 2048, 1536),
    "Qwen3-30B down": (128, 8, 768, 2048),
    "Mixtral up": (8, 2, 4096, 28672),
}


@pytest.mark.gpu
@pytest.mark.usefixtures("_device")
@pytest.mark.parametrize("tokens", [1, 8, 64, 512])
@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("name", SIZES)
def test_real_sizes_are_what_torch_makes_of_them_expert_by_expert(name, layout, tokens):
    experts, top_k, depth, columns = SIZES[name]
    needed = 2 * experts * depth * columns
    if torch.cuda.mem_get_info()[0] < 2 * needed:
        pytest.skip(f"needs {2 * needed >> 20} MiB of free device memory")
    shape = (experts, columns, depth) if layout == "nk" else (experts, depth, columns)
    weights = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    routes = route(tokens, experts, top_k, "cuda")
    x = torch.randn(tokens, depth, device="cuda", dtype=torch.bfloat16)
    out = torch.full((tokens * top_k, columns), torch.nan, device="cuda", dtype=torch.bfloat16)
    error = torch.zeros(1, dtype=torch.int32, device="cuda")
    bits = []
    for _ in range(2):
        out.fill_(torch.nan)
        moe_grouped_gemm(
            x, weights, routes.offsets, routes.slots, out, gather=routes.tokens, layout=layout,
            error=error,
        )  # fmt: skip
        bits.append(out.clone())
    assert torch.equal(bits[0].view(torch.int16), bits[1].view(torch.int16))
    assert error.item() == 0
    ends = routes.offsets.tolist()
    for expert, slot in enumerate(routes.slots.tolist()):
        rows = slice(ends[expert], ends[expert + 1])
        wide = weights[slot].float()
        expected = x[routes.tokens[rows].long()].float() @ (wide.T if layout == "nk" else wide)
        size = torch.linalg.vector_norm(expected, dim=1)
        assert (torch.linalg.vector_norm(out[rows].float() - expected, dim=1) <= 4e-3 * size).all()


@pytest.mark.gpu
@pytest.mark.usefixtures("_device")
@pytest.mark.parametrize("form", ["wide", "tile64"])
def test_three_products_of_tf32_are_as_good_as_f32_over_a_long_depth(form):
    depth, columns = 7168, 512
    x = torch.randn(64, depth, device="cuda")
    weights = torch.randn(2, columns, depth, device="cuda")
    offsets = torch.tensor([0, 40, 64], dtype=torch.int32, device="cuda")
    expected = torch.cat(
        [x[:40].double() @ weights[0].double().T, x[40:].double() @ weights[1].double().T]
    )
    errors = {}
    for precision in ("ieee", "tf32x3", "tf32"):
        out = torch.full((64, columns), torch.nan, device="cuda")
        moe_grouped_gemm(x, weights, offsets, None, out, precision=precision, form=form)
        torch.cuda.synchronize()
        errors[precision] = float((out - expected).norm() / expected.norm())
    assert errors["ieee"] < 2e-6
    assert errors["tf32x3"] < 2e-6
    assert 1e-5 < errors["tf32"] < 1e-3


FIRST_USE = """
    import graphcore, torch
    from graphcore_kernels import moe_grouped_gemm
    x, weights = torch.ones(4, 64, device="cuda"), torch.ones(2, 8, 64, device="cuda")
    offsets = torch.tensor([0, 1, 4], dtype=torch.int32, device="cuda")
    out = torch.full((4, 8), torch.nan, device="cuda")
    error = torch.zeros(1, dtype=torch.int32, device="cuda")
    with graphcore.capture(mode="{mode}") as capture:
        moe_grouped_gemm(x, weights, offsets, None, out, error=error)
    with capture.graph as graph, graph.instantiate() as made:
        torch.cuda.synchronize()
        assert out.isnan().all()
        made.launch()
        torch.cuda.synchronize()
        assert (out == 64).all()
    print("replayed")
"""


@pytest.mark.gpu
@pytest.mark.usefixtures("_device")
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_the_first_use_in_a_process_may_be_inside_a_capture(mode):
    done = run_script(textwrap.dedent(FIRST_USE).format(mode=mode))
    assert done.stdout.strip() == "replayed", done.stderr


@pytest.mark.gpu
@pytest.mark.usefixtures("_device")
def test_inside_torchs_own_capture_nothing_is_allocated():
    layer = Layer(4, 4, 2, 64, 32, torch.bfloat16, "cuda")
    layer.plans()  # loads the kernels
    layer.workspace = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.x.add_(1)
        with pytest.raises(graphcore.CaptureError, match="workspace: expected a tensor inside"):
            layer.plans()
