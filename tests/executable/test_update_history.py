"""Updates that fail again and again say what to do about it."""

from __future__ import annotations

import logging

import pytest
from helpers.contract import Bench, fill_1d
from helpers.kernels import add_one, fill_value
from helpers.tensors import replay

from graphcore import Graph, UpdateStatus
from graphcore.driver.records import LaunchConfig


def chain(bench: Bench, x: int, *values: float) -> Graph:
    """One kernel after the other, each writing its value."""
    graph, last = bench.new_graph(), []
    for value in values:
        last = [bench.add_kernel(graph, fill_value, x, value, 4, after=last)]
    return Graph(bench.driver, graph, owned=False)


def configured(bench: Bench, x: int, *, cooperative: bool) -> Graph:
    graph = bench.new_graph()
    config = LaunchConfig((1, 1, 1), (32, 1, 1), cooperative=cooperative)
    bench.add_kernel(graph, add_one, x, 4, config=config)
    return Graph(bench.driver, graph, owned=False)


def test_counts_say_what_became_of_the_updates(bench: Bench) -> None:
    x = bench.alloc(16)
    executable = chain(bench, x, 1).instantiate()
    executable.update(chain(bench, x, 2))
    executable.update(chain(bench, x, 2, 3))
    executable.update(chain(bench, x, 4), reinstantiate=False)
    history = executable.updates
    assert (history.updated, history.reinstantiated, history.refused) == (1, 1, 1)
    assert history.in_a_row == 2
    assert repr(history) == "<UpdateHistory 1 in place, 1 re-instantiated, 1 refused>"


def test_a_topology_that_alternates_is_told_and_every_result_is_right(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    x = bench.alloc(16)
    executable = chain(bench, x, 1).instantiate()
    advice = []
    with caplog.at_level(logging.WARNING, "graphcore"):
        for number, values in enumerate([(2.0, 3.0), (4.0,), (5.0, 6.0), (7.0,)]):
            outcome = executable.update(chain(bench, x, *values))
            assert outcome.status is UpdateStatus.REINSTANTIATED
            bench.poison(x, 16)
            replay(executable, bench.stream)
            assert bench.get(x, 4) == [values[-1]] * 4
            advice.append(outcome.advice)
            assert (outcome.advice is not None) == (number > 0)
    assert advice[1] == (
        "the topology alternates (now 1 nodes, before 2): keep an executable for each, as a "
        "GraphCache does"
    )
    assert "the topology alternates" in caplog.messages[0]


def test_refusals_in_a_row_name_the_field_that_comes_back(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    x = bench.alloc(16)
    executable = configured(bench, x, cooperative=False).instantiate()
    other = configured(bench, x, cooperative=True)
    with caplog.at_level(logging.WARNING, "graphcore"):
        outcomes = [executable.update(other, reinstantiate=False) for _ in range(8)]
    assert [outcome.advice is not None for outcome in outcomes] == [False] * 2 + [True] * 6
    assert outcomes[2].advice is not None
    assert outcomes[2].advice.startswith(
        "3 updates in a row could not be done in place, this one because of cooperative (an update"
    )
    # told when it is first seen and when the number has doubled, not at every step
    assert len(caplog.messages) == 3
    # and an update in place ends the row
    executable.update(configured(bench, x, cooperative=False))
    assert executable.updates.in_a_row == 0
    assert executable.update(other, reinstantiate=False).advice is None


def test_kinds_that_alternate_count_as_topology(bench: Bench) -> None:
    x = bench.alloc(16)
    fills, kernels = bench.new_graph(), bench.new_graph()
    bench.add(fills, fill_1d(x, 0, 4))
    bench.add_kernel(kernels, fill_value, x, 1.0, 4)
    graphs = [Graph(bench.driver, handle, owned=False) for handle in (fills, kernels)]
    executable = graphs[0].instantiate()
    outcomes = [executable.update(graphs[number % 2]) for number in (1, 2, 3)]
    assert [outcome.field for outcome in outcomes] == ["kind"] * 3
    assert outcomes[0].advice is None
    assert "alternates" in str(outcomes[1])
