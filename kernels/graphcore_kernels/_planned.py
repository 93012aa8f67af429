"""Planned: work whose kernels were checked and chosen, to be launched as often as wanted.

The first launch on a stream finds the driver, loads the kernels and prepares a call for each; the
next one on it is two comparisons and those calls. What a plan is bound to is one object, exchanged
whole, so that threads may share a plan. Where anything captures, each launch takes the long way,
which knows what becomes part of a graph and who has to stay alive.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from graphcore.driver import Driver, Kernel, Stream, active
from graphcore.driver.active import UNDER_WAY
from graphcore.driver.records import LaunchConfig
from graphcore_kernels._drivers import Operand, Place, choose_place, current_stream_reader
from graphcore_kernels._module import load

_NONE: Any = object()  # is no stream


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """One kernel of a plan: what a graph has as a node."""

    kernel: Kernel
    config: LaunchConfig
    arguments: tuple[bytes, ...]


class Bound:
    """What launches are bound to. Never changed.

    Args:
        stream: As it was given; None: the current one; what nobody gives: nothing is bound.
        place: Where.
        launch: Launches there.
        call: The same, where a true result says that it did not: another stream is current.
    """

    __slots__ = ("call", "launch", "place", "stream")

    def __init__(
        self,
        stream: Any,
        place: Place | None,
        launch: Callable[[], None],
        call: Callable[[], object] | None = None,
    ) -> None:
        self.stream = stream
        self.place = place
        self.launch = launch
        self.call: Callable[[], object] = call or launch


def _launch_nothing() -> None:
    """What an unbound plan does."""


_UNBOUND = Bound(_NONE, None, _launch_nothing)


class Binding:
    """Where the launches of a plan go, if they went anywhere before."""

    __slots__ = ("__weakref__", "now")

    def __init__(self) -> None:
        self.now = _UNBOUND

    def stream_closed(self) -> None:
        """The stream was closed: the next launch looks, and says so."""
        self.now = _UNBOUND


@dataclass(frozen=True, slots=True)
class Planned(ABC):
    """What the plans of this package are."""

    name: ClassVar[str]
    """Of the work: what the operands are kept by, in a capture."""
    binding: Binding = field(default_factory=Binding, init=False, repr=False, compare=False)

    def launch(self, stream: Any = None) -> None:
        """Does the work on ``stream``, or adds its kernel nodes where that captures.

        Nothing is allocated or synchronised on the device; without anything to do there is no
        launch and no node. The graph of a capture that graphcore has under way keeps every operand
        alive. The fast form gives the same stream object each time.

        Args:
            stream: Anything that is a stream. None: the capture under way on this thread, else
                torch's or CuPy's current stream where the tensors are theirs, else the legacy one.

        Raises:
            CacheTypeError: ``stream`` is no stream.
            ConfigurationError: The stream, or the capture under way, is another device's.
            LifecycleError: The stream is closed.
            CudaError: The driver refused a launch.
        """
        bound = self.binding.now
        if stream is not bound.stream or UNDER_WAY or bound.call():
            self._look(stream)

    @abstractmethod
    def kept(self) -> Mapping[str, Operand]:
        """Every operand by its name."""

    @abstractmethod
    def kernels(self, driver: Driver) -> Sequence[KernelLaunch]:
        """What is launched on the device of ``driver``, in order."""

    def home(self) -> Driver | None:
        """The driver, where the plan names it."""
        return None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return False

    def _look(self, stream: Any) -> None:
        """A launch that is not known to be one more of the same."""
        if self.is_empty:
            return
        operands = self.kept()
        place = choose_place(stream, tuple(operands.values()), self.home())
        if UNDER_WAY:
            driver = place.driver
            for each in self.kernels(driver):
                function = load(driver, each.kernel)
                driver.launch(function, each.config, each.arguments, place.stream)
            if place.is_captured:
                for name, operand in operands.items():
                    active.keep(operand.owner, f"{self.name} {name}")
            return
        self._bind(stream, place)()

    def _bind(self, stream: Any, place: Place) -> Callable[[], None]:
        """Binds the next launches to ``place``; gives what launches there."""
        bound = self.binding.now
        launch = bound.launch
        if bound.place != place:
            launch = _launches(place, self.kernels(place.driver))
        if stream is not None:
            self.binding.now = Bound(stream, place, launch)
            if isinstance(stream, Stream):
                stream.when_closed(self.binding)
            return launch
        read = current_stream_reader(place.driver, tuple(self.kept().values()))
        if read is None:  # looked up the long way each time
            self.binding.now = Bound(_NONE, place, launch)
        else:
            self.binding.now = Bound(None, place, launch, _while_current(read, launch))
        return launch


@dataclass(frozen=True, slots=True)
class OneKernel(Planned):
    """A plan of one kernel.

    Args:
        operands: Every tensor by its name; the plan keeps them alive.
        kernel: The kernel that does it.
        config: The launch shape.
        arguments: The kernel's arguments, packed.
    """

    operands: Mapping[str, Operand]
    kernel: Kernel
    config: LaunchConfig
    arguments: tuple[bytes, ...]

    def kept(self) -> Mapping[str, Operand]:
        return self.operands

    def kernels(self, driver: Driver) -> Sequence[KernelLaunch]:
        del driver  # the shape is that of every device
        return (KernelLaunch(self.kernel, self.config, self.arguments),)

    def values(self, views: Mapping[str, Any]) -> tuple[Any, ...]:
        """The kernel's arguments, with ``views`` for the operands, by name.

        So that a :class:`graphcore.GraphPlan` launches it over its own buffers, and sees what it
        reads and writes: ``plan.launch(made.kernel, made.config, *made.values(buffers))``.
        """
        packed = zip(self.kernel.parameters, self.kernel.unpack(self.arguments), strict=True)
        return tuple(views.get(each.name) if each.is_pointer else value for each, value in packed)


def _launches(place: Place, kernels: Sequence[KernelLaunch]) -> Callable[[], None]:
    """Launches each of ``kernels``; what the driver refuses goes to it once more, to be told."""
    driver, stream = place.driver, place.stream
    calls = []
    for each in kernels:
        launch = load(driver, each.kernel), each.config, each.arguments, stream
        calls.append((driver.bind_kernel(*launch), partial(driver.launch, *launch)))
    if len(calls) == 1:
        ((call, again),) = calls

        def launch_one() -> None:
            if call():
                again()

        return launch_one

    def launch_all() -> None:
        for each, once_more in calls:
            if each():
                once_more()

    return launch_all


def _while_current(read: Callable[[], int], launch: Callable[[], None]) -> Callable[[], object]:
    """``launch``, as long as ``read`` says what it says now; else a true result."""
    expected = read()

    def call() -> bool:
        if read() != expected:
            return True
        launch()
        return False

    return call
