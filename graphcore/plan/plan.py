"""GraphPlan: a graph written down before it exists, one method per kind of node.

A plan needs neither driver nor kernels loaded: it can be checked, drawn and saved anywhere. Order
is derived from what nodes read and write, in program order, unless ``after=`` gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from graphcore.advice import advises, instead
from graphcore.driver.kernel import Kernel
from graphcore.driver.records import LaunchConfig
from graphcore.errors import ConfigurationError, PlanError
from graphcore.plan.arguments import as_views, check_arguments, check_config, derive_accesses
from graphcore.plan.embedding import bind, check_embedding
from graphcore.plan.fills import fill_of
from graphcore.plan.forms import PlanForms
from graphcore.plan.integers import check_size
from graphcore.plan.records import (
    Allocate,
    Call,
    Callback,
    Condition,
    Conditional,
    Deallocate,
    Embed,
    EmbedGraph,
    Join,
    Launch,
    Memcpy,
    Memset,
    PlanBuffer,
    PlanEvent,
    PlanNode,
    RecordEvent,
    View,
    WaitEvent,
)
from graphcore.plan.views import as_view
from graphcore.plan.ways import PlanWays


@advises
class GraphPlan(PlanWays, PlanForms):
    """A plan of a CUDA graph: symbolic buffers, and nodes that say what they read and write.

    Every method that adds a node takes ``name`` (unique in its plan or body; generated where not
    given) and ``after``: nodes, their names (also of later nodes) or sequences of both, which
    replace the derived order for this node; ``after=()`` orders it after nothing.

    Derived order: a node comes after each earlier node that touches a byte it touches, where one
    of the two writes it; a wait after the records of its event; what sets a condition before the
    conditional node it decides; host callbacks one after the other. A record comes after all nodes
    before it, a wait before all nodes after it; a join, and a callback, call or graph of which no
    reads and writes are known, both.
    """

    # ---- memory of the graph ------------------------------------------------------------------

    def allocate(
        self, name: str, shape: Any, dtype: Any = "float32", *, after: Any = None
    ) -> PlanBuffer:
        """Memory that the graph itself allocates at every launch; :meth:`deallocate` ends it.

        Raises:
            PlanError: The name is taken, or the plan takes no nodes now.
            ConfigurationError: As :meth:`buffer`, or no bytes at all.
        """
        buffer = self._declare(name, shape, dtype, None, "allocated")
        try:
            if not buffer.nbytes:
                raise ConfigurationError(f"buffer {name!r}: an allocation of 0 bytes is no node")
            whole = (buffer.whole,)
            self._add(Allocate(buffer), f"allocate {name}", name=None, after=after, writes=whole)
        except ConfigurationError:
            del self._registry.buffers[name]
            raise
        return buffer

    def deallocate(
        self, buffer: PlanBuffer, *, after: Any = None, name: str | None = None
    ) -> PlanNode:
        """Ends the memory of an :meth:`allocate`.

        Raises:
            ConfigurationError: ``buffer`` is no buffer.
        """
        if not isinstance(buffer, PlanBuffer):
            raise ConfigurationError(
                f"buffer: expected a buffer of the plan, got {type(buffer).__name__}"
            )
        base = f"deallocate {buffer.name}"
        return self._add(Deallocate(buffer), base, name=name, after=after, writes=(buffer.whole,))

    @classmethod
    def from_json(cls, text: str, kernels: Sequence[Kernel] = ()) -> GraphPlan:
        """The plan that :meth:`to_json` wrote.

        Args:
            text: What it wrote.
            kernels: Taken, by name and signature, in place of the saved ones. Without, a kernel is
                compiled from the saved source, and cannot run on the emulated driver: its Python
                reference is not saved.

        Raises:
            ConfigurationError: Another text, a damaged one, one of a version this library does not
                know, or a kernel of another signature than the saved one.
        """
        from graphcore.plan.loading import from_json

        return from_json(text, kernels, cls)

    # ---- nodes --------------------------------------------------------------------------------

    def launch(
        self,
        kernel: Kernel,
        config: LaunchConfig,
        *arguments: Any,
        reads: Any = None,
        writes: Any = None,
        after: Any = None,
        name: str | None = None,
    ) -> PlanNode:
        """A kernel launch.

        Args:
            kernel: What to launch.
            config: Grid, block and attributes.
            arguments: One per parameter: views or buffers for pointers (None: a null pointer),
                conditions for the u64 that takes their handle, scalars of the parameter's width.
            reads: What it reads of memory; None: all it has pointers to.
            writes: What it writes; None: all it has pointers to that are not ``const``.
            after: Replaces the derived order.
            name: None: the kernel's.

        Raises:
            ConfigurationError: A wrong count, or an argument of another kind, width or element
                type than its parameter; names the argument's index.
        """
        checked = check_arguments(kernel, arguments)
        work = Launch(kernel, check_config(config), checked)
        read, written = derive_accesses(kernel, checked)
        return self._add(
            work,
            kernel.name,
            name=name,
            after=after,
            reads=read if reads is None else as_views(reads, "reads"),
            writes=written if writes is None else as_views(writes, "writes"),
        )

    def memcpy(self, dst: Any, src: Any, *, after: Any = None, name: str | None = None) -> PlanNode:
        """A copy of ``src`` to ``dst``, views of one shape and element type.

        Raises:
            ConfigurationError: One of them is no buffer or view of one.
        """
        to, origin = as_view(dst, "dst"), as_view(src, "src")
        base = f"copy {origin.buffer.name} to {to.buffer.name}"
        return self._add(
            Memcpy(to, origin), base, name=name, after=after, reads=(origin,), writes=(to,)
        )

    def memset(
        self, dst: Any, value: Any, *, after: Any = None, name: str | None = None
    ) -> PlanNode:
        """A fill.

        Args:
            dst: A buffer or view.
            value: A float where the elements are floats; an int is the bits of one element.
            after: Replaces the derived order.
            name: None: made from the buffer's.

        Raises:
            ConfigurationError: The value does not fit the element type, or is one of 8 or 16
                bytes whose 4-byte words differ, which no memset node can fill.
        """
        view, bits = fill_of(as_view(dst, "dst"), value)
        base = f"set {view.buffer.name}"
        return self._add(Memset(view, bits), base, name=name, after=after, writes=(view,))

    def callback(
        self,
        function: Callable[[], None],
        *,
        reads: Any = (),
        writes: Any = (),
        after: Any = None,
        name: str | None = None,
    ) -> PlanNode:
        """A host callback without arguments, run at every launch; it must not call CUDA.

        Callbacks run one after the other, in program order.

        Raises:
            ConfigurationError: ``function`` cannot be called.
        """
        read, written = as_views(reads, "reads"), as_views(writes, "writes")
        base = f"callback {_name_of(function)}"
        return self._add(
            Callback(function), base, name=name, after=after, reads=read, writes=written
        )

    def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        reads: Any = None,
        writes: Any = None,
        warmup: int = 1,
        after: Any = None,
        name: str | None = None,
    ) -> PlanNode:
        """A Python callable that launches work (torch, Triton, CuPy), captured as a child graph.

        Args:
            function: Called with ``arguments`` when the plan is built, run or captured.
            arguments: Views and buffers arrive as tensors, conditions as their handles.
            reads: What it reads; None: all views among the arguments.
            writes: What it writes; None: all views among the arguments.
            warmup: How often it runs, on copies of its buffers, before it is captured.
            after: Replaces the derived order.
            name: None: the function's.

        Raises:
            ConfigurationError: ``function`` cannot be called, or ``warmup`` is no count.
        """
        times = check_size(warmup, "warmup")
        given = tuple(a.whole if isinstance(a, PlanBuffer) else a for a in arguments)
        views = tuple(a for a in given if isinstance(a, View))
        return self._add(
            Call(function, given, times),
            _name_of(function),
            name=name,
            after=after,
            reads=views if reads is None else as_views(reads, "reads"),
            writes=views if writes is None else as_views(writes, "writes"),
        )

    def embed(
        self,
        what: Any,
        bindings: Mapping[str, Any] | None = None,
        *,
        reads: Any = (),
        writes: Any = (),
        after: Any = None,
        name: str | None = None,
    ) -> PlanNode:
        """Another plan, or a graph that exists, as a child graph.

        Args:
            what: A plan or a :class:`graphcore.Graph`. A plan is taken as it is when this one is
                built.
            bindings: Of a plan: a view for each of its argument buffers, by name; layouts must be
                equal.
            reads: Of a graph: what it reads (a plan says it itself).
            writes: Of a graph: what it writes.
            after: Replaces the derived order.
            name: None: the plan's.

        Raises:
            PlanError: A buffer without binding, a binding without buffer, or a plan that would
                contain itself.
            ConfigurationError: A binding of another layout, or neither plan nor graph.
        """
        read, written = as_views(reads, "reads"), as_views(writes, "writes")
        if not isinstance(what, GraphPlan):
            work: Embed | EmbedGraph = EmbedGraph(check_embedding(what, bindings))
            base = "graph"
        else:
            if read or written:
                raise ConfigurationError("reads, writes: an embedded plan says itself what it does")
            work, read, written = bind(self, what, {} if bindings is None else bindings)
            self._deepen(1 + what._registry.height)
            base = what.name or "plan"
        node = self._add(work, base, name=name, after=after, reads=read, writes=written)
        if isinstance(what, GraphPlan):
            self._registry.embed(what, self._depth)
        return node

    def join(self, *, after: Any = None, name: str | None = None) -> PlanNode:
        """A node that only joins: ``after``, or everything before it."""
        return self._add(Join(), "join", name=name, after=after)

    def record(self, event: PlanEvent, *, after: Any = None, name: str | None = None) -> PlanNode:
        """Records ``event`` when all nodes before this one, or ``after``, are done."""
        work = RecordEvent(_check(event, PlanEvent, "event"))
        return self._add(work, f"record {event.name}", name=name, after=after)

    def wait(self, event: PlanEvent, *, after: Any = None, name: str | None = None) -> PlanNode:
        """Lets the nodes after this one wait for ``event``."""
        work = WaitEvent(_check(event, PlanEvent, "event"))
        return self._add(work, f"wait {event.name}", name=name, after=after)

    # ---- conditional nodes --------------------------------------------------------------------

    @contextmanager
    def if_then(
        self, condition: Condition, *, after: Any = None, name: str | None = None
    ) -> Iterator[GraphPlan]:
        """Runs the body, which the block fills, where the condition is not 0."""
        with self._bodies("if", condition, 1, after, name) as (body,):
            yield body

    @contextmanager
    def if_else(
        self, condition: Condition, *, after: Any = None, name: str | None = None
    ) -> Iterator[tuple[GraphPlan, GraphPlan]]:
        """Runs the first body where the condition is not 0, else the second."""
        with self._bodies("if", condition, 2, after, name) as (then, other):
            yield then, other

    @contextmanager
    def switch(
        self, condition: Condition, count: int, *, after: Any = None, name: str | None = None
    ) -> Iterator[tuple[GraphPlan, ...]]:
        """Runs the body whose number the condition is; none where it is ``count`` or more."""
        number = check_size(count, "count", least=1)
        with self._bodies("switch", condition, number, after, name) as bodies:
            yield bodies

    @contextmanager
    def while_loop(
        self, condition: Condition, *, after: Any = None, name: str | None = None
    ) -> Iterator[GraphPlan]:
        """Runs the body again and again, as long as the condition is not 0 before it."""
        with self._bodies("while", condition, 1, after, name) as (body,):
            yield body

    @contextmanager
    def _bodies(
        self,
        form: Literal["if", "while", "switch"],
        condition: Condition,
        count: int,
        after: Any,
        name: str | None,
    ) -> Iterator[tuple[GraphPlan, ...]]:
        """The node is added when the block ends without an exception."""
        _check(condition, Condition, "condition")
        if self._open:
            raise PlanError(f"{self._title()}: the block of {self._open!r} is still open")
        self._resolve(after)
        self._deepen(1)
        title = self._reserve(f"{form} {condition.name}") if name is None else name
        bodies = tuple(GraphPlan(f"{title}/body {number}", around=self) for number in range(count))
        self._open = title
        try:
            yield bodies
        except BaseException:
            if name is None:
                self._release(title)
            raise
        finally:
            self._open = ""
        work = Conditional(form, condition, bodies)
        self._add(work, title, name=title, after=after)


def _check(value: Any, kind: type, field: str) -> Any:
    if not isinstance(value, kind):
        raise ConfigurationError(
            f"{field}: expected what plan.{field}(...) returned, got {type(value).__name__}"
        )
    return value


def _name_of(function: Any) -> str:
    if not callable(function):
        raise ConfigurationError(
            f"function: expected a callable, got {type(function).__name__}"
            f"{instead(function, 'function')}"
        )
    name = getattr(function, "__name__", None) or type(function).__name__
    return "function" if name == "<lambda>" else str(name)
