"""A manifest holds on all ranks or on none."""

import pytest
from helpers import rank_experts
from helpers.ranks import run_ranks

from graphcore.parallel.rank_manifests import partition_problem


def test_what_one_rank_does_not_take_is_published_on_none():
    answers = [each.result for each in run_ranks(2, rank_experts.manifests)]
    for rank, (found, held) in enumerate(answers):
        assert found["good"] == "manifest accepted, generation 1"
        assert "manifest rejected, generation 1" in found["rejected"]
        assert "slots from 0 to 8" in found["rejected"]
        assert ("rank 1" in found["rejected"]) == (rank == 0)
        assert "expected rank 1 to begin with expert 8, got 0" in found["twice"]
        assert "manifest error, generation 2" in found["no room"]
        assert "no room" in found["no room"]
        assert ("KeyError" in found["broken"].split(",")[0]) == (rank == 1)
        assert ("RankError" in found["broken"].split(",")[0]) == (rank == 0)
        assert ("ConfigurationError" in found["not one"].split(",")[0]) == (rank == 1)
        assert held == (True, 4)


def test_a_manifest_that_is_in_use_on_one_rank_stays_on_all():
    for answer in run_ranks(2, rank_experts.busy_manifest):
        first, second = answer.result
        assert first.startswith("manifest still in use, generation 1")
        assert second == "manifest accepted, generation 2"


def part(rank, ranks, *groups):
    return {"rank": rank, "ranks": ranks, "groups": [list(each) for each in groups]}


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ([part(0, 2, ("a", 0, 3, 6)), part(1, 2, ("a", 3, 3, 6))], ""),
        ([part(0, 2), part(1, 2)], ""),
        ([part(0, 2), part(0, 2)], "expected rank 1 of 2, got 0 of 2"),
        ([part(0, 2, ("a", 0, 3, 6)), part(1, 2, ("b", 3, 3, 6))], "got ['b'] on rank 1"),
        ([part(0, 2, ("a", 0, 3, 6)), part(1, 2, ("a", 3, 3, 8))], "one number of experts"),
        ([part(0, 2, ("a", 0, 3, 6)), part(1, 2, ("a", 2, 3, 6))], "begin with expert 3, got 2"),
        ([part(0, 2, ("a", 0, 3, 9)), part(1, 2, ("a", 3, 3, 9))], "9 experts on all ranks, got 6"),
    ],
    ids=["whole", "no experts", "rank", "names", "sizes", "overlap", "gap"],
)  # fmt: skip
def test_the_parts_of_all_ranks_are_all_experts_once(parts, problem):
    found = partition_problem(parts)
    assert problem in found
    assert bool(found) == bool(problem)
