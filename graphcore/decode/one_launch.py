"""OneLaunch: a captured decode step in a WHILE node, so that one launch decodes a generation.

The body is the step's own graph, its copies done by a kernel (CUDA takes no copy node that was
captured elsewhere), and a kernel that publishes the token and decides, on the device, whether there
is another step: tokens left of the budget, rows left that have not finished, no stop asked for. The
budget is read at each launch, so one executable serves every number of tokens. Not locked; one
launch runs at a time.
"""

from __future__ import annotations

import time

import torch
from graphcore_kernels import strided_copy
from graphcore_kernels.decode_loop import begin_decode_loop, end_decode_step, loop_config

from graphcore.decode.pace import SLOW, Pace
from graphcore.decode.token_ring import TokenRing
from graphcore.driver import Driver
from graphcore.executable import Graph, GraphExec
from graphcore.executable.fence import Fence
from graphcore.plan import GraphPlan
from graphcore.resources.buffer import Buffer


class OneLaunch:
    """Graph, executable and token ring of one step's loop; owns all three.

    Args:
        step: The captured step. It may be closed later: the loop holds its own copy, and keeps
            alive what the step keeps alive.
        token: int64 ``[rows]``, what the step writes its token to.
        finished: bool ``[rows]``, the step's flags; the loop ends when all are set.
        capacity: Most tokens of one launch.
        driver: Where the step was captured.

    Raises:
        PlanError: The step holds nodes that no conditional body takes (host callbacks, events).
        CudaError: The driver's refusal, with the node it blames.
    """

    def __init__(
        self,
        step: Graph,
        token: torch.Tensor,
        finished: torch.Tensor,
        capacity: int,
        driver: Driver,
    ) -> None:
        rows = token.shape[0]
        self.ring = TokenRing(driver, capacity, rows)
        progress = Buffer.allocate((2,), "int64", driver=driver)
        plan = _plan(step, self.ring, rows)
        buffers = {"token": token, "finished rows": finished, "progress": progress}
        self.graph = plan.build(buffers, driver=driver, copy_kernel=strided_copy)
        self.graph.keep(self.graph.owners.with_(self.ring, label="token ring"))
        self.executable: GraphExec = self.graph.instantiate(guard="owners")
        self._fence: Fence | None = None
        self._may_end_early = True

    def start(self, max_new_tokens: int, *, may_end_early: bool = True) -> None:
        """Launches the loop on the current stream; returns at once on a device.

        Args:
            max_new_tokens: The budget.
            may_end_early: Whether any id ends a row; where none does, waits look less often.

        Raises:
            StaleGraphError: A captured buffer was replaced; nothing was launched.
            CudaError: The driver's refusal.
        """
        self._fence, self._may_end_early = None, may_end_early
        self.ring.begin(max_new_tokens)
        self.executable.launch()
        self._fence = self.executable.fence()

    def stop(self) -> None:
        """Ends the loop after the token that it works on. No driver call; safe at any time."""
        self.ring.stop()

    def wait_for(self, count: int) -> bool:
        """Waits until ``count`` tokens are published, or the loop is over.

        The host looks at pinned memory, with the pauses of :class:`Pace`; only where nothing has
        come for longer is the driver asked, which tells a failure. Ctrl-C comes through.

        Returns:
            Whether they are published.

        Raises:
            CudaError: The launch failed.
        """
        ring, before = self.ring, -1
        pace, since = Pace(may_end_early=self._may_end_early), time.perf_counter()
        while not ring.is_over and (published := ring.published) < count:
            left = 1 if ring.is_asked_to_stop else min(count, ring.budget) - published
            pause = pace.pause(time.perf_counter() - since, published, left)
            if pause >= SLOW and published == before and self._has_ended():
                break  # also without a last word: the launch failed, or never was
            before = published
            time.sleep(pause)
        return ring.published >= count

    def wait(self) -> None:
        """Waits until the loop is over; raises as :meth:`wait_for`."""
        self.wait_for(self.ring.capacity + 1)

    def _has_ended(self) -> bool:
        if self._fence is None:  # an interrupt came between the launch and its fence
            self._fence = self.executable.fence()
        return self._fence is None or self._fence.has_passed()

    def mark_stale(self, how: str, name: str) -> None:
        """A captured buffer was replaced: launches raise StaleGraphError, naming it."""
        self.executable.mark_stale(how, name)

    def close(self) -> None:
        """Gives executable and graph back; a loop that runs is asked to stop, and ends first."""
        self.stop()
        self.executable.close()
        self.graph.close()


def _plan(step: Graph, ring: TokenRing, rows: int) -> GraphPlan:
    plan = GraphPlan("generation in one launch")
    token = plan.buffer("token", (rows,), "int64")
    finished = plan.buffer("finished rows", (rows,), "bool")
    progress = plan.buffer("progress", (2,), "int64")
    more = plan.condition("more tokens")
    config = loop_config(rows)
    plan.launch(begin_decode_loop, config, more, finished, progress, ring.control, rows)
    with plan.while_loop(more, name="tokens") as body:
        body.embed(step, name="decode step")
        body.launch(
            end_decode_step, config, more, token, finished, progress, ring.address, ring.control,
            rows,
        )  # fmt: skip
    return plan
