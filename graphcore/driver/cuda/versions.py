"""Where versions of ``cuda.bindings`` (13.0 to 13.4) and of the CUDA driver differ: all of it.

It guarantees that the rest of the package sees one ``cuda`` module and one way to ask for what some
versions lack or answer wrongly. Three kinds of difference are known:

* enums became plain classes whose unknown values raise ``ValueError`` (13.0 gave the number);
* ``cuGraphGetEdges`` of older bindings returns views of edge data that is already freed, and
  ``cuGraphExecUpdate`` of all of them drops the reason of a refusal: both are called through their
  entry points instead;
* ``cuGraphNodeGetParams`` came with CUDA 13.2, in the bindings and in the driver.

More calls go past the bindings for their price: those that read a kernel node (its kind, its
parameters and its attributes, which they answer with layers of objects, a thousand times a graph),
and launches and updates, which come again and again with arguments that were made once.
"""

from __future__ import annotations

import ctypes
from typing import Any

from graphcore.errors import DriverUnavailable

try:
    from cuda import bindings
    from cuda.bindings import driver as cuda
except ImportError as error:
    raise DriverUnavailable(
        f"driver 'cuda' needs the package cuda-bindings 13.x ({error}): pip install cuda-python"
    ) from error

__all__ = [
    "NEEDED_CUDA",
    "EdgeData",
    "EntryPoints",
    "UpdateInfo",
    "argument",
    "cuda",
    "node_type_number",
    "result_of",
    "usable_version",
]

NEEDED_CUDA = (13, 0)

_installed = str(getattr(bindings, "__version__", "0"))
if int(_installed.split(".", maxsplit=1)[0]) < NEEDED_CUDA[0]:
    raise DriverUnavailable(
        f"driver 'cuda': expected cuda-bindings 13.x, got {_installed}: "
        "pip install 'cuda-python>=13,<14'"
    )


class UpdateInfo(ctypes.Structure):
    """``CUgraphExecUpdateResultInfo``: what the driver says to a whole-graph update."""

    _fields_ = (
        ("result", ctypes.c_int),
        ("error_node", ctypes.c_void_p),
        ("error_from_node", ctypes.c_void_p),
    )


class EdgeData(ctypes.Structure):
    """``CUgraphEdgeData``."""

    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    )


class EntryPoints:
    """Driver calls made without the bindings, because these lose or spoil their answer.

    Args:
        version: What ``cuDriverGetVersion`` says (1000 x major + 10 x minor).
    """

    def __init__(self, version: int) -> None:
        pointer, count = ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)
        self.update = entry_point(
            "cuGraphExecUpdate", 12000, pointer, pointer, ctypes.POINTER(UpdateInfo)
        )
        # for repeated calls: with declared types ctypes converts each argument at each call, which
        # costs more than the call; these take what :func:`argument` made once
        self.prepared_update = entry_point("cuGraphExecUpdate", 12000)
        self.prepared_node = entry_point("cuGraphExecKernelNodeSetParams", 12000)
        self.prepared_kernel = entry_point("cuGraphKernelNodeSetParams", 12000)
        self.prepared_launch = entry_point("cuGraphLaunch", 10000)
        self.kernel_launch = entry_point("cuLaunchKernelEx", 11060)
        self.nodes = entry_point("cuGraphGetNodes", 10000, pointer, pointer, count)
        self.edges = entry_point(
            "cuGraphGetEdges", 13000, pointer, pointer, pointer, pointer, count
        )
        self.kernel_attribute = entry_point("cuGraphKernelNodeGetAttribute", 11080)
        self.node_type = entry_point("cuGraphNodeGetType", 10000)
        self.kernel_params = entry_point("cuGraphKernelNodeGetParams", 12000)
        self.has_node_params = version >= 13020 and hasattr(cuda, "cuGraphNodeGetParams")


argument = ctypes.c_void_p.from_param
"""A handle or address as an argument of prepared calls."""


def entry_point(name: str, version: int, *types: Any) -> Any:
    code, address, *_ = cuda.cuGetProcAddress(name.encode(), version, 0)
    if code or not address:
        raise DriverUnavailable(f"the CUDA driver offers no {name} of version {version}")
    return ctypes.CFUNCTYPE(ctypes.c_int, *types)(address)


def result_of(number: int) -> Any:
    """The ``CUresult`` of a number, or the number itself where the bindings do not know it."""
    try:
        return cuda.CUresult(number)
    except ValueError:
        return number


def node_type_number(node: Any) -> tuple[Any, int]:
    """(result, type) of a node; -1 for a type newer than the bindings."""
    try:
        code, kind = cuda.cuGraphNodeGetType(node)
    except ValueError:
        return 0, -1
    return code, int(kind) if kind is not None else -1


def usable_version(installed: int) -> None:
    """Refuses a driver older than CUDA 13, naming what was found and what is needed."""
    found = (installed // 1000, installed % 1000 // 10)
    if found < NEEDED_CUDA:
        raise DriverUnavailable(
            f"driver 'cuda': expected a CUDA driver for CUDA {NEEDED_CUDA[0]}.{NEEDED_CUDA[1]} or "
            f"newer, got one for CUDA {found[0]}.{found[1]}: install driver branch 580 or newer"
        )
