"""What a plan declares before its nodes use it: buffers, conditions and events, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphcore.errors import CacheTypeError, ConfigurationError, PlanError
from graphcore.plan.contents import PlanContents
from graphcore.plan.integers import check_sizes
from graphcore.plan.records import Condition, Origin, PlanBuffer, PlanEvent
from graphcore.plan.views import check_reach
from graphcore.resources.dtypes import find_dtype
from graphcore.resources.tensors import contiguous_strides


class PlanDeclarations(PlanContents):
    """A plan's names for what its nodes work on; bodies share them."""

    def buffer(
        self, name: str, shape: Any, dtype: Any = "float32", *, strides: Any = None
    ) -> PlanBuffer:
        """A buffer that is given when the plan is built, run or captured.

        Args:
            name: Unique in the plan.
            shape: Sizes.
            dtype: A name, a torch dtype or a NumPy dtype.
            strides: Steps in elements; None: dense, in C order.

        Raises:
            PlanError: The name is taken.
            ConfigurationError: A size, stride or element type that cannot be.
        """
        return self._declare(name, shape, dtype, strides, "argument")

    def condition(self, name: str, default: int | None = 0) -> Condition:
        """A value that conditional nodes are decided by; pass it to kernels as a u64 argument.

        Args:
            name: Unique in the plan.
            default: What each launch begins with; None keeps the value from launch to launch.

        Raises:
            PlanError: The name is taken.
            ConfigurationError: ``default`` is no int of 32 bits.
        """
        self._check_new(name, "condition", self._registry.conditions)
        if default is not None and (
            not isinstance(default, int) or not 0 <= int(default) < 1 << 32
        ):
            raise ConfigurationError(
                f"condition {name!r}: expected a default of 32 bits or None, got {default!r:.40}"
            )
        made = Condition(name, default if default is None else int(default))
        self._registry.conditions[name] = made
        return made

    def event(self, name: str, *, external: bool = False) -> PlanEvent:
        """An event for :meth:`record` and :meth:`wait`.

        Args:
            name: Unique in the plan.
            external: Whether it is recorded outside the plan.

        Raises:
            PlanError: The name is taken.
            ConfigurationError: ``external`` is no bool.
        """
        self._check_new(name, "event", self._registry.events)
        if not isinstance(external, bool):
            raise ConfigurationError(
                f"event {name!r}.external: expected a bool, got {external!r:.40}"
            )
        made = PlanEvent(name, external)
        self._registry.events[name] = made
        return made

    def _declare(
        self, name: str, shape: Any, dtype: Any, strides: Any, origin: Origin
    ) -> PlanBuffer:
        self._check_new(name, "buffer", self._registry.buffers)
        sizes = check_sizes(shape, f"buffer {name!r}.shape")
        try:
            found = find_dtype(dtype, f"buffer {name!r}.dtype")
        except CacheTypeError as error:
            raise ConfigurationError(str(error)) from None
        if strides is None:
            steps = contiguous_strides(sizes)
        else:
            steps = check_sizes(strides, f"buffer {name!r}.strides", least=None)
        if len(steps) != len(sizes):
            raise ConfigurationError(
                f"buffer {name!r}.strides: expected one for each of {len(sizes)} axes, got {steps}"
            )
        made = PlanBuffer(name, sizes, found.name, found.itemsize, steps, origin)
        check_reach(made.whole, f"buffer {name!r}")
        self._registry.buffers[name] = made
        self._registry.revision += 1
        return made

    def _check_new(self, name: Any, sort: str, known: Mapping[str, object]) -> None:
        if not isinstance(name, str) or not name:
            raise ConfigurationError(
                f"name of the {sort}: expected a str that is not empty, got {name!r:.60}"
            )
        if name in known:
            raise PlanError(f"{self._title()} has a {sort} {name!r} already")
