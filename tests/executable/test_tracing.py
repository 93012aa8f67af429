"""Traces of replays: an event per node and replay, joined to nodes, in a file that viewers open."""

from __future__ import annotations

import gzip
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.contract import Bench, copy_1d, fill_1d
from helpers.graph_specs import Child, Step, build
from helpers.kernels import ONE_BLOCK, add_one, count_down, scale
from helpers.snapshots import chain, decode_step, kernel_node, snapshot

import graphcore
from graphcore import CacheTypeError, ConfigurationError, DriverUnavailable, Graph, LifecycleError
from graphcore.driver import Driver, Kernel, Pointer
from graphcore.driver.records import ConditionalParams, LaunchConfig
from graphcore.executable.replay_matching import TimedEvent, match
from graphcore.executable.tracing import _device_events, _name
from graphcore.interop import torch_profiler

pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def graph(bench: Bench) -> Graph:
    """add, scale and add again after each other, then a fill, a copy and a child with an add."""
    x, y = bench.alloc(4096), bench.alloc(4096)
    add = bench.kernel_params(add_one, x, 16)
    inner = (Step(bench.kernel_params(add_one, y, 8)),)
    spec = (
        Step(add),
        Step(bench.kernel_params(scale, x, 2.0, 16), (0,)),
        Step(add, (1,)),
        Step(fill_1d(y, 7, 16), (2,)),
        Step(copy_1d(x, y, 64), (3,)),
        Step(Child(inner), (4,)),
    )
    labels = ((0, 2, "first"), (2, 6, "second/part"))
    return Graph(bench.driver, build(bench, spec), annotations=labels, owned=False)


def test_every_kernel_is_timed_once_a_replay(graph: Graph) -> None:
    with graph.instantiate() as executable:
        profile = graphcore.trace_replays(executable, replays=3)
    kernels = [row for row in profile.rows if row.name not in ("memset", "memcpy")]
    assert [(row.where, row.name, row.label, row.runs) for row in kernels] == [
        ("0", "add_one", "first", 3),
        ("1", "scale", "first", 3),
        ("2", "add_one", "second/part", 3),
        ("5.0.0", "add_one", "second/part", 3),
    ]
    assert all(row.us > 0 for row in profile.rows)
    assert sum(row.share for row in profile.rows) == pytest.approx(1)
    assert profile.busy_us == pytest.approx(sum(row.us for row in profile.rows))
    assert 0 < profile.span_us < 1e6
    assert profile.is_emulated == graph.driver.is_emulated


def test_fills_and_copies_are_timed_too(graph: Graph) -> None:
    with graph.instantiate() as executable:
        profile = graphcore.trace_replays(executable, replays=3)
    others = [row for row in profile.rows if row.name in ("memset", "memcpy")]
    assert [(row.where, row.name, row.runs) for row in others] == [
        ("3", "memset", 3),
        ("4", "memcpy", 3),
    ]


def test_a_copy_that_cuda_does_by_a_kernel_of_its_own_is_its_nodes(graph: Graph) -> None:
    snapshot = graph.snapshot()
    event = TimedEvent("kernel", "memcpy32_post", 1.0, 2.0, 0, (1, 1, 1), (32, 1, 1))
    (row,) = match([event], snapshot, replays=1)
    assert (row.where, row.name, row.us) == ("4", "memcpy", 2.0)
    assert (event.kind, event.node) == ("memcpy", "4 (memcpy)")
    entry: dict[str, Any] = {"cat": "kernel", "name": "memcpy32_post", "args": {}}
    _name(entry, event)
    assert (entry["cat"], entry["args"]["node"]) == ("gpu_memcpy", "4 (memcpy)")


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_the_trace_has_one_kernel_event_per_kernel_node_and_replay(
    graph: Graph, tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    with graph.instantiate() as executable:
        graphcore.trace_replays(executable, path, replays=4)
    data = path.read_bytes()
    trace = json.loads(gzip.decompress(data) if name.endswith("gz") else data)
    kernels = [entry for entry in trace["traceEvents"] if entry.get("cat") == "kernel"]
    assert len(kernels) == 4 * 4
    for entry in kernels:
        assert entry["ph"] == "X"
        assert entry["dur"] > 0
    assert {entry["args"]["label"] for entry in kernels} == {"first", "second/part"}
    named = [entry["args"]["node"] for entry in kernels]
    assert {name: named.count(name) for name in named} == {
        "0 (add_one)": 4,
        "1 (scale)": 4,
        "2 (add_one)": 4,
        "5.0.0 (add_one)": 4,
    }


def test_the_emulated_driver_says_in_every_form_that_its_times_are_the_hosts(
    tmp_path: Path,
) -> None:
    driver = graphcore.open_driver("emulated")
    bench = Bench(driver)
    spec = (Step(bench.kernel_params(add_one, bench.alloc(64), 16)),)
    with Graph(driver, build(bench, spec), owned=False).instantiate() as executable:
        profile = graphcore.trace_replays(executable, tmp_path / "t.json")
    trace = json.loads((tmp_path / "t.json").read_text())
    assert "not GPU time" in trace["emulated"]
    assert all("not GPU time" in json.dumps(entry) for entry in trace["traceEvents"])
    for text in (profile.to_text(), str(profile), profile._repr_html_()):
        assert "not GPU time" in text
    bench.close()


def test_a_slow_node_among_equal_launches_is_the_slow_row(bench: Bench) -> None:
    def add(_config: LaunchConfig, x: Pointer, n: int) -> None:
        time.sleep(0.04 if n > 16 else 0)  # as long as no pause of a busy machine
        x.array(16)[:] += 1

    kernel = Kernel(add_one.name, add_one.parameters, add_one.source, reference=add)
    count = 1 << 22
    x = bench.alloc(4 * count)
    small = bench.kernel_params(kernel, x, 16, config=ONE_BLOCK)
    large = bench.kernel_params(kernel, x, count, config=ONE_BLOCK)
    spec = tuple(
        Step(large if index == 3 else small, (index - 1,) if index else ()) for index in range(6)
    )
    with Graph(bench.driver, build(bench, spec), owned=False).instantiate() as executable:
        profile = graphcore.trace_replays(executable, replays=5)
    (slowest,) = profile.slowest(1)
    assert (slowest.where, slowest.runs) == ("3", 5)
    assert slowest.share > 0.5
    assert len(profile.rows) == 6


def test_a_loop_counts_every_turn() -> None:
    driver = graphcore.open_driver("emulated")
    bench = Bench(driver)
    counter, graph = bench.alloc(4), bench.new_graph()
    start = bench.add(graph, fill_1d(counter, 3, 1))
    handle = driver.create_conditional(graph, default=1)
    node = bench.add(graph, ConditionalParams(handle, "while"), [start])
    (body,) = driver.node_params(node).bodies  # type: ignore[union-attr]
    bench.add(body, bench.kernel_params(count_down, handle, counter))
    with Graph(driver, graph, owned=False).instantiate() as executable:
        profile = graphcore.trace_replays(executable, replays=2)
    assert [(row.where, row.name, row.runs) for row in profile.rows] == [
        ("0", "memset", 2),
        ("1.0.0", "count_down", 6),
    ]
    bench.close()


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"replays": 0}, ConfigurationError, "replays: expected 1 or more, got 0"),
        ({"replays": True}, ConfigurationError, "replays: expected 1 or more, got True"),
        ({"path": "trace.txt"}, ConfigurationError, "ends in .json or .json.gz"),
        ({"path": "no/such/t.json"}, ConfigurationError, "a file in a folder that exists"),
        ({"exec_": 3}, CacheTypeError, "exec_: expected a GraphExec, got int"),
    ],
    ids=["none", "flag", "suffix", "folder", "type"],
)
def test_what_cannot_be_traced_is_refused_before_anything_runs(
    bench: Bench, arguments: dict[str, Any], error: type[Exception], said: str
) -> None:
    x = bench.alloc(64)
    bench.driver.write(x, bytes(64))
    spec = (Step(bench.kernel_params(add_one, x, 16)),)
    executable = Graph(bench.driver, build(bench, spec), owned=False).instantiate()
    with executable, pytest.raises(error, match=said):
        graphcore.trace_replays(**{"exec_": executable, **arguments})
    assert bench.driver.read(x, 64) == bytes(64)


def test_a_closed_executable_and_one_inside_a_capture_are_refused(
    graph: Graph, graphcore_driver: Driver
) -> None:
    executable = graph.instantiate()
    with (
        pytest.raises(LifecycleError, match="while a capture is under way"),
        graphcore.capture(driver=graphcore_driver),
    ):
        graphcore.trace_replays(executable)
    executable.close()
    with pytest.raises(LifecycleError, match="closed"):
        graphcore.trace_replays(executable)


def test_torch_that_is_missing_is_named_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(DriverUnavailable, match=r"pip install 'graphcore-cuda\[torch\]'"):
        torch_profiler.require_profiler()


def test_torch_without_a_profiler_of_the_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.profiler, "supported_activities", set)
    with pytest.raises(DriverUnavailable, match="cannot profile CUDA"):
        torch_profiler.require_profiler()


# ---- joining events to nodes, without a device ---------------------------------------------------

SHAPE = {"grid": (1, 1, 1), "block": (32, 1, 1)}


def event(name: str, start: float, us: float = 1.0, **more: Any) -> TimedEvent:
    return TimedEvent("kernel", name, start, us, more.pop("replay", 0), **{**SHAPE, **more})


def test_numbers_of_the_profiler_tell_equal_kernels_apart() -> None:
    events = [event("work", 5, us=30, node_id=901), event("work", 9, us=10, node_id=900)]
    rows = match(events, chain(2), 1)
    assert [(row.where, row.us, row.certain) for row in rows] == [("0", 10, True), ("1", 30, True)]
    assert [one.node for one in events] == ["1 (work)", "0 (work)"]


def test_without_numbers_equal_kernels_are_told_apart_by_time_and_marked() -> None:
    rows = match([event("work", 5, us=30), event("work", 2, us=10)], chain(2), 1)
    assert [(row.where, row.us, row.certain) for row in rows] == [
        ("0", 10, False),
        ("1", 30, False),
    ]


def test_kernels_of_another_shape_or_name_are_strangers() -> None:
    events = [
        event("work", 1),
        event("other(int)", 2, us=3),
        event("work", 3, grid=(9, 1, 1)),
        event("work", 4),
    ]
    rows = match(events, chain(1), 1)
    assert [(row.where, row.name, row.runs) for row in rows] == [
        ("0", "work", 2),
        ("", "other", 1),
        ("", "work", 1),
    ]
    assert rows[1].node is None
    assert rows[1].share == 0.5


def test_names_that_demanglers_write_differently_are_still_joined() -> None:
    spaced = "void at::scan<4, std::array<char*, 3ul> >(int)"
    graph = snapshot([kernel_node(0, spaced), kernel_node(1, "ns::sum<3ul>(int)")])
    events = [event("void at::scan<4, std::array<char*, 3ul>>(int)", 1), event("sum<3>(int)", 2)]
    assert [row.where for row in match(events, graph, 1)] == ["0", "1"]


def test_times_are_means_over_replays() -> None:
    events = [
        event("work", start, us=us, replay=at) for at, (start, us) in enumerate([(0, 2), (9, 4)])
    ]
    (row,) = match(events, chain(1), 2)
    assert (row.us, row.runs, row.share) == (3, 2, 1)


def chrome(correlations: list[int | None], device: int = 0) -> dict[str, Any]:
    entries: list[dict[str, Any]] = [
        {
            "ph": "X", "cat": "kernel", "name": "work", "ts": at * 10, "dur": 2,
            "args": {"device": device, "grid": [1, 1, 1], "block": [32, 1, 1]}
            | ({} if number is None else {"correlation": number}),
        }
        for at, number in enumerate(correlations)
    ]  # fmt: skip
    return {"traceEvents": [*entries, {"ph": "M", "name": "process_name", "args": {}}]}


@pytest.mark.parametrize(
    ("correlations", "replays"),
    [
        ([7, 7, 8, 8], [0, 0, 1, 1]),
        ([7, 8, 7, 8], [0, 1, 0, 1]),
        ([None] * 4, [0, 0, 1, 1]),
        ([1, 2, 3, 4], [0, 0, 1, 1]),
    ],
    ids=["in turn", "overlapping", "no numbers", "a number each"],
)
def test_events_are_put_to_their_replay(correlations: list[int | None], replays: list[int]) -> None:
    events = _device_events(chrome(correlations), 0, 2)
    assert [one.replay for one, _ in events] == replays
    assert [one.grid for one, _ in events] == [(1, 1, 1)] * 4


def test_other_devices_do_not_count() -> None:
    assert _device_events(chrome([1, 2], device=1), 0, 1) == []


# ---- the table -----------------------------------------------------------------------------------


def decode_profile() -> graphcore.ReplayProfile:
    step = decode_step()
    events = [
        event(node.name, node.index, us=1 + node.index % 7, node_id=node.index)
        for node in step.nodes
    ]
    return graphcore.ReplayProfile(match(events, step, 1), 1, 450.0, "cuda", False, step)


def test_times_are_summed_by_label() -> None:
    profile = decode_profile()
    assert sum(profile.by_label().values()) == pytest.approx(profile.busy_us)
    assert len(profile.by_label()) == 32
    assert "layer 3/attention" in profile.by_label(2)
    assert list(profile.by_label().values()) == sorted(profile.by_label().values(), reverse=True)


@pytest.mark.parametrize("width", [60, 100, 160])
def test_the_table_fits_the_terminal(width: int) -> None:
    lines = decode_profile().to_text(width=width).splitlines()
    assert len(lines) == 403
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("450.0 us a replay, ")
    assert decode_profile().to_text(most=5).splitlines()[-1] == "and 396 more"


def test_a_profile_shows_itself_and_its_times_in_the_picture() -> None:
    profile = decode_profile()
    assert profile._repr_html_().count("<tr>") == 402
    boxes = profile.drawing().boxes
    assert boxes[0].notes[0].startswith("1.00 us, ")
    assert boxes[6].notes[0].startswith("7.00 us, ")


def test_hostile_names_stay_text() -> None:
    name = "<script>alert(1)</script>\x1b[31m"
    graph = snapshot([kernel_node(0, name)])
    rows = match([event(name, 0)], graph, 1)
    profile = graphcore.ReplayProfile(rows, 1, 1.0, "cuda", False, graph)
    assert "<script" not in profile._repr_html_()
    assert "\x1b" not in profile.to_text() + profile._repr_html_()
