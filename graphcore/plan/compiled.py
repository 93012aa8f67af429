"""CompiledPlan: a plan that is ready to be launched again and again, as a graph or directly."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from graphcore.advice import advises
from graphcore.errors import LifecycleError

if TYPE_CHECKING:
    from graphcore.driver import Driver
    from graphcore.executable import GraphExec
    from graphcore.plan.plan import GraphPlan


@advises
class CompiledPlan:
    """Made by :meth:`GraphPlan.compile`. Not locked.

    Args:
        plan: The plan, as it was compiled.
        executable: Its executable; None where it runs directly.
        eager: What :meth:`GraphPlan.run` needs besides the stream, where it runs directly.
        reason: Why it is one or the other.
        driver: Where it runs.
    """

    def __init__(
        self,
        plan: GraphPlan,
        executable: GraphExec | None,
        eager: dict[str, Any] | None,
        reason: str,
        driver: Driver,
    ) -> None:
        self.plan = plan
        self.executable = executable
        """The executable, for updates and checks; None where the plan runs directly."""
        self.reason = reason
        self.driver = driver
        """Where launches run, whichever way they do: ``compiled.driver.synchronize()``."""
        self._eager = eager

    @property
    def is_eager(self) -> bool:
        """Whether launches run the plan directly instead of a graph."""
        return self._eager is not None

    def launch(self, stream: Any = None) -> None:
        """Launches on ``stream``; raises as :meth:`GraphExec.launch` or :meth:`GraphPlan.run`."""
        if self.executable is not None:
            self.executable.launch(stream)
        elif self._eager is not None:
            self.plan.run(stream=stream, check=False, **self._eager)
        else:
            raise LifecycleError("launch: expected an open plan, got a closed one")

    def close(self) -> None:
        """Lets go of executable and tensors; a second call does nothing."""
        if self.executable is not None:
            self.executable.close()
        self.executable = self._eager = None

    def __enter__(self) -> CompiledPlan:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "eager" if self.is_eager else "closed" if self.executable is None else "graph"
        return f"<CompiledPlan {self.plan.name!r} {state}>"
