"""Runs the real source of the grouped product on the host, its warps working together.

host_tensor_cores.cpp stands in for the instructions; the text of the kernels is what a device
compiles. Every kernel is compiled into a namespace of its own, all in one library.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from graphcore_kernels._module import read_source

from graphcore.driver import Kernel
from graphcore.driver.kernel import Parameter
from graphcore.driver.records import LaunchConfig
from graphcore.driver.tensor_map import TENSOR_MAP_BYTES

_C_TYPES = {"i32": ctypes.c_int32, "i64": ctypes.c_int64}
_HERE = Path(__file__).parent


class HostGemm:
    """These kernels, compiled for the host with ``compiler`` into ``folder``."""

    def __init__(self, compiler: str, folder: Path, kernels: Iterable[Kernel]) -> None:
        source, library = folder / "gemm_host.cpp", folder / "gemm_host.so"
        text = "".join(
            (_HERE / f"host_{name}.cpp").read_text(encoding="utf-8")
            for name in ("tensor_cores", "warpgroups")
        )
        source.write_text(text + "".join(map(_in_its_namespace, kernels)), encoding="utf-8")
        # longjmp between stacks is what the checks of fortified builds would stop
        flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-U_FORTIFY_SOURCE"]
        subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True, timeout=300)
        self._library = ctypes.CDLL(str(library))
        self._library.count_wrong_copies.restype = ctypes.c_int64
        self._library.count_copies.restype = ctypes.c_int64

    def allow_reads(self, x: tuple[int, int], weights: tuple[int, int]) -> None:
        """Names the (address, bytes) that copies may read from, and begins to count anew."""
        x_address, x_bytes = x
        address, nbytes = weights
        self._library.allow_reads(
            ctypes.c_void_p(x_address), ctypes.c_int64(x_bytes),
            ctypes.c_void_p(address), ctypes.c_int64(nbytes),
        )  # fmt: skip

    @property
    def wrong_copies(self) -> int:
        """Copies that were misaligned, or from or to memory that was not named.

        Also what else a device would not forgive: an arrival too many or too few, something on
        its way to a block that has ended, threads that wait for ever.
        """
        return int(self._library.count_wrong_copies())

    @property
    def copies(self) -> int:
        return int(self._library.count_copies())

    def copy_late(self, is_late: bool, *, products: bool | None = None) -> None:
        """Whether copies, and products of warpgroups, are made when they are waited for.

        At once, as is the default, or as late as they may be; products as copies are, where
        ``products`` does not say otherwise.
        """
        late_products = is_late if products is None else products
        self._library.be_late(ctypes.c_int(is_late), ctypes.c_int(late_products))

    def hold_up(self, threads: range, rounds: int = 1) -> None:
        """Gives these threads a turn only in each of so many rounds: others run ahead of them.

        Threads of a cluster are numbered block after block.
        """
        self._library.hold_up(
            ctypes.c_int(threads.start), ctypes.c_int(threads.stop), ctypes.c_int(rounds)
        )

    def run(
        self, kernel: Kernel, grid: int, config: LaunchConfig, arguments: Sequence[Any]
    ) -> None:
        """Launches a kernel with addresses and numbers, in the order of its signature.

        ``grid`` blocks, or clusters of them, whatever ``config`` says.
        """
        values = [
            _as_c(each, value) for each, value in zip(kernel.parameters, arguments, strict=True)
        ]
        getattr(self._library, f"run_{kernel.name}")(
            ctypes.c_int(grid),
            ctypes.c_int(config.block[0]),
            ctypes.c_int(config.shared_bytes),
            *values,
        )


class _Map(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * TENSOR_MAP_BYTES),)


def _as_c(parameter: Parameter, value: Any) -> Any:
    if parameter.is_pointer:
        return ctypes.c_void_p(value)
    if parameter.type.startswith("bytes:"):
        return _Map.from_buffer_copy(value)
    return _C_TYPES[parameter.type](value)


def _in_its_namespace(kernel: Kernel) -> str:
    text = kernel.source
    for stood_in_for in ("tensor_cores.cu", "arrivals.cu", "warpgroups.cu"):
        text = text.replace(read_source(stood_in_for), "")
    defined = sorted(set(re.findall(r"^#define (\w+)", text, re.MULTILINE)))
    cluster = re.search(r"^#define GEMM_CLUSTER (\d+)$", text, re.MULTILINE)
    parameters = ", ".join(_declare(each.type, each.name) for each in kernel.parameters)
    names = ", ".join(each.name for each in kernel.parameters)
    undefine = "".join(f"#undef {name}\n" for name in defined)
    return (
        f"namespace in_{kernel.name} {{\n{text}\n}}\n{undefine}"
        f'extern "C" void run_{kernel.name}(int the_grid, int the_threads, int the_shared_bytes, '
        f"{parameters}) {{\n"
        f"    launch(the_grid, {cluster[1] if cluster else 1}, the_threads, the_shared_bytes, "
        f"in_{kernel.name}::{kernel.name}, {names});\n}}\n"
    )


def _declare(kind: str, name: str) -> str:
    if kind.startswith("bytes:"):
        return f"TensorMap {name}"
    for ours, theirs in (("i32", "int"), ("i64", "i64"), ("f32", "float")):
        kind = kind.replace(ours, theirs)
    return f"{kind} {name}"
