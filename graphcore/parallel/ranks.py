"""Ranks: the processes that work together; they agree before anything is launched.

A rank that fails, leaves or is gone is an error on all of them, which names it, within a time.
Nothing here is captured: what is agreed on travels through the store that the ranks met at.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import graphcore
from graphcore.driver import active
from graphcore.errors import (
    CaptureError,
    ConfigurationError,
    GraphcoreError,
    LifecycleError,
    RankError,
)
from graphcore.executable.communicating import close_graphs
from graphcore.executable.handles import NotCopied
from graphcore.parallel import communicators
from graphcore.parallel.agreement import Agreed, Proposal, State, agree
from graphcore.parallel.places import Place, check_places, place_of
from graphcore.parallel.pulse import Pulse
from graphcore.parallel.rank_store import RankStore, own_store

_log = logging.getLogger("graphcore")
_MOST_TEXT = 400
_TOLD = "_graphcore_told_the_ranks"
_numbers: dict[str, Iterator[int]] = {}
"""Name of a process group -> numbers for what is agreed on in it; every rank counts alike."""


@dataclass(slots=True)
class AgreementCost:
    """What agreeing has cost this rank, on the host.

    Attributes:
        rounds: How many there were.
        seconds: Of all of them, waiting for slower ranks included.
        longest: Seconds of the longest one.
    """

    rounds: int = 0
    seconds: float = 0.0
    longest: float = 0.0

    def note(self, seconds: float) -> None:
        """Counts one more."""
        self.rounds += 1
        self.seconds += seconds
        self.longest = max(self.longest, seconds)

    @property
    def mean_us(self) -> float:
        """Microseconds of a round."""
        return self.seconds / self.rounds * 1e6 if self.rounds else 0.0


class Ranks(NotCopied):
    """The processes of one group, seen by one of them; made by :meth:`join` on all of them.

    Not locked: one thread of each process, the same calls in the same order on all.

    Attributes:
        rank: This one's number.
        size: How many there are.
        group: The process group whose collectives they use.
        device: ``torch.device`` of this rank.
        timeout_seconds: How long the others are waited for.
        cost: What agreeing has cost so far.
    """

    def __init__(
        self, group: Any, device: Any, timeout_seconds: float, *, owns_group: bool
    ) -> None:
        self.group = group
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.device = device
        self.timeout_seconds = timeout_seconds
        self.cost = AgreementCost()
        self._owns_group = owns_group
        self._lost: RankError | None = None
        self._is_closed = False
        number = next(_numbers.setdefault(group.group_name, itertools.count()))
        dist = communicators.distributed()
        store = dist.distributed_c10d._get_default_store()
        prefix = f"graphcore/{group.group_name}/{number}"
        self._pulse = Pulse(
            own_store(store),
            prefix,
            self.rank,
            self.size,
            timeout_seconds=timeout_seconds,
            when_silent=self._note_silence,
            current_round=lambda: self._store.round,
            when_stuck=self._note_stuck,
        )
        self._store = RankStore(own_store(store), prefix, self.rank, self.size, self._pulse.silent)
        _living.add(self)

    @classmethod
    def join(
        cls,
        group: Any = None,
        *,
        device: Any = None,
        backend: str | None = None,
        timeout_seconds: float = 60.0,
    ) -> Ranks:
        """Meets the other ranks, and warms up the communicator.

        Args:
            group: A process group of ``torch.distributed``; None: the default one, which is made
                where there is none (the processes then come from torchrun).
            device: ``torch.device`` of this rank; None: the GPU of its ``LOCAL_RANK`` with NCCL,
                else the CPU.
            backend: Of a group that is made: "nccl" or "gloo"; None: NCCL where there is a GPU.
            timeout_seconds: How long the others are waited for, here and later.

        Raises:
            CaptureError: Inside a capture.
            ConfigurationError: A timeout or a backend that is none; not started as one of several;
                two ranks on one device; other versions of torch or graphcore; a group that cannot
                send what lies on the device.
            DriverUnavailable: torch.distributed, NCCL or gloo is not there.
            RankError: A rank did not come.
        """
        if active.current() is not None:
            raise CaptureError("Ranks.join: not inside a capture")
        is_number = isinstance(timeout_seconds, (int, float))
        if not is_number or isinstance(timeout_seconds, bool) or not timeout_seconds > 0:
            raise ConfigurationError(
                f"timeout_seconds: expected a number above 0, got {timeout_seconds!r}"
            )
        dist = communicators.distributed()
        if group is not None and not hasattr(group, "group_name"):
            raise ConfigurationError(
                f"group: expected a process group that this rank is in, got {group!r}"
            )
        where = _device(dist, group, device, backend)
        owns = not dist.is_initialized()
        if owns:
            chosen = backend or ("nccl" if where.type == "cuda" else "gloo")
            communicators.begin(chosen, timeout_seconds, where)
        ranks = cls(group or dist.group.WORLD, where, timeout_seconds, owns_group=owns)
        try:
            ranks._meet()
        except BaseException:
            ranks.close("joining failed")
            raise
        return ranks

    def _meet(self) -> None:
        import torch

        place = place_of(self.device)
        facts = {"torch": torch.__version__, "graphcore": graphcore.__version__}
        agreed = self.agree("joining", facts=facts, value=place.told())
        self._pulse.start()
        check_places([Place(**each) for each in agreed.values])
        communicators.check_fits(self.group, self.device)
        with self.together("warming up the communicator"):
            communicators.warm_up(self.group, self.device)
        _log.info("rank %d of %d has joined on %s", self.rank, self.size, self.device)

    # ---- agreeing ------------------------------------------------------------------------------

    def agree(
        self,
        subject: str,
        choice: str = "",
        *,
        among: Sequence[str] = (),
        detail: str = "",
        facts: Mapping[str, Any] | None = None,
        value: Any = None,
    ) -> Agreed:
        """What all ranks do next; every rank must call it, with the same subject.

        Args:
            subject: What it is about.
            choice: What this rank would do.
            among: All choices, from the boldest to the most cautious: the most cautious one that
                any rank proposed is agreed on.
            detail: Why this rank chose.
            facts: Name -> value that must be the same on all ranks.
            value: Whatever else the others shall know, as JSON has it.

        Raises:
            CaptureError: Inside a capture.
            ConfigurationError: A fact differs between ranks, on all of them.
            LifecycleError: Closed.
            RankError: A rank failed, has left, is elsewhere, or does not answer.
        """
        if active.current() is not None:
            raise CaptureError(f"{subject}: ranks agree before a capture, not inside one")
        said = {name: str(each) for name, each in (facts or {}).items()}
        begun = time.perf_counter()
        try:
            agreed = agree(self._exchange(Proposal(subject, choice, detail, said, value)), among)
        finally:
            self.cost.note(time.perf_counter() - begun)
        if agreed.reason and agreed.choice != choice:
            _log.info("%s: %s instead of %s: %s", subject, agreed.choice, choice, agreed.reason)
        return agreed

    def fail(self, subject: str, error: BaseException) -> None:
        """Tells the others that this rank cannot take part in the round that they are at.

        They raise RankError, with the error's text; afterwards all may go on.
        """
        if _is_told(error):
            return  # a block inside of this one has
        error.__dict__[_TOLD] = True
        if self._lost is None and not self._is_closed:
            self._pulse.note_failure(self._store.round)
            with suppress(RuntimeError):  # the store may be what failed
                self._store.post(Proposal(subject, detail=brief(error), state=State.FAILED))

    @contextmanager
    def together(self, subject: str) -> Iterator[None]:
        """A block that all ranks run, with collectives in it: an error in one is one on all.

        What this rank raises it tells the others at their next round. Where a collective failed,
        because another rank is gone or too late, the error says which one.

        Raises:
            RankError: Another rank failed or is missing.
        """
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            is_ours = isinstance(error, GraphcoreError) or _is_told(error)
            if isinstance(error, RuntimeError) and not is_ours:
                raise self._blamed(subject, error) from error
            self.fail(subject, error)
            raise

    def _blamed(self, subject: str, error: RuntimeError) -> RankError:
        """Who is behind an error of a collective: who is missing, or said that it failed."""
        told = Proposal(subject, detail=brief(error), state=State.FAILED)
        if self._lost is not None:
            return RankError(f"{subject}: {self._lost}", missing=self._lost.missing)
        try:
            others = self._exchange(told)
        except RankError as found:
            return found
        failed = [rank for rank, each in enumerate(others) if each.state is not State.READY]
        words = "; ".join(f"rank {rank}: {others[rank].detail}" for rank in failed)
        return RankError(f"{subject}: a collective failed: {words}", failed=failed)

    def _exchange(self, proposal: Proposal) -> list[Proposal]:
        if self._is_closed:
            raise LifecycleError(f"{proposal.subject}: expected open ranks, got closed ones")
        if self._lost is not None:
            raise RankError(
                f"{proposal.subject}: the ranks are no longer whole: {self._lost}",
                failed=self._lost.failed,
                missing=self._lost.missing,
            )
        try:
            return self._store.exchange(proposal, self.timeout_seconds)
        except RankError as error:
            if error.missing:
                self._lost = error
            raise

    def _note_silence(self, silent: Sequence[int]) -> None:
        """A rank is gone: later rounds say so at once, and who waits for it is released."""
        names = ", ".join(f"rank {rank}" for rank in silent)
        told = f"{names}: no sign of life for {self.timeout_seconds:g} s"
        _log.warning("rank %d: %s", self.rank, told)
        if self._lost is None:
            self._lost = RankError(told, missing=silent)
        with suppress(RuntimeError):
            self.group.abort()

    def _note_stuck(self, failed: Sequence[int]) -> None:
        """A rank failed, and this one still waits for it: on a GPU its collectives are released."""
        names = ", ".join(f"rank {rank}" for rank in failed)
        _log.warning("rank %d: %s failed, and is still waited for", self.rank, names)
        if self.device.type == "cuda":
            if self._lost is None:
                self._lost = RankError(f"{names}: failed while this rank waited", failed=failed)
            with suppress(RuntimeError):
                self.group.abort()

    # ---- the end -------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def lost(self) -> RankError | None:
        """The error by which a rank was lost; None: all are there, as far as is known."""
        return self._lost

    def close(self, why: str = "") -> None:
        """Leaves: closes the graphs that captured the communicator, then what was made of it.

        The others find at their next round that this rank has left. A process group that
        :meth:`join` has made is destroyed; a given one is its owner's. A second call does nothing.

        Args:
            why: What the others are told.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._pulse.close()
        if self._lost is None:
            with suppress(RuntimeError):
                self._store.post(Proposal("leaving", detail=why, state=State.CLOSED))
        else:  # a launch may wait for a rank that is gone, for ever
            with suppress(RuntimeError):
                self.group.abort()
        close_graphs([self.group])
        dist = communicators.distributed()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close("" if error is None else brief(error))

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "not whole" if self._lost else f"on {self.device}"
        return f"<Ranks {self.rank} of {self.size}, {state}>"


def _is_told(error: BaseException) -> bool:
    return bool(error.__dict__.get(_TOLD))


def brief(error: BaseException) -> str:
    """An error in one line: backends tell where they were compiled, and more."""
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 3]}..."


_living: weakref.WeakSet[Ranks] = weakref.WeakSet()


def _leave() -> None:
    for ranks in list(_living):
        ranks.close("its process ends")


atexit.register(_leave)


def _device(dist: Any, group: Any, device: Any, backend: str | None) -> Any:
    """The device of this rank: the given one, else what group or backend, or the machine, say."""
    import torch

    if device is not None:
        return torch.device(device)
    if dist.is_initialized():
        is_gpu = communicators.default_device(group or dist.group.WORLD).type == "cuda"
    else:
        is_gpu = backend != "gloo" and torch.cuda.is_available()
    if not is_gpu:
        return torch.device("cpu")
    given = os.environ.get("LOCAL_RANK")
    ordinal = torch.cuda.current_device() if given is None else int(given)
    if ordinal >= torch.cuda.device_count():
        raise ConfigurationError(
            f"LOCAL_RANK: expected one of {torch.cuda.device_count()} devices, got {ordinal}: "
            "each rank needs a GPU of its own"
        )
    torch.cuda.set_device(ordinal)
    return torch.device("cuda", ordinal)
