"""RankStore: a round of proposals through torch.distributed's store, with a deadline.

The store is the one that the ranks met at; it runs beside whatever the device is at. A rank posts,
then waits until all others have; who has not by the deadline is named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from graphcore.errors import RankError
from graphcore.parallel.agreement import Proposal, State, telling


def own_store(store: Any) -> Any:
    """A connection of one's own to ``store``: one that waits holds a lock."""
    return store.clone()


class RankStore:
    """Where the ranks of one group post.

    Args:
        store: Of ``torch.distributed``, for this object alone (:func:`own_store`).
        prefix: Of its keys; the same on all ranks, and used once.
        rank: This one.
        size: How many there are.
        silent: Gives the ranks that show no sign of life.
    """

    def __init__(
        self,
        store: Any,
        prefix: str,
        rank: int,
        size: int,
        silent: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._rank = rank
        self._size = size
        self._silent = silent
        self.round = 0

    def post(self, proposal: Proposal) -> None:
        """Says what this rank brings to the current round, and goes on to the next one."""
        self._post(self.round, proposal)
        self.round += 1

    def exchange(self, proposal: Proposal, seconds: float) -> list[Proposal]:
        """A round: posts, and waits for what the others bring.

        Raises:
            RankError: Some have not come within ``seconds``, or the store is gone. Those that come
                late find that this rank has given up.
        """
        number = self.round
        keys = [self._key(number, rank) for rank in range(self._size)]
        try:
            self.post(proposal)
            self._store.wait(keys, timedelta(seconds=seconds))
            found = self._store.multi_get(keys)
        except RuntimeError as error:
            raise self._explained(number, proposal.subject, seconds, error) from error
        if number:  # everybody has read the round before, or would not have come to this one
            with suppress(RuntimeError):
                self._store.delete_key(self._key(number - 1, self._rank))
        return [Proposal.decoded(each) for each in found]

    # ---- inside ---------------------------------------------------------------------------------

    def _key(self, number: int, rank: int) -> str:
        return f"{self._prefix}/{number}/{rank}"

    def _post(self, number: int, proposal: Proposal) -> None:
        self._store.set(self._key(number, self._rank), proposal.encoded())

    def _explained(
        self, number: int, subject: str, seconds: float, error: RuntimeError
    ) -> RankError:
        try:
            present = self._present(number)
        except RuntimeError:
            return RankError(
                f"{subject}: the store that the ranks met at does not answer, so the process that "
                f"keeps it (rank 0, or torchrun's agent) is gone: {error}",
                missing=(0,),
            )
        late = [rank for rank in range(self._size) if rank not in present]
        gone = [rank for rank in late if rank in self._silent()]
        missing = gone or late  # who is alive may itself be waiting for who is gone
        failed = [rank for rank, each in present.items() if each.state is not State.READY]
        sign = "gave no sign of life" if gone else "is alive, but did not come"
        told = [f"rank {rank} {sign} within {seconds:g} s" for rank in missing]
        told += [telling(rank, present[rank]) for rank in failed]
        gave_up = f"gave up waiting for {_names(missing)}"
        failure = Proposal(subject, detail=gave_up, state=State.FAILED)
        self._post(number, failure)  # for who comes to this round after all
        self.post(failure)
        return RankError(f"{subject}: {'; '.join(told)}", failed=failed, missing=missing)

    def _present(self, number: int) -> dict[int, Proposal]:
        found = {}
        for rank in range(self._size):
            key = self._key(number, rank)
            if self._store.check([key]):
                found[rank] = Proposal.decoded(self._store.get(key))
        return found


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks) or "an answer"
