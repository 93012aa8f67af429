"""Sighting: what is seen of the groups of a step: products, routes, the kernels that serve them.

What was seen is told apart from what it means, which :mod:`graphcore.moe.decisions.group_plan`
decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphcore.driver.records import DeviceInfo
from graphcore.moe.decisions.certificate import Certificate
from graphcore.moe.decisions.coverage import ExpertProduct
from graphcore.moe.decisions.group_plan import GroupSighting
from graphcore.moe.decisions.route_witness import Reader
from graphcore.moe.manifests.capability import Capability
from graphcore.moe.manifests.manifest import ExpertGroup
from graphcore.moe.manifests.names import GroupReason, Phase
from graphcore.moe.slots.group_use import GroupUse
from graphcore.moe.slots.pool_bank import PoolBank
from graphcore.moe.steps.step_work import GroupPlaces
from graphcore.resources.tensors import TensorRef, contiguous_strides

_WARP = 32  # of every device that CUDA 13 runs on
_KERNEL = "moe_grouped_gemm"


@dataclass(frozen=True, slots=True)
class SightedGroup:
    """One group of a step; ``group`` is the manifest's, None where it has none of that name."""

    use: GroupUse
    banks: tuple[PoolBank, ...]
    places: GroupPlaces
    group: ExpertGroup | None

    @property
    def products(self) -> tuple[ExpertProduct, ...]:
        """Its products with the weights that they multiply by."""
        named = {bank.name: bank for bank in self.banks}
        return tuple(
            ExpertProduct(each.index, each.node, named[each.bank].weights)
            for each in self.places.products
        )

    def sighting(
        self, prompt_rows: int, certificate: Certificate | None, device: DeviceInfo
    ) -> GroupSighting:
        """What a plan is made from.

        Args:
            prompt_rows: How many rows of the step belong to prompts.
            certificate: Of the step.
            device: That it runs on.
        """
        use, named = self.use, {bank.name: bank for bank in self.banks}
        witness = use.witness(self.places.chain)
        readers = tuple(
            Reader(each.index, each.node, each.bank, witness.ids, each.consumers)
            for each in self.places.products
        )
        sources = tuple(named[each.bank] for each in readers)
        rows = min(prompt_rows, use.rows)
        phase = Phase.PROMPT if rows else Phase.DECODE
        return GroupSighting(
            group=use.group,
            rows=use.rows,
            prompt_rows=rows,
            top_k=use.top_k,
            routes=use.routes,
            route=witness,
            readers=readers,
            sources=tuple(bank.weights for bank in sources),
            capabilities=tuple(
                capability_of(use, bank, self.group, phase, certificate, device) for bank in sources
            ),
            auxiliaries=tuple(bank.name for bank in self.banks if bank.is_auxiliary),
            inner=self.places.inner,
            equivalence=use.equivalence,
        )


def capability_of(
    use: GroupUse,
    bank: PoolBank,
    group: ExpertGroup | None,
    phase: Phase,
    certificate: Certificate | None,
    device: DeviceInfo,
) -> Capability | None:
    """The kernel that serves ``bank``, with all that it was chosen by; None where none does."""
    if bank.role is None:
        return None
    slots = bank.source.shape[0] if bank.rows is None else bank.rows.shape[0]
    is_prompt = phase is Phase.PROMPT
    return Capability(
        role=bank.role,
        kernel=_KERNEL,
        consumer=use.consumer,
        reason=GroupReason.PREFILL if is_prompt else GroupReason.ELIGIBLE,
        equivalence=use.equivalence or "the same kernel",
        phase=phase,
        location=bank.location,
        row_semantics=None if certificate is None else certificate.row_semantics,
        source_type=bank.source.dtype,
        source_flags=0,  # banks have none: what is not active is not served
        input_type=use.input_type or bank.source.dtype,
        output_type=use.input_type or bank.source.dtype,
        tokens=use.rows,
        experts=bank.source.shape[0],
        top_k=use.top_k,
        rows=use.routes,
        routes=use.routes,
        row_stride=use.row_stride,
        slots=slots,
        source_extents=bank.source.shape,
        source_strides=_bytes(bank.source),
        slot_extents=bank.source.shape if bank.rows is None else bank.rows.shape,
        slot_strides=_bytes(bank.source if bank.rows is None else bank.rows),
        device=device.index if group is None else group.device,
        compute_capability=device.capability[0] * 10 + device.capability[1],
        warp_size=_WARP,
        shared_memory_limit=device.shared_bytes,
    )


def _bytes(ref: TensorRef) -> tuple[int, ...]:
    strides = ref.strides or contiguous_strides(ref.shape)
    return tuple(step * ref.itemsize for step in strides)
