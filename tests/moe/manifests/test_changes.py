"""Changes: who waits is told of a change; where nobody waits nobody is told."""

from __future__ import annotations

import threading

import pytest
from helpers.threads import SOON, until

from graphcore.moe.manifests.changes import Changes


def test_who_waits_for_a_change_is_woken_and_nobody_else_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes, told = Changes(), []
    monkeypatch.setattr(Changes, "notify_all", lambda self: told.append(1) or self.notify(9))
    with changes.lock:
        changes.tell()
    assert not told
    woken = threading.Event()

    def wait() -> None:
        with changes:
            if changes.wait(SOON):
                woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: changes.waiting == 1)
    with changes:
        changes.tell()
    thread.join(SOON)
    assert woken.is_set()
    assert (told, changes.waiting) == ([1], 0)
    with changes:
        assert not changes.wait(0.001)
        changes.tell()
    assert told == [1]
