"""RouterPrefetch: the routers of later layers guess, from what an earlier layer is given.

What the residual stream holds changes little from one layer to the next, so that a later layer's
router, given an earlier layer's input, names many of the experts that it will choose. Their copies
then run beside the layers in between. Off unless made; a wrong guess changes no result.
"""

from __future__ import annotations

import logging
from functools import partial
from types import TracebackType
from typing import Any

import torch

from graphcore.errors import CaptureError, ConfigurationError
from graphcore.interop import current_stream
from graphcore.moe.layers.torch_capture import refuse_inside_capture
from graphcore.moe.models.accelerated_model import AcceleratedModel
from graphcore.moe.slots.sibling_prefetch import PrefetchTotals, SiblingPrefetch

_log = logging.getLogger("graphcore")

_ROUTERS = ("gate", "router")


class RouterPrefetch:
    """Prefetches experts of an accelerated model, in steps of one number of rows. Not locked.

    Steps of other row counts (prompts) run as without it. Its guesses are part of what is captured:
    make it before a graph is, and let graphs go that were captured with it before it is closed.
    A pool that has grown is followed by the first step outside of captures; totals begin anew.

    Args:
        accelerated: Whose layers; called in their order.
        rows: Rows of a step: sequences of a decode step.
        ahead: For how many layers behind it each layer guesses.
        choices: Experts that are guessed for a row; None: as many as the router chooses.

    Raises:
        CapacityError: A guess may need more slots than a layer has.
        CaptureError: Inside a capture.
        ConfigurationError: One layer only, a number that cannot be, or a layer without a router.
        CudaError: Out of memory.
    """

    def __init__(
        self,
        accelerated: AcceleratedModel,
        *,
        rows: int,
        ahead: int = 1,
        choices: int | None = None,
    ) -> None:
        refuse_inside_capture("RouterPrefetch")
        for name, count in (("rows", rows), ("ahead", ahead), ("choices", choices or 1)):
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ConfigurationError(f"{name}: expected at least 1, got {count!r}")
        self._names = list(accelerated.layers)
        if len(self._names) < 2:
            raise ConfigurationError("layers: expected at least two, got one, which none precedes")
        self._driver, self._rows, self._ahead = accelerated.driver, rows, ahead
        self._routers = {name: _router_of(accelerated.model, name) for name in self._names[1:]}
        self._guesses = {
            name: [
                torch.zeros(
                    (rows, choices or _top_k_of(accelerated.model, name)),
                    dtype=torch.int64,
                    device=accelerated.device,
                )
                for _ in range(min(at, ahead))
            ]
            for at, name in enumerate(self._names)
            if at
        }
        self._prefetch = SiblingPrefetch(accelerated.pool, self._guesses)
        self._serial = accelerated.pool.serial
        self._hooks = [
            hook
            for at, name in enumerate(self._names)
            for hook in (
                accelerated.layers[name].register_forward_pre_hook(partial(self._before, at)),
                accelerated.layers[name].register_forward_hook(partial(self._behind, at)),
            )
        ]

    def totals(self) -> dict[str, PrefetchTotals]:
        """Layer -> what the guesses for it came to, after all work."""
        return {name: self._prefetch.totals(name) for name in self._guesses}

    def close(self) -> None:
        """Steps run as without it from now on; a second call does nothing."""
        for hook in self._hooks:
            hook.remove()
        self._prefetch.abandon()
        self._prefetch.close()

    # ---- around a layer ------------------------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before(self, at: int, _module: Any, arguments: tuple[Any, ...]) -> None:
        hidden, prefetch = arguments[0], self._prefetch
        if prefetch.is_stepping and (at == 0 or hidden.shape[0] != self._rows):
            prefetch.abandon()  # a forward before did not come to its end
        if at == 0 and hidden.shape[0] == self._rows and self._follows_pool():
            self._prefetch.begin()
        prefetch = self._prefetch
        if not prefetch.is_stepping:
            return
        stream = current_stream(self._driver)
        for place in range(at + 1, min(at + 1 + self._ahead, len(self._names))):
            name = self._names[place]
            index = at - max(0, place - self._ahead)  # the earliest layer's guess is the first
            guess = self._guesses[name][index]
            guess.copy_(_guess(self._routers[name], hidden, guess.shape[1]))
            prefetch.hand_off(name, stream, index=index)
        prefetch.await_stage(self._names[at], stream)

    def _follows_pool(self) -> bool:
        """Whether guesses go to the slots that there are; takes them over where they are others."""
        pool = self._prefetch.pool
        if pool.is_closed or pool.serial == self._serial:
            return not pool.is_closed
        try:
            refuse_inside_capture("following a pool")
        except CaptureError:
            _log.info("prefetch: a step is captured without guesses, since the pool has grown")
            return False
        old, self._prefetch = self._prefetch, SiblingPrefetch(pool, self._guesses)
        self._serial = pool.serial
        old.close()
        return True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _behind(self, at: int, *_: Any) -> None:
        if not self._prefetch.is_stepping:
            return
        stream = current_stream(self._driver)
        self._prefetch.computed(self._names[at], stream)
        if at == len(self._names) - 1:
            self._prefetch.end(stream)

    def __enter__(self) -> RouterPrefetch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _block_of(model: Any, name: str) -> Any:
    return model.get_submodule(name.rpartition(".")[0])


def _router_of(model: Any, name: str) -> Any:
    block = _block_of(model, name)
    found = next((getattr(block, each) for each in _ROUTERS if hasattr(block, each)), None)
    if not isinstance(found, torch.nn.Module):
        raise ConfigurationError(
            f"{name}: expected a router beside it ({' or '.join(_ROUTERS)}), got "
            f"{type(block).__name__} without one"
        )
    return found


def _top_k_of(model: Any, name: str) -> int:
    block = _block_of(model, name)
    top_k = getattr(block, "top_k", getattr(_router_of(model, name), "top_k", None))
    if not isinstance(top_k, int):
        raise ConfigurationError(f"choices: expected a number, since {name} does not say its top_k")
    return top_k


@torch.no_grad()
def _guess(router: Any, hidden: torch.Tensor, choices: int) -> torch.Tensor:
    """[rows, choices]: experts that the router rates highest, whatever else it goes by."""
    # without its hooks: what models record of their routers is of real steps
    found = type(router).forward(router, hidden)
    logits = found[0] if isinstance(found, tuple) else found
    best: torch.Tensor = logits.reshape(hidden.shape[0], -1).topk(choices, dim=-1).indices
    return best
