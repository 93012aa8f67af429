"""What captures of products take of a device: one workspace for each graph that lives, no more.

The products split their long inner dimension over the device and add the parts up in the workspace
of cuBLAS: graphs that shared one and ran at once would give wrong sums.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.tensors import cuda_driver, device_of

import graphcore
from graphcore import CaptureError, Graph, GraphExec
from graphcore.driver import Driver, Stream
from graphcore.driver.lent_streams import lane_of
from graphcore.interop.torch_workspaces import KeptPool, Workspaces
from graphcore.testing import run_isolated

pytestmark = pytest.mark.gpu

INNER = 16384
MIB = 1 << 20
SMALLEST = 8 * MIB  # of what torch takes for a workspace, unless it is told
CLOSE: dict[str, float] = {"rtol": 1e-3, "atol": 0.5}  # of sums of some hundreds
_ROUNDS = 300


def factor(driver: Driver, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(64, INNER, generator=generator)
    return made.to(device_of(driver), dtype)


def products(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Several products after each other, so that runs at once overlap for a while."""
    total = torch.zeros(64, 64, device=x.device, dtype=x.dtype)
    for shift in range(8):
        total = total + x @ torch.roll(y, shift, 1).T
    return total


def workspaces_of(graph: Graph) -> list[tuple[int, int]]:
    """(address, bytes) of every workspace in memory that belongs to the graph's streams."""
    spans = []
    lanes = [lane_of(each.object) for each in graph.owners if isinstance(each.object, Stream)]
    for belonging in [each for lane in lanes if lane is not None for each in lane.belongings]:
        assert isinstance(belonging, (Workspaces, KeptPool))
        read = belonging._pool.pieces if isinstance(belonging, Workspaces) else belonging._pieces
        for piece in read():
            address = piece["address"]
            for block in piece["blocks"]:
                address = block.get("address", address)
                if block["state"] == "active_allocated" and block["size"] >= SMALLEST:
                    spans.append((address, block["size"]))
                address += block["size"]
    return spans


def settled(driver: Driver) -> None:
    gc.collect()
    driver.synchronize()
    torch.cuda.empty_cache()


def taken(driver: Driver) -> int:
    settled(driver)
    return driver.memory_info()[1] - driver.memory_info()[0]


def one_workspace(driver: Driver) -> int:
    """Bytes of one, with the segment beside it that cuBLASLt and small pieces take."""
    graph = captured_alone(driver, factor(driver, 0), factor(driver, 1))
    size = sum(size for _, size in workspaces_of(graph))
    assert size >= SMALLEST, "products of torch have a workspace"
    return size + 4 * MIB


@pytest.mark.exclusive
@pytest.mark.parametrize("warmup", [3, 0], ids=["warmed up", "cold"])
def test_captures_that_are_dropped_take_one_workspace_in_all(warmup: int) -> None:
    driver = cuda_driver()
    x, y = factor(driver, 0), factor(driver, 1)
    expected = products(x, y)
    allowed = one_workspace(driver)

    def capture_and_drop() -> None:
        graph = graphcore.capture_function(products, x, y, driver=driver, warmup=warmup)
        with graph.instantiate() as executable:
            graph.outputs.fill_(float("nan"))
            executable.launch()
            torch.testing.assert_close(graph.outputs, expected, **CLOSE)
        graph.close()

    before, reserved = taken(driver), torch.cuda.memory_reserved(driver.device)
    for _ in range(20):
        capture_and_drop()
    assert taken(driver) - before <= allowed
    assert torch.cuda.memory_reserved(driver.device) - reserved <= allowed
    assert driver.capture_streams.idle + driver.capture_streams.lent == 1


@pytest.mark.exclusive
@pytest.mark.parametrize("is_prepared", [True, False], ids=["prepared", "cold"])
def test_captures_that_break_take_one_workspace_in_all(is_prepared: bool) -> None:
    driver = cuda_driver()
    x, y = factor(driver, 0), factor(driver, 1)
    expected = products(x, y)

    def break_one() -> None:
        capture = graphcore.capture(driver=driver)
        if is_prepared:
            capture.expect_products()
        with pytest.raises(CaptureError), capture:
            products(x, y).sum().item()

    break_one()
    before, reserved = taken(driver), torch.cuda.memory_reserved(driver.device)
    for _ in range(8):
        break_one()
    assert taken(driver) - before < SMALLEST
    assert torch.cuda.memory_reserved(driver.device) - reserved < SMALLEST
    assert driver.capture_streams.idle == 1
    # what is captured there then works in memory that is its own, whatever torch forgets
    graph = captured_alone(driver, x, y)
    assert driver.capture_streams.idle == 0
    with graph.instantiate() as executable:
        others = forget_workspaces(driver)
        graph.outputs.fill_(float("nan"))
        executable.launch()
        torch.testing.assert_close(graph.outputs, expected, **CLOSE)
        assert all(bool(each.isnan().all()) for each in others), "it wrote memory of others"


@pytest.mark.exclusive
def test_streams_of_ones_own_take_a_workspace_each() -> None:
    """The control: without lent streams 6 captures take 6 workspaces."""
    driver = cuda_driver()
    x, y = factor(driver, 0), factor(driver, 1)
    one_workspace(driver)
    before = taken(driver)
    streams = [driver.stream(blocking=True) for _ in range(6)]
    for stream in streams:
        graphcore.capture_function(products, x, y, driver=driver, stream=stream).close()
    assert taken(driver) - before >= 5 * SMALLEST


@pytest.mark.exclusive
def test_a_step_that_multiplies_nothing_takes_no_workspace() -> None:
    driver = cuda_driver()
    x = torch.ones(1024, device=device_of(driver))
    graphs = [graphcore.capture_function(lambda: x * 2 + 1, driver=driver) for _ in range(4)]
    assert [workspaces_of(graph) for graph in graphs] == [[]] * 4
    assert [graph.memory_report().workspace_bytes for graph in graphs] == [0] * 4


def test_graphs_that_live_have_workspaces_of_their_own_unless_they_were_given_one_stream() -> None:
    driver = cuda_driver()
    x, y = factor(driver, 0), factor(driver, 1)

    def captured(**options: Any) -> Graph:
        return graphcore.capture_function(products, x, y, driver=driver, **options)

    first, second = captured(), captured()
    assert workspaces_of(first)
    assert workspaces_of(second)
    assert not set(workspaces_of(first)) & set(workspaces_of(second))
    (stream,) = (each.object for each in first.owners if isinstance(each.object, Stream))
    assert workspaces_of(captured(stream=stream)) == workspaces_of(first)  # as was asked


def run_at_once(executables: list[GraphExec], streams: list[Stream]) -> None:
    for _ in range(4):
        for executable, stream in zip(executables, streams, strict=True):
            executable.launch(stream)
    for stream in streams:
        stream.synchronize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_graphs_that_run_at_once_give_the_eager_results_every_time(dtype: torch.dtype) -> None:
    driver = cuda_driver()
    inputs = [[factor(driver, seed + part, dtype) for part in (0, 1)] for seed in (10, 20, 30)]
    expected = [products(*each) for each in inputs]
    graphs = [graphcore.capture_function(products, *each, driver=driver) for each in inputs]
    executables = [graph.instantiate() for graph in graphs]
    streams = [driver.stream() for _ in graphs]
    alone = []
    for graph, executable, stream in zip(graphs, executables, streams, strict=True):
        graph.outputs.fill_(float("nan"))
        driver.synchronize()
        run_at_once([executable], [stream])
        alone.append(graph.outputs.clone())
    for result, wanted in zip(alone, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=2e-2, atol=4.0)
    wrong = torch.zeros((), dtype=torch.int64, device=device_of(driver))
    for _ in range(_ROUNDS):
        for graph in graphs:
            graph.outputs.fill_(float("nan"))
        driver.synchronize()
        run_at_once(executables, streams)
        for graph, result in zip(graphs, alone, strict=True):
            close = torch.isclose(graph.outputs, result, **CLOSE)
            wrong += (~close).sum()
    assert int(wrong) == 0


def forget_workspaces(driver: Driver) -> list[torch.Tensor]:
    """As torch's graph trees do; then others take what memory there is, and write it full."""
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    device = device_of(driver)
    return [torch.full((16 * MIB,), float("nan"), device=device) for _ in range(8)]


def captured_alone(driver: Driver, x: torch.Tensor, y: torch.Tensor) -> Graph:
    return graphcore.capture_function(products, x, y, driver=driver)


def captured_second(driver: Driver, x: torch.Tensor, y: torch.Tensor) -> Graph:
    """On the stream of a graph that is gone, whose pool the workspace lay in."""
    captured_alone(driver, x, y).close()
    gc.collect()
    graph = captured_alone(driver, x, y)
    assert driver.capture_streams.idle + driver.capture_streams.lent == 1
    return graph


def captured_prepared(driver: Driver, x: torch.Tensor, y: torch.Tensor) -> Graph:
    capturing = graphcore.capture(driver=driver)
    capturing.expect_products()
    capturing.warm_up(lambda: products(x, y), 2)
    with capturing:
        outputs = products(x, y)
        capturing.keep((x, y, outputs))
    capturing.graph.outputs = outputs
    assert capturing.graph.memory_report().workspace_bytes >= SMALLEST
    return capturing.graph


@pytest.mark.parametrize(
    "capture",
    [captured_alone, captured_second, captured_prepared],
    ids=lambda capture: capture.__name__,
)
def test_a_graph_gives_the_eager_result_after_torch_forgot_its_workspaces(
    capture: Callable[[Driver, torch.Tensor, torch.Tensor], Graph],
) -> None:
    driver = cuda_driver()
    x, y = factor(driver, 0), factor(driver, 1)
    expected = products(x, y)
    graph = capture(driver, x, y)
    with graph.instantiate() as executable:
        others = forget_workspaces(driver)
        for _ in range(5):
            graph.outputs.fill_(float("nan"))
            driver.synchronize()
            executable.launch()
            driver.synchronize()
            torch.testing.assert_close(graph.outputs, expected, **CLOSE)
        assert all(bool(each.isnan().all()) for each in others), "it wrote memory of others"
    after = captured_alone(driver, x, y)  # and captures go on
    with after.instantiate() as executable:
        executable.launch()
        torch.testing.assert_close(after.outputs, expected, **CLOSE)


def test_products_in_side_streams_replay_right_and_leave_no_workspace_each() -> None:
    driver = cuda_driver()
    x, y = factor(driver, 0), factor(driver, 1)
    products(x, y)
    used: set[int] = set()
    for _ in range(4):
        with graphcore.capture(driver=driver) as capture:
            left = products(x, y)
            with capture.fork():
                right = products(y, x)
            both = left + right.T
            capture.keep((x, y, left, right, both))
        graph = capture.graph
        used |= {each.object.handle for each in graph.owners if isinstance(each.object, Stream)}
        with graph.instantiate() as executable:
            both.fill_(float("nan"))
            executable.launch()
            expected = products(x, y) + products(y, x).T
            torch.testing.assert_close(both, expected, **CLOSE)
        graph.close()
        del graph, capture, executable
        gc.collect()
        driver.synchronize()
    assert len(used) <= 3


@pytest.mark.parametrize(
    "ending",
    ["", "driver.close()", "del graph, executable"],
    ids=["all live", "driver closed", "one idle"],
)
def test_a_process_ends_well_with_workspaces_that_live(ending: str) -> None:
    done = run_isolated(
        f"""
import torch, graphcore
driver = graphcore.open_driver("cuda")
x = torch.randn(64, 16384, device="cuda")
graph = graphcore.capture_function(lambda: x @ x.T, driver=driver)
executable = graph.instantiate()
executable.launch()
kept = graphcore.capture_function(lambda: x @ x.T)  # on the driver that nobody closes
{ending}
print("alive")
""",
        timeout=120,
    )
    assert done.survived, done.stderr
    assert "alive" in done.stdout
