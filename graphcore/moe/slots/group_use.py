"""GroupUse: how a step uses one group of experts: whose ids, which admission, what reads them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from graphcore.errors import ConfigurationError
from graphcore.moe.decisions.route_witness import RouteWitness
from graphcore.moe.slots.admission import SlotAdmission
from graphcore.resources.tensors import TensorRef, describe


@dataclass(frozen=True, slots=True, eq=False)
class GroupUse:
    """One group of a step.

    Args:
        group: Its name, in the manifest and in the pool.
        ids: int32 or int64 [rows, top_k] (or [rows]): what the router writes, at a fixed address.
        admission: Of these ids; None where there are more routes than slots: such a step is staged.
        stream: That the group runs on; None: the step's.
        chain: What chose the ids, from the router on; empty: nobody knows.
        consumer: What reads the first products.
        equivalence: Why that would see other bits than without slots; "" where it does not.
        input_type: Element type of what is multiplied; None: that of the experts.
        uses: How many nodes read the ids.

    Attributes:
        ref: Where the ids lie.

    Raises:
        CacheTypeError: ``ids`` is no tensor.
        ConfigurationError: Ids of another shape, or another group than the admission's.
    """

    group: str
    ids: Any
    admission: SlotAdmission | None = None
    stream: Any = None
    chain: tuple[Hashable, ...] = ("router",)
    consumer: str = "swiglu"
    equivalence: str = ""
    input_type: str | None = None
    uses: int = 1
    ref: TensorRef = field(init=False, repr=False)

    def __post_init__(self) -> None:
        ref = describe(self.ids, name="ids")
        object.__setattr__(self, "ref", ref)
        if len(ref.shape) not in (1, 2):
            raise ConfigurationError(f"ids: expected [rows, top_k] or [rows], got {ref.shape}")
        made = self.admission
        if made is not None and (made.name, made.rows, made.top_k) != (
            self.group, self.rows, self.top_k
        ):  # fmt: skip
            raise ConfigurationError(
                f"admission: expected one of group {self.group} for {self.rows} rows of "
                f"{self.top_k}, got one of group {made.name} for {made.rows} of {made.top_k}"
            )

    @property
    def rows(self) -> int:
        """Of the step."""
        return self.ref.shape[0]

    @property
    def top_k(self) -> int:
        """Experts for a row."""
        return (*self.ref.shape, 1)[1]

    @property
    def routes(self) -> int:
        """Choices of experts."""
        return self.rows * self.top_k

    @property
    def row_stride(self) -> int:
        """Bytes between rows of ids."""
        return self.ref.strides[0] * self.ref.itemsize

    def record(self) -> Hashable:
        """All of it that a graph has baked in."""
        ref, made = self.ref, self.admission
        where = (ref.address, ref.shape, ref.strides, ref.dtype, ref.device)
        plan = None if made is None else (made.serial, made.plan_buffer.address)
        return self.group, where, plan, self.chain, self.consumer, self.equivalence, self.uses

    def witness(self, chain: tuple[Hashable, ...] | None = None) -> RouteWitness:
        """Where its ids come from; ``chain`` where a look at the nodes found another one."""
        ref = self.ref
        owner = id(ref.owner if ref.owner is not None else self.ids)
        ids = (self.group, ref.address, ref.shape, ref.strides, ref.dtype)
        return RouteWitness(
            chain=self.chain if chain is None else chain,
            ids=ids,
            source=owner,
            address=ref.address,
            buffer=owner,
            view_offset=_view_offset(self.ids, ref),
            dtype=ref.dtype,
            extents=ref.shape,
            strides=tuple(step * ref.itemsize for step in ref.strides),
            uses=self.uses,
        )


def _view_offset(ids: Any, ref: TensorRef) -> int:
    """Bytes from the start of the memory that a torch tensor views; 0 of what does not tell it."""
    offset = getattr(ids, "storage_offset", None)
    return offset() * ref.itemsize if callable(offset) else 0
