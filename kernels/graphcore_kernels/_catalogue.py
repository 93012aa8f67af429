"""Every kernel that the launchers may choose, each with the launch shapes that they plan for it.

Pure: nothing is compiled, and no device is asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from graphcore.driver import Kernel
from graphcore.driver.records import DeviceInfo, LaunchConfig
from graphcore_kernels._gemm_forms import (
    ARITHMETIC,
    MOST_EXPERTS,
    THREADS,
    Form,
    Layout,
    combine_kernel,
    forms_of,
    product_kernel,
    warpgroup_product,
    warpgroups_of,
)
from graphcore_kernels._gemm_warpgroup import has_warpgroups
from graphcore_kernels.copy_plan import CopyForm
from graphcore_kernels.decode_loop import begin_decode_loop, end_decode_step, loop_config
from graphcore_kernels.expert_gather import THREADS as GATHER_THREADS
from graphcore_kernels.expert_gather import expert_gather_kernel
from graphcore_kernels.route_plan import THREADS as ROUTE_THREADS
from graphcore_kernels.route_plan import route_plan_i32, route_plan_i64, shared_bytes
from graphcore_kernels.stage_plan import CONFIG as STAGE_CONFIG
from graphcore_kernels.stage_plan import stage_plan_kernel
from graphcore_kernels.strided_copy import block_sizes, copy_kernel

CAPABILITIES = {
    "sm_80": (8, 0),
    "sm_86": (8, 6),
    "sm_89": (8, 9),
    "sm_90a": (9, 0),
    "sm_100": (10, 0),
    "sm_120": (12, 0),
}
"""The listed architectures, and the capability of the devices that each is for."""

_WORDS = (1, 2, 4, 8, 16)
_LONG_LOOP = 1 << 16  # rows, more than a block has threads
_MULTIPROCESSORS = 132  # no figure of the entries depends on it


@dataclass(frozen=True, slots=True)
class Entry:
    """A kernel and its launches.

    Args:
        group: The function of this package that launches it.
        kernel: As it is compiled for one architecture.
        threads: Of a block: each size that a launch may have, ascending.
        dynamic_bytes: Shared memory that a launch asks for: the most, with 512 experts and slots.
    """

    group: str
    kernel: Kernel
    threads: tuple[int, ...]
    dynamic_bytes: int = 0


def catalogue(architecture: str) -> list[Entry]:
    """All entries for one of :data:`CAPABILITIES`, those of a group together."""
    capability = CAPABILITIES[architecture]
    return [*copies(), *_products(capability), *_slots(), *_loops()]


def copies() -> Iterator[Entry]:
    """Those of ``strided_copy``; a form may have one kernel for several words or indices."""
    seen = set()
    for form in CopyForm:
        for word in _WORDS:
            if (form is CopyForm.ROWS and word == 16) or (form is CopyForm.PACKED and word != 4):
                continue
            for bits in (32, 64):
                kernel = copy_kernel(form, word, bits)
                if kernel.name not in seen:
                    seen.add(kernel.name)
                    yield Entry("strided_copy", kernel, block_sizes(form, word))


def _products(capability: tuple[int, int]) -> Iterator[Entry]:
    device = DeviceInfo(0, "", capability, 0, _MULTIPROCESSORS, (0, 0))
    for arithmetic in ARITHMETIC:
        for layout in get_args(Layout):
            for form in forms_of(arithmetic, layout).values():
                for each in dict.fromkeys((form.on(capability), form.alone)):
                    kernel = product_kernel(arithmetic, layout, each, capability)
                    yield _product(kernel, each, device)
        if has_warpgroups(arithmetic, "nk", capability):
            for form in warpgroups_of(arithmetic).values():
                made = [
                    warpgroup_product(arithmetic, form, has_pairs=pairs, is_combined=combined)
                    for pairs in (False, True)
                    for combined in (False, True)
                ]
                for kernel in dict.fromkeys(made):  # of F32 what is combined has no other
                    yield _product(kernel, form, device)
    for element in ("bf16", "f16", "ieee"):
        yield Entry("moe_grouped_gemm", combine_kernel(element), (THREADS,))


def _product(kernel: Kernel, form: Form, device: DeviceInfo) -> Entry:
    config = form.config(1, MOST_EXPERTS, form.columns, device)
    return _entry("moe_grouped_gemm", kernel, config)


def _slots() -> Iterator[Entry]:
    shared = shared_bytes(MOST_EXPERTS, MOST_EXPERTS)
    for kernel in (route_plan_i32, route_plan_i64):
        yield Entry("route_plan", kernel, (ROUTE_THREADS,), shared)
    yield Entry("expert_gather", expert_gather_kernel, (GATHER_THREADS,))
    yield _entry("stage_plan", stage_plan_kernel, STAGE_CONFIG)


def _loops() -> Iterator[Entry]:
    threads = tuple(loop_config(rows).block[0] for rows in (1, _LONG_LOOP))
    for kernel in (begin_decode_loop, end_decode_step):
        yield Entry("decode_loop", kernel, threads)


def _entry(group: str, kernel: Kernel, config: LaunchConfig) -> Entry:
    return Entry(group, kernel, (config.block[0],), config.shared_bytes)
