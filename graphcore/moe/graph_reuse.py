"""GraphReuse: runs steps of a model with experts in slots, through graphs where that is safe.

A step warms up, is captured, and is replayed for as long as everything behind its graph is provably
what it was; each call says what it did and why. One thread at a time; the manifest alone is locked.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from graphcore.driver import Driver, Stream, active, as_stream
from graphcore.driver.active import UNDER_WAY
from graphcore.driver.kept import default_driver
from graphcore.errors import CaptureError, ConfigurationError, LifecycleError
from graphcore.interop import current_stream
from graphcore.moe.decisions.certificate import Certificate, CertificateFlag
from graphcore.moe.decisions.coverage import CoverageRecord, Uncertified
from graphcore.moe.decisions.graph_uids import GraphUids
from graphcore.moe.decisions.lookup_key import LookupKey
from graphcore.moe.decisions.options import (
    MoEOptions,
    OptionSetting,
    ResolvedOptions,
    resolve_options,
)
from graphcore.moe.manifests.manifest_registry import ManifestRegistry
from graphcore.moe.manifests.names import Namespace, Phase, RowSemantics
from graphcore.moe.slots.pool_manifest import manifest_of
from graphcore.moe.slots.slot_pool import SlotPool
from graphcore.moe.steps.device_times import DeviceTimes
from graphcore.moe.steps.fact_finder import OFF, FactFinder, said_of_graphs
from graphcore.moe.steps.fast_replay import FastReplay, Given
from graphcore.moe.steps.fast_running import FastRunning
from graphcore.moe.steps.reuse_arguments import check_call, check_making, check_work
from graphcore.moe.steps.reuse_books import ReuseBooks
from graphcore.moe.steps.step_agreement import StepAgreement
from graphcore.moe.steps.step_facts import Step
from graphcore.moe.steps.step_log import Observer, StepLog
from graphcore.moe.steps.step_record import StepResult
from graphcore.moe.steps.step_running import StepRunning
from graphcore.moe.steps.step_work import StepWork
from graphcore.moe.steps.variant_table import FastName, Variant, VariantTable
from graphcore.resources.driver_argument import checked_driver

if TYPE_CHECKING:
    from graphcore.moe.layers.staged import StagedTotals
    from graphcore.moe.overlap.overlapped_decode import OverlappedDecode
    from graphcore.moe.reports.report import ReuseReport
    from graphcore.moe.reports.step_trace import StepTrace

_numbers = itertools.count(1)


class GraphReuse(ReuseBooks):
    """Steps and the graphs of their variants.

    Args:
        driver: Where steps run; None: the pool's, else what :func:`graphcore.open_driver` opens.
        pool: The slots of the experts; None: no step has any.
        manifests: Which manifest holds, and who uses its groups; None: a registry of its own, where
            the first step with experts publishes that of ``pool`` (:func:`manifest_of`).
        decode_boundary_overlap: 0 or 1: a changed decode graph may update the captured executable.
        decode_overlap: 0 or 1: see
            :func:`graphcore.moe.decisions.decode_overlap.overlap_obstacles`.
        command_line: The same two, as the command has them; a keyword beats it, and it beats the
            environment (``GRAPHCORE_DECODE_BOUNDARY_OVERLAP``, ``GRAPHCORE_DECODE_OVERLAP``).
        max_entries: Graphs that stay captured; None is no limit.
        max_bytes: Bytes of all of them; None is no limit.
        idle_seconds: Seconds after which one that no step used goes; None: never.
        clock: Gives seconds, for ``idle_seconds``.
        owner: Whoever runs the steps, by a content that stays; None: a name of its own.
        rank: Of the process among those that share the experts.
        ranks: How many those are.
        agreement: How they agree on each step before anything is launched; None: they do not ask.
            Every rank then makes the same calls in the same order.
        patience_seconds: How long a step that must not touch the slots just now, and has no staged
            way, waits for them.
        device_times: Whether events around launches time them on the device; some us a step.
        observers: Called with a :class:`StepRecord` after each call.

    Attributes:
        pool: The slots; another pool may be put there, and what was captured over the old one is
            not replayed.
        manifests: Which manifest holds.
        options: What is switched on, and where that was said.
        driver: Where steps run.
        rank: Of the process.
        ranks: How many share the experts.

    Raises:
        ConfigurationError: A limit or an option that is none; a pool of another driver.
    """

    def __init__(  # noqa: PLR0913  (each is a choice of its own)
        self,
        *,
        driver: Driver | None = None,
        pool: SlotPool | None = None,
        manifests: ManifestRegistry | None = None,
        decode_boundary_overlap: object = None,
        decode_overlap: object = None,
        command_line: Mapping[str, object] | None = None,
        max_entries: int | None = 64,
        max_bytes: int | None = None,
        idle_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        owner: Hashable = None,
        rank: int = 0,
        ranks: int = 1,
        agreement: StepAgreement | None = None,
        patience_seconds: float = 10.0,
        device_times: bool = False,
        observers: Iterable[Observer] = (),
    ) -> None:
        check_making(owner, rank, ranks, patience_seconds)
        if driver is None:
            driver = default_driver() if pool is None else pool.driver
        self.driver = checked_driver(driver)
        self.manifests = ManifestRegistry() if manifests is None else manifests
        self.pool = pool
        self._publishes = manifests is None and pool is not None
        number = next(_numbers)
        self.owner: Hashable = f"reuse {number}" if owner is None else owner
        self._owner_number, self.rank, self.ranks = number, rank, ranks
        self._agreement = agreement
        keywords = {
            "decode_boundary_overlap": decode_boundary_overlap,
            "decode_overlap": decode_overlap,
        }
        self.options: ResolvedOptions = resolve_options(keywords, command_line)
        self._effective, self.options_refused = self.options.options.effective(self.driver.name)
        self._setting = OptionSetting(self._effective)
        self._log = StepLog(observers, DeviceTimes(self.driver) if device_times else None)
        self._table = VariantTable(
            self.driver,
            max_entries=max_entries,
            max_bytes=max_bytes,
            idle_seconds=idle_seconds,
            clock=clock,
            forget=self._forget,
        )
        self._finder = FactFinder(
            self.driver, self.manifests, self._log.counting, self.owner, rank, ranks
        )
        self._running = StepRunning(
            self._finder,
            self._table,
            self._log,
            self.manifests.ownership,
            self.owner,
            self._effective,
            patience_seconds,
            agreement,
        )
        self._replays = FastRunning(
            self._table, self._log, self.manifests.ownership, self.owner, agreement
        )
        self._fast: dict[FastName, FastReplay] = {}
        self._newest: FastReplay | None = None  # of them
        self._uids = GraphUids()
        self._is_closed = False

    # ---- running -------------------------------------------------------------------------------

    def run(
        self,
        work: StepWork,
        certificate: Certificate | None = None,
        *,
        stream: Any = None,
        phase: Phase | None = None,
        prompt_rows: int = 0,
    ) -> StepResult:
        """Runs one step, exactly once; returns when its work is on the stream.

        Args:
            work: What runs.
            certificate: What it claims to be; None: an ordinary decode step of independent rows.
            stream: Anything that is a stream; None: the current one.
            phase: What it is found by; None: a prompt where any row belongs to one.
            prompt_rows: How many of its rows belong to prompts.

        Returns:
            What it did and why.

        Raises:
            CaptureError: Inside a capture of this thread.
            ConfigurationError: A group that neither manifest nor pool has, or without an admission
                although its slots serve it.
            CacheTypeError: ``work`` is no step.
            ConfigurationError: Rows of prompts that the step does not have, no phase, or no
                certificate.
            LifecycleError: It failed before anything was launched (required work that cannot be
                prepared, a corrupt plan), this is closed, or slots that must not be touched were
                not free in time.
            RankError: Another rank failed, or is missing.
            Exception: What the work or the driver raised, with a note that says what was decided.
                The next call is right.
        """
        fast = self._newest
        if (
            fast is None
            or fast.work is not work
            or fast.prompt_rows != prompt_rows
            or fast.given_phase is not phase
        ):
            fast = self._fast.get((id(work), prompt_rows, phase))
        if fast is not None and not UNDER_WAY and said_of_graphs() != OFF:
            replayed = self._replays.replay(fast, certificate, stream, self.pool)
            if replayed is not None:
                self._newest = fast
                return replayed
        self._refuse_closed()
        if self._agreement is not None:
            self._agreement.at_once(is_ready=False)
        _refuse_inside_capture()
        check_work(work)
        check_call(work.rows, phase, prompt_rows, certificate)
        self._setting.fix()
        if self._publishes and work.groups:
            self._publish(work)
        target = self._stream(stream)
        chosen = phase or (Phase.PROMPT if prompt_rows else Phase.DECODE)
        uid = work.uid
        claimed = self.certificate(work) if certificate is None and work.groups else certificate
        step = Step(work, claimed, target, chosen, prompt_rows, uid)
        key = LookupKey.of(
            work.identity,
            work.extents,
            claimed,
            phase=chosen,
            capabilities=work.capabilities,
            device=self.driver.device,
            rank=self.rank,
            ranks=self.ranks,
        )
        given = Given(certificate, stream, phase)
        result, replay = self._running.run(step, key, self.pool, given)
        if replay is not None:
            self._forget(replay.variant)  # what it was before holds no more, and its work may go
            replay.variant.fast = name = id(work), prompt_rows, phase
            self._fast[name] = replay
        return result

    def certificate(
        self,
        work: StepWork,
        *,
        namespace: Namespace = Namespace.MAIN,
        row_semantics: RowSemantics = RowSemantics.INDEPENDENT,
        sequences: int | None = None,
        required: bool = False,
    ) -> Certificate:
        """The claim that ``work``, as it is now, is such a step.

        Args:
            work: What runs.
            namespace: Whose step it is.
            row_semantics: What its rows are to each other.
            sequences: That its rows belong to; None: as many as rows.
            required: Whether a shortfall is an error. Such a claim holds for this very state of
                ``work``; after a change it has to be made anew.
        """
        rows = work.rows
        return Certificate(
            namespace,
            row_semantics,
            rows,
            rows if sequences is None else sequences,
            owner=self._owner_number,
            owner_generation=1,
            source_uid=self._uids.of(work, "source"),
            graph_uid=work.uid,
            device=self.driver.device,
            rank=self.rank,
            ranks=self.ranks,
            flags=int(CertificateFlag.REQUIRED) if required else 0,
        )

    def certify(self, work: StepWork) -> CoverageRecord | Uncertified:
        """Notes which nodes of ``work``, as it is now, are products of experts.

        A step is certified when it is first seen. One whose nodes changed in place is not covered
        any more, runs without a graph, and has to be certified again.
        """
        return self._finder.sights.certify(work, self.pool)

    # ---- what there is -------------------------------------------------------------------------

    def report(
        self,
        *,
        decode: OverlappedDecode | None = None,
        trace: StepTrace | None = None,
        staged: Mapping[str, StagedTotals] | None = None,
    ) -> ReuseReport:
        """All of this and what the slots did, to print, or to look at as a page.

        Waits for all work where there is a pool, and for the steps of a trace.

        Args:
            decode: Who ran the steps: which of them were queued ahead.
            trace: What took when on the device.
            staged: What went through scratch memory, by group.

        Raises:
            CaptureError: Inside a capture.
        """
        from graphcore.moe.reports.report_facts import report_of

        return report_of(self, decode, trace, staged)

    @property
    def effective_options(self) -> MoEOptions:
        """What holds with this driver; ``options_refused`` says why that is less than asked for."""
        return self._effective

    # ---- the end -------------------------------------------------------------------------------

    def release(self) -> None:
        """Gives up every graph; the next step of each variant begins anew."""
        self._refuse_closed()
        for variant in self._table:
            self._running.release(variant)

    def close(self) -> None:
        """Gives up every graph and waits for the launches that run; a second call does nothing."""
        if not self._is_closed:
            self._table.close()
            self._fast.clear()
            self._newest = None
            self._is_closed = True

    def __enter__(self) -> GraphReuse:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> str:
        raise TypeError(
            "GraphReuse: is neither copied nor pickled, since its graphs are of this process and "
            "would be closed twice; make another one over the same pool"
        )

    def __repr__(self) -> str:
        if self._is_closed:
            return "<GraphReuse closed>"
        counters = self.counters
        return (
            f"<GraphReuse {self.driver.name}:{self.driver.device}, {counters.calls} steps, "
            f"{counters.replays} of them replays, {len(self.cache)} graphs>"
        )

    # ---- helpers -------------------------------------------------------------------------------

    def _publish(self, work: StepWork) -> None:
        """Publishes what the pool has, for want of a registry that knows better."""
        assert self.pool is not None
        known = {use.group: use.top_k for use in work.groups}
        top_k = {name: known.get(name, work.groups[0].top_k) for name in self.pool}
        published = self.manifests.replace(
            manifest_of(self.pool, top_k=top_k, rank=self.rank, ranks=self.ranks)
        )
        if not published.is_accepted:
            raise ConfigurationError(f"pool: {published}; give GraphReuse a registry of manifests")
        self._publishes = False
        if self.pool.ownership is None:
            self.pool.ownership = self.manifests.ownership

    def _stream(self, stream: Any) -> Stream:
        return as_stream(self.driver, current_stream(self.driver) if stream is None else stream)

    def _forget(self, variant: Variant) -> None:
        name, variant.fast = variant.fast, None
        if name is not None and self._fast.pop(name, None) is self._newest:
            self._newest = None

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise LifecycleError("GraphReuse: expected an open one, got a closed one")


def _refuse_inside_capture() -> None:
    capture = active.current()
    if capture is not None:
        raise CaptureError(
            f"GraphReuse: a step is no part of a capture ({capture.name}): it would be decided "
            "once, for every replay; launch its work there instead"
        )
