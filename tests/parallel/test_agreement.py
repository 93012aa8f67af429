"""What ranks agree on, as a pure function of what each of them proposes."""

import pytest

from graphcore.errors import ConfigurationError, RankError
from graphcore.parallel.agreement import Proposal, State, agree
from graphcore.parallel.places import Place, check_places

ORDER = ("replay", "capture", "direct")


def step(choice="replay", **more):
    return Proposal("step 3", choice, **more)


@pytest.mark.parametrize(
    ("choices", "agreed"),
    [
        (("replay", "replay"), "replay"),
        (("replay", "capture"), "capture"),
        (("direct", "replay", "capture", "replay"), "direct"),
    ],
    ids=["the same", "one captures", "one of four declines"],
)
def test_the_most_cautious_choice_of_any_rank_is_that_of_all(choices, agreed):
    assert agree([step(each) for each in choices], ORDER).choice == agreed


def test_the_reason_names_the_rank_and_says_why():
    found = agree([step(), step("capture", detail="weights moved")], ORDER)
    assert str(found) == "capture: rank 1: weights moved"
    assert agree([step(), step("direct")], ORDER).reason == "rank 1"
    assert str(agree([step(), step()], ORDER)) == "replay"


def test_without_choices_the_ranks_only_tell_each_other_values():
    found = agree([Proposal("seed", value=5), Proposal("seed", value=[7])])
    assert found.values == (5, [7])
    assert found.choice == ""


def test_an_unknown_choice_is_refused():
    with pytest.raises(ConfigurationError, match=r"choice: expected one of .*, got 'fly'"):
        agree([step("fly"), step()], ORDER)


def test_a_failed_rank_is_an_error_that_names_it():
    failed = step(detail="CapacityError: full", state=State.FAILED)
    with pytest.raises(RankError, match="rank 1 failed at step 3: CapacityError: full") as caught:
        agree([step(), failed], ORDER)
    assert caught.value.failed == (1,)


@pytest.mark.parametrize(
    ("why", "text"), [("", "rank 0 has left$"), ("its process ends", "left: its process ends")]
)
def test_a_rank_that_has_left_is_an_error_that_names_it(why, text):
    left = Proposal("leaving", detail=why, state=State.CLOSED)
    with pytest.raises(RankError, match=text):
        agree([left, step()], ORDER)


def test_ranks_at_different_points_are_told_where_each_is():
    with pytest.raises(RankError, match="rank 0 at 'step 3', rank 1 at 'step 4'") as caught:
        agree([step(), Proposal("step 4", "replay")], ORDER)
    assert caught.value.failed == (1,)


def test_a_fact_that_differs_is_named_with_the_values_of_all_ranks():
    with pytest.raises(ConfigurationError, match=r"dtype: .* rank 0 has a, rank 1 has b"):
        agree([step(facts={"dtype": "a"}), step(facts={"dtype": "b"})], ORDER)
    with pytest.raises(ConfigurationError, match="rank 0 has a, rank 1 has none"):
        agree([step(facts={"dtype": "a"}), step()], ORDER)


def test_a_proposal_survives_the_way_through_a_store():
    said = step(detail="x", facts={"a": "b"}, value={"c": [1, None]}, state=State.FAILED)
    assert Proposal.decoded(said.encoded()) == said
    assert len(Proposal.decoded(step(detail="x" * 9000).encoded()).detail) == 2000


def test_two_ranks_on_one_gpu_are_refused_by_name():
    places = [Place("a", "GPU-1"), Place("b", "GPU-1"), Place("a", "GPU-2"), Place("a", "GPU-1")]
    check_places(places[:3])
    with pytest.raises(ConfigurationError, match="GPU-1 of a for ranks 0 and 3"):
        check_places(places)


def test_any_number_of_ranks_may_work_on_a_cpu():
    check_places([Place("a", "cpu")] * 4)
