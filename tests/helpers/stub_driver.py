"""The CUDA driver over the stub libcuda, and what its cases need; nothing is loaded at import."""

import ctypes
import struct

import pytest

from graphcore.driver import kernel
from graphcore.driver.records import (
    LaunchConfig,
)
from graphcore.errors import CudaError

SCALE = kernel(
    "scale",
    "const f32* x, f32* y, i32 n",
    'extern "C" __global__ void scale(const float* x, float* y, int n) {'
    " int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) y[i] = 2 * x[i]; }",
)
PLAIN = LaunchConfig((4, 5, 6), (32, 2, 1))
RICH = LaunchConfig((8, 1, 1), (64, 1, 1), 96 * 1024, (4, 2, 2), True, -3)


class LaunchStruct(ctypes.Structure):
    _fields_ = [
        ("sizes", ctypes.c_uint * 7),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


def stub():
    library = ctypes.CDLL("libcuda.so.1")
    library.stub_exec_argument.restype = ctypes.c_void_p
    library.stub_exec_argument.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
    return library


def driver():
    from graphcore.driver.cuda import CudaDriver

    return CudaDriver(0)


def function(cuda):
    """A function of the stub: (pointer, pointer, int), without NVRTC."""
    loaded = kernel("stub_kernel", "void* x, void* y, i32 n", "", loader=_load_name)
    return cuda.function(loaded)


NAMES = [ctypes.create_string_buffer(b"_Z3addPfS_i"), ctypes.create_string_buffer(b"other")]


def _load_name(cuda, loaded):
    return ctypes.addressof(NAMES[0])


def arguments(*values):
    x, y, n = values or (0x1000, 0x2000, 7)
    return (struct.pack("Q", x), struct.pack("Q", y), struct.pack("i", n))


def raises(code, call, *parameters, **options):
    with pytest.raises(CudaError) as failure:
        call(*parameters, **options)
    assert failure.value.code == code, failure.value
    return failure.value


def exec_arguments(executable, index):
    at = stub().stub_exec_argument
    return tuple(
        ctypes.string_at(at(executable, index, k), size) for k, size in enumerate((8, 8, 4))
    )


def conditional_body(cuda):
    """A graph with an IF node, and the node's body."""
    from graphcore.driver.records import ConditionalParams

    graph = cuda.create_graph()
    handle = cuda.create_conditional(graph)
    node = cuda.add_node(graph, [], ConditionalParams(handle, "if"))
    return graph, cuda.node_params(node).bodies[0]
