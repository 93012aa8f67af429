"""Plans of graphs of experts: what is seen of two layers of a small model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from helpers.moe_cases import CERTIFICATE, capability
from helpers.moe_manifests import manifest

from graphcore.moe.decisions.coverage import CoverageTable, ExpertProduct, NodeList, cover
from graphcore.moe.decisions.expert_plan import ExpertPlan, PlanSubject, make_plan
from graphcore.moe.decisions.group_plan import GroupSighting
from graphcore.moe.decisions.reverse_map import ReverseMap, WeightSource
from graphcore.moe.decisions.route_witness import Reader, RouteWitness
from graphcore.moe.manifests.manifest import ExpertGroup, Manifest
from graphcore.moe.manifests.manifest_registry import Published

MANIFEST = manifest(slots=8)
PER_LAYER = 6  # nodes: router, ids, gate_up, activation, down, combine


def nodes(layers: int = 2, identity: str = "decode") -> NodeList:
    """Six nodes for each layer."""
    return NodeList(identity, tuple(f"{identity}{index}" for index in range(layers * PER_LAYER)))


def route(layer: int = 0, identity: str = "decode", **more: Any) -> RouteWitness:
    """Ids that a router chose, as a view of its sorted choice."""
    at = layer * PER_LAYER
    fields: dict[str, Any] = {
        "chain": (f"{identity}{at}", f"{identity}{at + 1}"),
        "ids": f"ids{layer}",
        "source": f"topk{layer}",
        "address": 0x9000 + layer,
        "buffer": f"buffer{layer}",
        "view_offset": 0,
        "dtype": "int64",
        "extents": (4, 2),
        "strides": (16, 8),
        "uses": 2,
        **more,
    }
    return RouteWitness(**fields)


def products(group: ExpertGroup, layer: int, identity: str = "decode") -> tuple[ExpertProduct, ...]:
    """gate_up and down of a layer."""
    at = layer * PER_LAYER
    return tuple(
        ExpertProduct(index, f"{identity}{index}", WeightSource.of(bank))
        for index, bank in zip((at + 2, at + 4), group.banks, strict=True)
    )


def sighting(group: ExpertGroup, layer: int = 0, **more: Any) -> GroupSighting:
    """All that there is to see of a layer: four rows, two experts each, nothing wrong."""
    at = layer * PER_LAYER
    gate_up, down = products(group, layer)
    readers = (
        Reader(gate_up.index, gate_up.node, group.banks[0].name, f"ids{layer}",
               ((f"decode{at + 3}", 1),)),
        Reader(down.index, down.node, group.banks[1].name, f"ids{layer}",
               ((f"decode{at + 5}", 1),)),
    )  # fmt: skip
    fields: dict[str, Any] = {
        "group": group.name,
        "rows": 4,
        "prompt_rows": 0,
        "top_k": 2,
        "routes": 8,
        "route": route(layer),
        "readers": readers,
        "sources": (gate_up.source, down.source),
        "capabilities": (capability(), capability()),
        "inner": (f"decode{at + 3}", f"decode{at + 5}"),
        **more,
    }
    return GroupSighting(**fields)


def subject(
    given: Manifest = MANIFEST, *, registered: Manifest | None = None, **more: Any
) -> PlanSubject:
    """Of a decode step of ``given``; ``registered`` is what its coverage is asked of."""
    wanted = nodes(len(given.groups))
    found = tuple(
        product for layer, group in enumerate(given.groups) for product in products(group, layer)
    )
    record = CoverageTable().certify(wanted, found)
    fields: dict[str, Any] = {
        "owner": "model",
        "nodes": wanted,
        "products": found,
        "sightings": tuple(sighting(group, layer) for layer, group in enumerate(given.groups)),
        "coverage": cover(record, wanted, found, ReverseMap(registered or given)),
        "published": Published(given, 5),
        "certificate": CERTIFICATE,
        **more,
    }
    return PlanSubject(**fields)


def plan(given: Manifest = MANIFEST, **more: Any) -> ExpertPlan:
    """The plan of :func:`subject`."""
    return make_plan(subject(given, **more))


def seen(layer: int = 0, given: Manifest = MANIFEST, **changes: Any) -> tuple[GroupSighting, ...]:
    """What is seen of both layers, with changes in one."""
    return tuple(
        sighting(group, at, **(changes if at == layer else {}))
        for at, group in enumerate(given.groups)
    )


def prompt_rows(count: int, given: Manifest = MANIFEST) -> tuple[GroupSighting, ...]:
    """What is seen where ``count`` of the four rows belong to prompts."""
    return tuple(replace(each, prompt_rows=count) for each in subject(given).sightings)
