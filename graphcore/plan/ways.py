"""The ways a plan becomes work: built node by node, captured, run directly, or compiled.

One plan, the same bytes each way. Buffers are checked against the plan before anything else.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from graphcore.drawing.model import node_count
from graphcore.driver import Driver, as_stream
from graphcore.driver.records import CaptureState
from graphcore.errors import CaptureError, ConfigurationError
from graphcore.executable import Graph
from graphcore.executable.handles import GraphResource
from graphcore.executable.legacy_work import refuse_legacy_work
from graphcore.interop import current_stream
from graphcore.plan.binding import Binding
from graphcore.plan.build import Builder
from graphcore.plan.capture import add_to_capture, capture_plan
from graphcore.plan.compiled import CompiledPlan
from graphcore.plan.declarations import PlanDeclarations
from graphcore.plan.fitting import bind
from graphcore.plan.issuing import GraphNodes
from graphcore.plan.real_events import check_events
from graphcore.plan.run import Runner
from graphcore.resources.lifetime import OwnerSet

if TYPE_CHECKING:
    from graphcore.driver import Event
    from graphcore.plan.plan import GraphPlan

_log = logging.getLogger("graphcore")


class PlanWays(PlanDeclarations):
    """The half of :class:`GraphPlan` that touches a driver.

    What its methods share: ``buffers`` gives each argument buffer a tensor by name. ``driver`` is
    where the work goes; None: where the tensors are. ``events`` gives plan events real ones by
    name; the others are made. ``copy_kernel`` does the copies that no memcpy node does (scattered
    ones, and all in conditional bodies); pass ``graphcore_kernels.strided_copy``. ``check=False``
    leaves out :meth:`GraphPlan.check`, for plans that are known to be wrong (to see a race, say).
    """

    def build(
        self,
        buffers: Mapping[str, Any],
        *,
        driver: Driver | None = None,
        events: Mapping[str, Event] | None = None,
        copy_kernel: Any = None,
        check: bool = True,
    ) -> Graph:
        """The plan as a graph, node by node; nothing is launched but the warm-ups of calls.

        The graph owns the tensors, callbacks, kernels, events and the memory of calls.

        Args:
            buffers: Name -> tensor, for every argument buffer.
            driver: None: the tensors'.
            events: Name -> event.
            copy_kernel: For copies that no memcpy node does.
            check: Whether the plan is checked first.

        Raises:
            PlanError: The plan has problems, or the buffers or events do not fit it.
            CacheTypeError: A buffer is no tensor.
            LifecycleError: A closed buffer or graph.
            CaptureError: ``GRAPHCORE_DISABLE=1``, or a call that cannot be captured.
            CudaError: The driver's refusal, with the node in a note.
        """
        _refuse_disabled("build")
        binding, builder = self._prepared(buffers, driver, events, copy_kernel, check)
        chosen = binding.driver
        handle = chosen.create_graph()
        try:
            scope = builder.scope(self._plan, binding)
            builder.build(self._plan, GraphNodes(chosen, handle), scope)
        except BaseException:
            GraphResource(chosen, handle, owned=True)  # dropped, and so destroyed, here
            raise
        graph = Graph(
            chosen,
            handle,
            owners=OwnerSet(builder.owners),
            annotations=tuple(builder.annotations),
        )
        graph.plan_nodes = dict(builder.names)
        return graph

    def capture(
        self,
        buffers: Mapping[str, Any],
        *,
        driver: Driver | None = None,
        events: Mapping[str, Event] | None = None,
        copy_kernel: Any = None,
        rows_by_kernel: bool = False,
        check: bool = True,
        **capture_options: Any,
    ) -> Graph:
        """The plan as a graph, by one capture of its work; calls are captured where they stand.

        Args:
            buffers: Name -> tensor, for every argument buffer.
            driver: None: the tensors'.
            events: Name -> event.
            copy_kernel: For copies that no memcpy node does.
            rows_by_kernel: Let it do float32 copies with a step between rows as well: an update in
                place changes how many rows a kernel copies, and cannot change those of a memcpy
                node. Copies from or to host memory stay what they are.
            check: Whether the plan is checked first.
            capture_options: As of :func:`graphcore.capture`.

        Raises:
            As :meth:`build` and :func:`graphcore.capture`.
        """
        _refuse_disabled("capture")
        if rows_by_kernel and copy_kernel is None:
            raise ConfigurationError("rows_by_kernel: expected a copy_kernel beside it, got None")
        binding, builder = self._prepared(buffers, driver, events, copy_kernel, check)
        builder.rows_by_kernel = rows_by_kernel
        return capture_plan(self._plan, binding, builder, capture_options)

    def run(
        self,
        buffers: Mapping[str, Any],
        stream: Any = None,
        *,
        driver: Driver | None = None,
        events: Mapping[str, Event] | None = None,
        copy_kernel: Any = None,
        check: bool = True,
    ) -> None:
        """Runs the plan once, directly on ``stream``; where that captures, adds the plan there.

        Nothing is launched before all is checked. It returns when the work is on the stream; a
        plan that allocates waits for its end. Conditional nodes run as small graphs.

        Args:
            buffers: Name -> tensor, for every argument buffer.
            stream: Anything that is a stream; None: the current one of torch or CuPy, or the
                legacy stream.
            driver: None: the tensors'.
            events: Name -> event.
            copy_kernel: For copies that no memcpy node does.
            check: Whether the plan is checked first.

        Raises:
            As :meth:`build`; after a CudaError what came before the node it names is launched.
            CaptureError: Also: on the legacy stream, where it would break a capture.
        """
        binding, builder = self._prepared(buffers, driver, events, copy_kernel, check)
        chosen = binding.driver
        target = as_stream(chosen, current_stream(chosen) if stream is None else stream)
        # first: asking the legacy stream anything is work that breaks such a capture
        refuse_legacy_work(chosen, target.handle, "run")
        if chosen.capture_status(target.handle).state is not CaptureState.NONE:
            add_to_capture(self._plan, binding, builder, target.handle)
            return
        device = chosen.device if stream is None else chosen.stream_device(target.handle)
        if device != chosen.device:
            raise ConfigurationError(
                f"stream: expected one of device {chosen.device}, got one of device {device}"
            )
        Runner(builder, target).run(self._plan, binding)

    def compile(
        self,
        buffers: Mapping[str, Any],
        *,
        driver: Driver | None = None,
        events: Mapping[str, Event] | None = None,
        copy_kernel: Any = None,
        check: bool = True,
    ) -> CompiledPlan:
        """The plan ready to be launched: an executable, or, with ``GRAPHCORE_DISABLE=1``, none.

        Args and errors as of :meth:`build`; the result's ``reason`` says which it is.
        """
        options = {"events": events, "copy_kernel": copy_kernel}
        if not _is_disabled():
            graph = self.build(buffers, driver=driver, check=check, **options)
            reason = f"built as a graph of {node_count(len(self.nodes))}"
            made = CompiledPlan(self._plan, graph.instantiate(), None, reason, graph.driver)
        else:
            binding, _ = self._prepared(buffers, driver, events, copy_kernel, check)
            eager = {"buffers": dict(buffers), "driver": binding.driver, **options}
            reason = "GRAPHCORE_DISABLE=1: every launch runs the plan directly"
            made = CompiledPlan(self._plan, None, eager, reason, binding.driver)
        _log.info("plan %r: %s", self.name, made.reason)
        return made

    @property
    def _plan(self) -> GraphPlan:
        return cast("GraphPlan", self)

    def _prepared(
        self,
        buffers: Mapping[str, Any],
        driver: Driver | None,
        events: Mapping[str, Event] | None,
        copy_kernel: Any,
        check: bool,
    ) -> tuple[Binding, Builder]:
        """Everything checked that can be without lowering."""
        plan = self._plan
        if check:
            plan.check()
        if copy_kernel is not None and not callable(getattr(copy_kernel, "plan", None)):
            raise ConfigurationError(
                "copy_kernel: expected an object with plan(dst, src), such as "
                f"graphcore_kernels.strided_copy, got {type(copy_kernel).__name__}"
            )
        binding = bind(plan, buffers, driver)
        given = check_events(plan, events, binding.driver)
        return binding, Builder(binding.driver, given, copy_kernel)


def _is_disabled() -> bool:
    return os.environ.get("GRAPHCORE_DISABLE") == "1"


def _refuse_disabled(what: str) -> None:
    if _is_disabled():
        raise CaptureError(
            f"plan.{what}: the environment variable GRAPHCORE_DISABLE=1 turns graphs off; unset "
            "it, or use plan.run, or plan.compile, which then runs directly"
        )
