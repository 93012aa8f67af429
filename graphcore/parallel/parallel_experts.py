"""ParallelExperts: a torch module in the place of a model's experts, whose parts ranks own."""

from __future__ import annotations

from typing import Any, NoReturn, SupportsIndex

import torch

from graphcore.errors import CacheTypeError, LifecycleError
from graphcore.moe.layers.slot_experts import SlotExperts
from graphcore.moe.slots.group_use import GroupUse
from graphcore.parallel.expert_exchange import ExpertExchange
from graphcore.parallel.expert_sum import ExpertSum


class ParallelExperts(torch.nn.Module):
    """The experts of one layer over all ranks; each rank calls it with as many rows.

    Args:
        here: The experts that this rank owns, in slots.
        exchange: How rows of each rank's own get to their owners; or, where all ranks have the
            same rows, how what their experts gave is added up.
    """

    def __init__(self, here: SlotExperts, exchange: ExpertExchange | ExpertSum) -> None:
        super().__init__()
        self._here = (here,)  # in a tuple it is no submodule: its weights are a part
        self.exchange = exchange
        self.num_experts, self.hidden_dim = exchange.experts, here.hidden_dim
        self.intermediate_dim = here.intermediate_dim
        self._ones: dict[int, torch.Tensor] = {}

    @property
    def here(self) -> SlotExperts:
        """The experts that this rank owns, in slots."""
        return self._here[0]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """As :meth:`SlotExperts.forward`, of this rank's rows, by the experts of all ranks.

        An expert's row is rounded to the rows' type before it travels back, or is added; weights
        and sums are F32. In float32 that is what one rank alone computes, but for the order of
        sums where all ranks have the same rows.
        """
        sent: Any  # what the one of the two gave, it takes
        received, sent = self.exchange.dispatch(hidden_states, top_k_index)
        results = self.here(received.rows, received.ids, self._weights(received.rows))
        return self.exchange.combine(results, sent, top_k_weights)

    def bind(self, rows: int, top_k: int) -> GroupUse:
        """As :meth:`SlotExperts.bind`, for steps with ``rows`` rows on each rank."""
        count = self.arriving(rows, top_k)
        self._weights(torch.empty(count, 0, device=self.exchange.device))
        return self.here.bind(count, 1)

    def arriving(self, rows: int, top_k: int) -> int:
        """How many rows come to the experts of this rank in such a step, empty places included."""
        return self.exchange.arriving(rows * top_k)

    def _weights(self, rows: torch.Tensor) -> torch.Tensor:
        """Ones, F32 [rows, 1]: the router's weights stay with the sender."""
        found = self._ones.get(rows.shape[0])
        if found is None:
            found = torch.ones(rows.shape[0], 1, device=rows.device)
            if not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
                self._ones[rows.shape[0]] = found
        return found

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise CacheTypeError(
            "ParallelExperts: cannot be copied or pickled, its slots and its communicator are one "
            "process's"
        )

    def extra_repr(self) -> str:
        return f"{self.exchange.experts} experts over {self.exchange.ranks} ranks"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> NoReturn:
        raise _not_whole("state_dict", prefix)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> NoReturn:
        raise _not_whole("load_state_dict", prefix)


def _not_whole(what: str, prefix: str) -> LifecycleError:
    return LifecycleError(
        f"{what}: expected a model with whole experts, got a part of those of "
        f"{prefix.rstrip('.')}, which are spread over ranks; restore() first"
    )
