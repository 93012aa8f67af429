"""GraphExec.rebind: pointers into a buffer go to another one, in every kind of node; bad input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from helpers.contract import Bench, copy_1d, fill_1d
from helpers.graph_specs import Child, Step, build
from helpers.kernels import ONE_BLOCK, add_one, axpy, fill_value, scale
from helpers.rebinding import edge, graph_of, packed, run, structure, values
from helpers.tensors import device_of, filled

import graphcore
from graphcore import (
    CacheTypeError,
    ConfigurationError,
    Graph,
    LifecycleError,
)
from graphcore.driver import Kernel, kernel
from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.records import LaunchConfig, NodeParams
from graphcore.executable import RebindRoute
from graphcore.resources.buffer import Buffer
from graphcore.resources.lifetime import OwnerSet

# ---- every kind of node -------------------------------------------------------------------------


def test_a_pair_goes_by_the_name_that_names_gives_it(bench: Bench) -> None:
    old, new = filled(bench.driver, 1.0), filled(bench.driver, 2.0)
    graph = graph_of(bench, bench.kernel_params(add_one, old.data_ptr(), 4))
    executable = graph.instantiate()
    outcome = executable.rebind([(old, new)], names={"cache": old})
    assert dict(outcome.words) == {"cache": 1}
    assert str(outcome).startswith("whole update: 1 pointer in 1 node: ")
    with pytest.raises(ConfigurationError, match="cache: not found"):
        executable.rebind([(old, new)], names={"cache": old})


def test_arguments_copies_and_fills_all_go_to_the_new_buffer(bench: Bench) -> None:
    x, y, out = bench.put([1.0] * 8), bench.put([2.0] * 8), bench.alloc(32)
    graph = graph_of(
        bench,
        bench.kernel_params(add_one, x, 4),
        Step(copy_1d(out, x, 32), (0,)),
        Step(fill_1d(x + 16, 0x40A00000, 4), (1,)),  # 5.0
    )
    executable = graph.instantiate()
    run(executable, bench)
    assert values(bench, out, 8) == [2.0] * 4 + [1.0] * 4
    before = values(bench, x, 8)
    outcome = executable.rebind([((x, 32), (y, 32))])
    assert (outcome.nodes, dict(outcome.words)) == (3, {"old 0": 3})
    bench.poison(out, 32)
    run(executable, bench)
    assert values(bench, out, 8) == [3.0] * 4 + [2.0] * 4
    assert values(bench, y, 8) == [3.0] * 4 + [5.0] * 4
    assert values(bench, x, 8) == before


def test_pointers_into_the_middle_keep_their_offset_and_the_end_is_no_part(bench: Bench) -> None:
    x = bench.put([0.0] * 12)
    y = bench.put([0.0] * 8)
    graph = graph_of(
        bench,
        bench.kernel_params(add_one, x + 8, 2),
        bench.kernel_params(add_one, x + 32, 4),  # the first byte past the old buffer
    )
    executable = graph.instantiate()
    outcome = executable.rebind([((x, 32), (y, 32))])
    assert outcome.nodes == 1
    run(executable, bench)
    assert values(bench, y, 8) == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert values(bench, x, 12) == [0.0] * 8 + [1.0] * 4


def test_nodes_of_child_graphs_and_bodies_are_re_pointed_too(bench: Bench) -> None:
    x, y = bench.alloc(16), bench.alloc(16)
    inner = Child((Step(bench.kernel_params(fill_value, x, 1.0, 4)),))
    handle = build(bench, (Step(Child((Step(inner),))),))
    _, _, bodies = bench.add_conditional(handle, "if", default=1)
    bench.add(bodies[0], bench.kernel_params(add_one, x, 4), ())
    bench.driver.add_edges(handle, [edge(*bench.driver.nodes(handle))])
    executable = Graph(bench.driver, handle, owned=False).instantiate()
    outcome = executable.rebind([((x, 16), (y, 16))])
    assert (outcome.nodes, outcome.route) == (2, RebindRoute.PER_NODE)
    assert "conditional" in outcome.reason
    bench.poison(x, 16)
    run(executable, bench)
    assert values(bench, y) == [2.0] * 4
    assert values(bench, x) != [2.0] * 4


def test_child_graphs_go_along_in_a_whole_update(bench: Bench) -> None:
    x, y = bench.alloc(16), bench.alloc(16)
    child = Child((Step(bench.kernel_params(fill_value, x, 3.0, 4)),))
    executable = graph_of(bench, child).instantiate()
    outcome = executable.rebind([((x, 16), (y, 16))])
    assert outcome.route is RebindRoute.WHOLE
    run(executable, bench)
    assert values(bench, y) == [3.0] * 4


tagged = kernel(
    "tagged",
    "f32* x, u64 tag",
    'extern "C" __global__ void tagged(float* x, unsigned long long tag) '
    "{ if (threadIdx.x == 0) x[0] = (float)(tag & 0xff); }",
    lambda _config, x, tag: _run_tagged(x, tag),
)


def _run_tagged(x: Any, tag: int) -> None:
    x.array(1)[0] = tag & 0xFF


def test_words_in_structures_are_found_and_declared_numbers_are_left_alone(bench: Bench) -> None:
    for each in (packed, tagged):
        bench.driver.function(each)
    x, y = bench.put([1.0] * 4), bench.put([4.0] * 4)
    out, other = bench.alloc(16), bench.alloc(16)
    graph = graph_of(
        bench,
        bench.kernel_params(packed, structure(x, 3, out)),
        bench.kernel_params(tagged, other, x + 8),  # a number that is an address by its value
    )
    executable = graph.instantiate()
    outcome = executable.rebind([((x, 16), (y, 16))])
    assert (outcome.nodes, dict(outcome.words)) == (1, {"old 0": 1})
    run(executable, bench)
    assert values(bench, out, 1) == [7.0]
    assert values(bench, other, 1) == [float((x + 8) & 0xFF)]


# ---- simultaneous -------------------------------------------------------------------------------


def test_two_buffers_trade_places(bench: Bench) -> None:
    a, b = bench.put([1.0] * 4), bench.put([10.0] * 4)
    graph = graph_of(
        bench,
        bench.kernel_params(add_one, a, 4),
        Step(bench.kernel_params(scale, b, 2.0, 4), (0,)),
    )
    executable = graph.instantiate()
    executable.rebind([((a, 16), (b, 16)), ((b, 16), (a, 16))])
    run(executable, bench)
    assert (values(bench, a), values(bench, b)) == ([2.0] * 4, [11.0] * 4)
    executable.rebind([((a, 16), (b, 16)), ((b, 16), (a, 16))])
    run(executable, bench)
    assert (values(bench, a), values(bench, b)) == ([3.0] * 4, [22.0] * 4)


def test_a_chain_of_exchanges_does_not_cascade(bench: Bench) -> None:
    a, b, c = (bench.put([value] * 4) for value in (0.0, 10.0, 20.0))
    graph = graph_of(
        bench,
        bench.kernel_params(add_one, a, 4),
        Step(bench.kernel_params(scale, b, 2.0, 4), (0,)),
    )
    executable = graph.instantiate()
    executable.rebind([((a, 16), (b, 16)), ((b, 16), (c, 16))])
    run(executable, bench)
    assert [values(bench, each)[0] for each in (a, b, c)] == [0.0, 11.0, 40.0]


# ---- bad input ----------------------------------------------------------------------------------


def _tensor(bench: Bench, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device_of(bench.driver))


BAD: dict[str, tuple[Callable[[Bench, torch.Tensor], Any], type, str]] = {
    "no pairs": (lambda *_: [], ConfigurationError, "at least one"),
    "no names": (lambda *_: {}, ConfigurationError, "at least one"),
    "a tensor": (lambda _, x: x, CacheTypeError, "got Tensor"),
    "a text": (lambda *_: "x", CacheTypeError, "got str"),
    "no pair": (lambda _, x: [x], CacheTypeError, "pair 0"),
    "three of them": (lambda _, x: [(x, x, x)], CacheTypeError, "pair 0"),
    "an unknown name": (lambda _, x: {"y": x}, ConfigurationError, r"'y'.*\(x\)"),
    "old is new": (lambda _, x: [(x, x)], ConfigurationError, "the old buffer as the new"),
    "old is new by name": (lambda _, x: {"x": x}, ConfigurationError, "the old buffer"),
    "no tensor": (lambda _, x: [(x, "new")], CacheTypeError, "x: new: .*got str"),
    "no old tensor": (lambda _, x: [("old", x)], CacheTypeError, "got Tensor for str"),
    "an int": (lambda _, x: [(x, x.data_ptr())], CacheTypeError, "got int"),
    "a range for a tensor": (lambda _, x: [(x, (4096, 64))], CacheTypeError, "got tuple"),
    "smaller": (
        lambda bench, x: [(x, _tensor(bench, 3, 4))],
        ConfigurationError,
        r"x: new: shape: expected at least \(4, 4\), got \(3, 4\)",
    ),
    "other dtype": (
        lambda bench, x: [(x, _tensor(bench, 4, 4, dtype=torch.int32))],
        ConfigurationError,
        "dtype: expected float32, got int32",
    ),
    "other rank": (lambda bench, x: [(x, _tensor(bench, 16))], ConfigurationError, "shape"),
    "other strides": (
        lambda bench, x: [(x, _tensor(bench, 4, 8)[:, :4])],
        ConfigurationError,
        r"strides: expected \(4, 1\) elements, got \(8, 1\)",
    ),
    "less aligned": (
        lambda bench, x: [(x, _tensor(bench, 5, 4).flatten()[1:17].view(4, 4))],
        ConfigurationError,
        "address: expected a multiple of 16",
    ),
    "overlapping olds": (
        lambda bench, x: [(x, _tensor(bench, 4, 4)), (x[2:], _tensor(bench, 2, 4))],
        ConfigurationError,
        "overlap",
    ),
    "the same old twice": (
        lambda bench, x: [(x, _tensor(bench, 4, 4)), (x, _tensor(bench, 4, 4))],
        ConfigurationError,
        "overlap",
    ),
    "not found": (
        lambda bench, x: [(_tensor(bench, 4), _tensor(bench, 4))],
        ConfigurationError,
        "not found: no node points into it",
    ),
    "without elements": (
        lambda bench, x: [(x[:0], _tensor(bench, 0, 4))],
        ConfigurationError,
        "other memory|without elements",
    ),
    "names of another kind": (lambda _, x: [(x, x.clone())], ConfigurationError, "names"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_exchanged_is_refused_and_nothing_changes(bench: Bench, name: str) -> None:
    x = _tensor(bench, 4, 4)
    handle = build(bench, (Step(bench.kernel_params(fill_value, x.data_ptr(), 1.0, 16)),))
    owners = OwnerSet().with_(x, label="x")
    executable = Graph(bench.driver, handle, owners=owners, owned=False).instantiate()
    before = executable.snapshot()
    make, error, message = BAD[name]
    given = make(bench, x)
    names: Any = 7 if name == "names of another kind" else None
    with pytest.raises(error, match=message):
        executable.rebind(given, names=names)
    assert executable.snapshot() == before
    assert executable.owners.labels() == ("x",)
    run(executable, bench)
    assert x.tolist() == [[1.0] * 4] * 4


def test_memory_that_no_node_points_into_is_let_go_where_that_is_allowed(bench: Bench) -> None:
    x, unused = _tensor(bench, 4), _tensor(bench, 4)
    others = _tensor(bench, 4), _tensor(bench, 4)
    handle = build(bench, (Step(bench.kernel_params(fill_value, x.data_ptr(), 1.0, 4)),))
    owners = OwnerSet().with_(x, label="x").with_(unused, label="unused")
    executable = Graph(bench.driver, handle, owners=owners, owned=False).instantiate()
    with pytest.raises(ConfigurationError, match="unused: not found: no node points into it"):
        executable.rebind({"x": others[0], "unused": others[1]})
    outcome = executable.rebind({"x": others[0], "unused": others[1]}, allow_unused=True)
    assert dict(outcome.words) == {"x": 1, "unused": 0}
    assert {owner.label: owner.object for owner in executable.owners} == {
        "x": others[0],
        "unused": others[1],
    }
    run(executable, bench)
    assert others[0].tolist() == [1.0] * 4
    back = executable.rebind({"unused": unused}, allow_unused=True)
    assert back.nodes == 0
    assert executable.check() == []


def test_two_new_buffers_that_overlap_are_refused(bench: Bench) -> None:
    a, b, new = (_tensor(bench, 4) for _ in range(3))
    add: list[NodeParams] = [bench.kernel_params(add_one, t.data_ptr(), 4) for t in (a, b)]
    executable = graph_of(bench, *add).instantiate()
    with pytest.raises(ConfigurationError, match="would both be the new memory"):
        executable.rebind([(a, new), (b, new)])


def test_a_larger_buffer_of_the_same_steps_fits(bench: Bench) -> None:
    x, larger = _tensor(bench, 2, 4), _tensor(bench, 9, 4)
    fill = bench.kernel_params(fill_value, x.data_ptr(), 1.0, 8)
    executable = graph_of(bench, fill).instantiate()
    executable.rebind([(x, larger)])
    run(executable, bench)
    assert larger.flatten().tolist() == [1.0] * 8 + [0.0] * 28


def test_closed_foreign_and_read_only_memory_is_refused(bench: Bench) -> None:
    x = Buffer.allocate(4, driver=bench.driver)
    fill = bench.kernel_params(fill_value, x.address, 1.0, 4)
    executable = graph_of(bench, fill).instantiate()
    closed = Buffer.allocate(4, driver=bench.driver)
    closed.close()
    with pytest.raises(LifecycleError, match="closed"):
        executable.rebind([(x, closed)])
    foreign = Buffer.allocate(4, driver=EmulatedDriver())
    with pytest.raises(ConfigurationError, match=r"of driver|memory on"):
        executable.rebind([(x, foreign)])
    array = numpy.zeros(4, "float32")
    array.flags.writeable = False
    with pytest.raises(ConfigurationError, match=r"access|memory on|address"):
        executable.rebind([(x, array)])
    with pytest.raises(ConfigurationError, match="knows"):
        executable.rebind([((x.address, 16), (4096, 16))])
    with pytest.raises(ConfigurationError, match="at least 16 bytes, got 8"):
        executable.rebind([((x.address, 16), (closed_range(bench), 8))])
    run(executable, bench)
    assert x.read().tolist() == [1.0] * 4


def closed_range(bench: Bench) -> int:
    return bench.alloc(16)


@pytest.mark.gpu
def test_host_memory_for_device_memory_is_refused() -> None:
    from helpers.tensors import cuda_driver

    bench = Bench(cuda_driver())
    x = _tensor(bench, 4)
    fill = bench.kernel_params(fill_value, x.data_ptr(), 1.0, 4)
    executable = graph_of(bench, fill).instantiate()
    with pytest.raises(ConfigurationError, match=r"expected memory on CUDA device .* the host"):
        executable.rebind([(x, torch.zeros(4))])
    executable.close()
    bench.close()


def test_a_name_that_several_buffers_share_is_refused(bench: Bench) -> None:
    a, b = _tensor(bench, 4), _tensor(bench, 4)
    handle = build(bench, (Step(bench.kernel_params(axpy, 1.0, a.data_ptr(), b.data_ptr(), 4)),))
    owners = OwnerSet().with_(a, b, label="both")
    executable = Graph(bench.driver, handle, owners=owners, owned=False).instantiate()
    with pytest.raises(ConfigurationError, match="one of 2"):
        executable.rebind({"both": _tensor(bench, 4)})


def test_memory_that_the_graph_allocates_is_not_exchanged(bench: Bench) -> None:
    from graphcore.driver.records import AllocParams, FreeParams

    graph = bench.new_graph()
    made = bench.add(graph, AllocParams(64))
    params = bench.driver.node_params(made)
    assert isinstance(params, AllocParams)
    filled_node = bench.add_kernel(graph, fill_value, params.address, 1.0, 4, after=[made])
    bench.add(graph, FreeParams(params.address), [filled_node])
    y = bench.alloc(64)
    executable = Graph(bench.driver, graph, owned=False).instantiate()
    with pytest.raises(ConfigurationError, match="memory that the graph allocates itself"):
        executable.rebind([((params.address, 64), (y, 64))])


def test_rebinding_in_a_capture_or_after_closing_is_refused(bench: Bench) -> None:
    x, y = bench.alloc(16), bench.alloc(16)
    executable = graph_of(bench, bench.kernel_params(fill_value, x, 1.0, 4)).instantiate()
    with graphcore.capture(driver=bench.driver), pytest.raises(LifecycleError, match="capture"):
        executable.rebind([((x, 16), (y, 16))])
    run(executable, bench)
    assert values(bench, x) == [1.0] * 4
    executable.close()
    with pytest.raises(LifecycleError, match="closed"):
        executable.rebind([((x, 16), (y, 16))])


def test_the_kernels_of_this_file_do_what_they_say(bench: Bench) -> None:
    """The control of the tests above: without an exchange the old buffer is what is worked on."""
    kernels: tuple[Kernel, ...] = (packed, tagged)
    for each in kernels:
        bench.driver.function(each)
    x, out = bench.put([1.0] * 4), bench.alloc(16)
    config: LaunchConfig = ONE_BLOCK
    work = bench.kernel_params(packed, structure(x, 3, out), config=config)
    run(graph_of(bench, work).instantiate(), bench)
    assert values(bench, out, 1) == [4.0]
