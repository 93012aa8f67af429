"""CallableStep: a step that a Python function launches, over tensors that it declares.

How a step of a model comes in: the function launches on the current stream and works on tensors
that stay where they are. What it declares is what it depends on: another tensor, or another value,
is another step, which has to be said; what is not declared must not change.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from graphcore.driver import Driver, Stream
from graphcore.errors import ConfigurationError, LifecycleError
from graphcore.executable import Graph, capture
from graphcore.executable.legacy_work import turn_on
from graphcore.interop import choose_driver, use_stream
from graphcore.moe.decisions.coverage import NodeList
from graphcore.moe.decisions.graph_uids import GraphUids
from graphcore.moe.decisions.property_probe import Records
from graphcore.moe.slots.group_use import GroupUse
from graphcore.moe.steps.reuse_arguments import check_content, check_step
from graphcore.moe.steps.step_work import Banks, GroupPlaces, StepLook, declared_places
from graphcore.resources.driver_argument import checked_driver
from graphcore.resources.tensors import TensorRef, describe

_uids = GraphUids()


class CallableStep:
    """One step. Not locked.

    It runs and is captured on a stream of its own, which is ordered with the step's stream by
    events: what a library must do before its first capture it does where the capture will be.

    Args:
        identity: Of its graph: a name, or another content that stays.
        function: Launches the step on the current stream of torch or CuPy; called without
            arguments, once a step. In a capture it is called too, and must not wait for the device.
        tensors: Name -> tensor that it reads or writes, in the order of the step: the first is what
            comes in, the last what comes out. Their addresses and shapes are what it depends on.
        groups: The groups of experts that it uses.
        staged: As ``function``, with experts in scratch memory.
        values: Name -> whatever else it depends on.
        rows: Of the step; None: those of its groups, else of its first tensor.
        capabilities: Whatever else selects kernels.
        driver: Where it runs; None: where its tensors are.
        takes_stream: Whether both functions are called with the stream to launch on instead. For
            kernels over memory of neither library: without a stream they go to the legacy one,
            which breaks captures of other threads.

    Attributes:
        uid: Another one after each change that was said.
        obstacle: Why it must not be captured, for its user to set; "" where it may.

    Raises:
        CacheTypeError: Something declared as a tensor is none; a name or value without a hash.
        ConfigurationError: No tensor, nothing to call, no number of rows, groups of different rows.
    """

    def __init__(  # noqa: PLR0913  (each is a choice of its own)
        self,
        identity: Hashable,
        function: Callable[..., object],
        *,
        tensors: Mapping[str, Any],
        groups: Sequence[GroupUse] = (),
        staged: Callable[..., object] | None = None,
        values: Mapping[str, Hashable] | None = None,
        rows: int | None = None,
        capabilities: Sequence[Hashable] = (),
        driver: Driver | None = None,
        takes_stream: bool = False,
    ) -> None:
        functions = {"function": function, "staged": staged}
        check_step(identity, functions, tensors, rows, tuple(capabilities))
        self.identity = identity
        self.capabilities = tuple(capabilities)
        self.obstacle = ""
        self._function, self._staged, self._takes_stream = function, staged, takes_stream
        self._tensors = {name: (each, describe(each, name=name)) for name, each in tensors.items()}
        self._values = dict(values or {})
        for name, value in self._values.items():
            check_content(f"values[{name!r}]", value)
        self.driver = choose_driver(*tensors.values()) if driver is None else checked_driver(driver)
        self._rows = rows
        self._revision = 0
        self._side: Stream | None = None
        self.groups: tuple[GroupUse, ...] = ()
        self.set_groups(groups)
        self._number = self.uid

    # ---- what it is ----------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """Of the step."""
        if self._rows is not None:
            return self._rows
        return self.groups[0].rows if self.groups else (*self._first.shape, 1)[0]

    @property
    def extents(self) -> tuple[tuple[int, ...], ...]:
        """Of its tensors."""
        return tuple(ref.shape for _, ref in self._tensors.values())

    @property
    def has_staged(self) -> bool:
        return self._staged is not None

    def look(self, banks: Banks) -> StepLook:
        """Its tensors as nodes, and a few for each group."""
        nodes: list[Hashable] = [(self._number, name) for name in self._tensors]
        places: list[GroupPlaces] = []
        for use, each in banks:
            made, place = declared_places(self._number, len(nodes), use, each)
            nodes += made
            places.append(place)
        return StepLook(NodeList((self.identity, self._number), tuple(nodes)), tuple(places))

    def records(self) -> Records:
        """What it declared, one record each."""
        tensors = (
            (name, ref.address, ref.shape, ref.strides, ref.dtype, ref.device_kind, ref.device)
            for name, (_, ref) in self._tensors.items()
        )
        return (*tensors, *self._values.items(), *(use.record() for use in self.groups))

    # ---- changing ------------------------------------------------------------------------------

    def set(self, name: str, tensor: Any) -> None:
        """Puts another tensor in the place of a declared one; the function must use it.

        Raises:
            ConfigurationError: None of that name was declared.
            CacheTypeError: It is no tensor.
        """
        if name not in self._tensors:
            raise ConfigurationError(f"name: expected one of {list(self._tensors)}, got {name!r}")
        self._tensors[name] = tensor, describe(tensor, name=name)
        self.changed()

    def set_value(self, name: str, value: Hashable) -> None:
        """Changes what else it depends on, or adds to it.

        Raises:
            CacheTypeError: A value that can change in place.
        """
        check_content(f"values[{name!r}]", value)
        self._values[name] = value
        self.changed()

    def set_groups(self, groups: Sequence[GroupUse]) -> None:
        """Uses other groups, ids or admissions.

        Raises:
            ConfigurationError: Groups of different rows, or one twice; nothing changed.
        """
        found = tuple(groups)
        rows = {use.rows for use in found}
        names = [use.group for use in found]
        if len(rows) > 1 or len(set(names)) < len(names):
            raise ConfigurationError(
                f"groups: expected each once, of the same rows, got {names} of {sorted(rows)} rows"
            )
        self.groups = found
        self.changed()

    def changed(self) -> None:
        """Says that it is not what it was: the next call looks at all that it declared.

        Tensors are looked at here, since torch moves some in place (``resize_``, ``data =``).

        Raises:
            CacheTypeError: One of them is of a kind that cannot be declared; nothing changed.
        """
        self._tensors = {
            name: (each, describe(each, name=name)) for name, (each, _) in self._tensors.items()
        }
        self._revision += 1
        self.uid = _uids.of(self, self._revision)

    # ---- running -------------------------------------------------------------------------------

    def run(self, stream: Stream) -> None:
        """Calls the function once."""
        self._run(self._function, stream)

    def run_staged(self, stream: Stream) -> None:
        """Calls the staged function once; LifecycleError where there is none."""
        if self._staged is None:
            raise LifecycleError(f"step {self.identity!r}: expected a staged function, got none")
        self._run(self._staged, stream)

    def capture(self, stream: Stream, *, rows_by_kernel: bool) -> Graph:
        """Calls the function once in a capture; its graph keeps all that is declared.

        What the function copies is lowered by whoever launches it: ``rows_by_kernel`` is nothing to
        it.
        """
        with capture(self._own_stream(), driver=self.driver) as capturing:
            for name, (tensor, _) in self._tensors.items():
                capturing.keep(tensor, name)
            capturing.keep(self._function, "function")
            self._call(self._function, capturing.stream)
        return capturing.graph

    def _run(self, function: Callable[..., object], stream: Stream) -> None:
        with self._beside(stream):
            self._call(function, self._own_stream())

    def _call(self, function: Callable[..., object], stream: Stream) -> None:
        function(*([stream] if self._takes_stream else []))

    def _beside(self, stream: Stream) -> AbstractContextManager[None]:
        return _ordered(self.driver, stream, self._own_stream())

    def _own_stream(self) -> Stream:
        if self._side is None:
            self._side = self.driver.capture_stream(blocking=True)
        return self._side

    @property
    def _first(self) -> TensorRef:
        return next(iter(self._tensors.values()))[1]

    def __repr__(self) -> str:
        names = ", ".join(self._tensors)
        return f"<CallableStep {self.identity!r}, {self.rows} rows, over {names:.100}>"


@contextmanager
def _ordered(driver: Driver, stream: Stream, side: Stream) -> Any:
    """A block whose work goes to ``side``, between what ``stream`` has and what it gets."""
    with turn_on(stream.handle):
        side.wait(stream.record())
        try:
            with use_stream(driver, side):
                yield
        finally:
            stream.wait(side.record())
