"""Launch attributes of kernels: cluster, cooperative, priority, programmatic launch.

A launch takes them in its configuration. A graph node has the first three as attributes; what
programmatic launch asks for is a property of the node's incoming edges.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

from graphcore.driver.cuda.check import error_of
from graphcore.driver.cuda.versions import EntryPoints, argument, cuda, result_of
from graphcore.driver.kernel_attributes import KernelAttributes
from graphcore.driver.records import LaunchConfig

_id = cuda.CUlaunchAttributeID
_CLUSTER = _id.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_COOPERATIVE = _id.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
_PRIORITY = _id.CU_LAUNCH_ATTRIBUTE_PRIORITY
_PROGRAMMATIC = _id.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
READ_ATTRIBUTES = (int(_CLUSTER), int(_COOPERATIVE), int(_PRIORITY))
_AttributeValue = ctypes.c_int * 16  # CUlaunchAttributeValue: a union of 64 bytes
_ATTRIBUTE = struct.Struct("=I4x3i52x")  # CUlaunchAttribute: id and value
ATTRIBUTE_BYTES = _ATTRIBUTE.size
MOST_ATTRIBUTES = 4
_PLAIN = ((1, 1, 1), None)


def packed_attributes(config: LaunchConfig) -> bytes:
    """The ``CUlaunchAttribute`` structures of a launch, one after the other; none for a plain one.

    Raises:
        OverflowError: A number that fits none of CUDA's fields.
    """
    if (config.cluster, config.priority) == _PLAIN and not (
        config.cooperative or config.programmatic
    ):
        return b""
    found: list[tuple[int, ...]] = []
    if config.cluster != (1, 1, 1):
        found.append((int(_CLUSTER), *config.cluster))
    if config.cooperative:
        found.append((int(_COOPERATIVE), 1, 0, 0))
    if config.priority is not None:
        found.append((int(_PRIORITY), config.priority, 0, 0))
    if config.programmatic:
        found.append((int(_PROGRAMMATIC), 1, 0, 0))
    try:
        return b"".join(_ATTRIBUTE.pack(*each) for each in found)
    except struct.error as error:
        raise OverflowError(f"{config}: {error}") from None


def read_attributes(entry_points: EntryPoints, node: int) -> KernelAttributes:
    """The attributes of a kernel node; priority 0, the default, reads as None."""
    value = _AttributeValue()
    place, at = argument(node), ctypes.byref(value)
    found = []
    for number in READ_ATTRIBUTES:
        code = entry_points.kernel_attribute(place, number, at)
        if code:
            raise error_of(result_of(code), "cuGraphKernelNodeGetAttribute", node=node)
        found.append(value[:3])
    (x, y, z), (cooperative, *_), (priority, *_) = found
    return attributes_of(x, y, z, cooperative, priority)


def attributes_of(x: int, y: int, z: int, cooperative: int, priority: int) -> KernelAttributes:
    """The attributes as the driver's numbers say them."""
    # a node that asked for no cluster says 0 or 1
    return (x or 1, y or 1, z or 1), bool(cooperative), priority or None


def write_attributes(
    node: Any,
    config: LaunchConfig,
    current: KernelAttributes,
) -> None:
    """Gives a kernel node the attributes of ``config`` that differ from ``current``.

    Raises:
        CudaError: The driver refuses one; those set before it are put back.
    """
    cluster, cooperative, priority = current
    changes: list[tuple[Any, Any, Any]] = []
    if config.cluster != cluster:
        changes.append((_CLUSTER, _cluster(config.cluster), _cluster(cluster)))
    if config.cooperative != cooperative:
        new, old = int(config.cooperative), int(cooperative)
        changes.append((_COOPERATIVE, _number("cooperative", new), _number("cooperative", old)))
    if (config.priority or 0) != (priority or 0):
        new, old = config.priority or 0, priority or 0
        changes.append((_PRIORITY, _number("priority", new), _number("priority", old)))
    for done, (name, value, _) in enumerate(changes):
        code, *_ = cuda.cuGraphKernelNodeSetAttribute(node, name, value)
        if code:
            for undone, _, before in changes[:done]:
                cuda.cuGraphKernelNodeSetAttribute(node, undone, before)
            raise error_of(code, "cuGraphKernelNodeSetAttribute", node=int(node))


def _cluster(size: tuple[int, int, int]) -> Any:
    value = cuda.CUkernelNodeAttrValue()
    value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = size
    return value


def _number(field: str, number: int) -> Any:
    value = cuda.CUkernelNodeAttrValue()
    setattr(value, field, number)
    return value
