"""Owners are recognised by identity, in order; one that is gone is not the one at its place."""

from __future__ import annotations

import gc

from graphcore.moe.decisions.witnesses import OwnersMatch, Witnesses


class Owner:
    """Something that owns memory."""


def test_owners_are_recognised_by_identity_in_order() -> None:
    one, two, three = Owner(), Owner(), Owner()
    witnesses = Witnesses.of([one, two])
    assert witnesses is not None
    assert witnesses.are_alive
    cases = {
        OwnersMatch.SAME: [one, two],
        OwnersMatch.DIFFERENT: [two, one],
        OwnersMatch.COUNT: [one, two, three],
    }
    assert {witnesses.compare(owners): owners for owners in cases.values()} == cases
    assert witnesses.compare([one, three]) is OwnersMatch.DIFFERENT
    assert witnesses.compare([one]) is OwnersMatch.COUNT
    assert witnesses.compare([]) is OwnersMatch.COUNT


def test_an_owner_that_is_gone_is_not_the_one_that_takes_its_place() -> None:
    keeper, owner = Owner(), Owner()
    witnesses = Witnesses.of([keeper, owner])
    assert witnesses is not None
    del owner
    gc.collect()
    assert not witnesses.are_alive
    assert witnesses.compare([keeper, Owner()]) is OwnersMatch.EXPIRED


def test_without_owners_nothing_is_recognised() -> None:
    witnesses = Witnesses.of([])
    assert witnesses is not None
    assert not witnesses.are_alive
    assert witnesses.compare([]) is OwnersMatch.NONE


def test_an_owner_that_cannot_be_watched_leaves_no_witnesses() -> None:
    assert Witnesses.of([Owner(), 7]) is None
