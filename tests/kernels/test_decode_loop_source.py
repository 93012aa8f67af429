"""The source of the decode loop, run on the host with one thread, against the reference."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from types import SimpleNamespace
from typing import Any

import graphcore_kernels.decode_loop_reference as reference
import numpy
import pytest
from graphcore_kernels._module import read_source
from graphcore_kernels.decode_loop import begin_decode_loop, end_decode_step, loop_config

from graphcore.driver.kernel import Pointer

_BEFORE = """
#define __global__
#define __device__
struct Dim3 { unsigned x, y, z; };
static Dim3 threadIdx{0, 0, 0}, blockDim{1, 1, 1};
static int __syncthreads_and(int value) { return value; }
static void __threadfence_system() {}
extern "C" { long long last_handle = -1, last_value = -1; }
extern "C" void cudaGraphSetConditional(unsigned long long handle, unsigned value) {
    last_handle = handle;
    last_value = value;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: neither g++ nor clang++ is on the path")
    folder = tmp_path_factory.mktemp("decode_loop")
    source, built = folder / "decode_loop_host.cpp", folder / "decode_loop_host.so"
    declared = 'extern "C" __device__ void cudaGraphSetConditional(u64 handle, u32 value);'
    text = read_source("decode_loop.cu")
    assert declared in text
    source.write_text(_BEFORE + text.replace(declared, ""), encoding="utf-8")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", str(source), "-o", str(built)], check=True)
    return ctypes.CDLL(str(built))


class Memory:
    """What the kernels work on, filled alike for both."""

    def __init__(self, draw: random.Random, rows: int, room: int) -> None:
        self.token = numpy.array([draw.randrange(1000) for _ in range(rows)], numpy.int64)
        self.finished = numpy.array([draw.random() < 0.7 for _ in range(rows)])
        self.progress = numpy.array([draw.randrange(room), draw.randrange(room + 1)], numpy.int64)
        self.control = numpy.array(
            [draw.randrange(3), draw.choice([0, 0, 1]), self.progress[0], 0], numpy.int64
        )
        self.ring = numpy.full((room, rows), -1, numpy.int64)

    def same_as(self, other: Memory) -> bool:
        return all((mine == vars(other)[name]).all() for name, mine in vars(self).items())


def _arguments(kernel: Any, memory: Memory, handle: int) -> list[Any]:
    address = {name: array.ctypes.data for name, array in vars(memory).items()}
    numbers = {"handle": handle, "rows": len(memory.token)}
    return [
        Pointer(address[each.name], each.pointee.replace("i64", "int64"))
        if each.is_pointer
        else numbers.get(each.name, address.get(each.name))
        for each in kernel.parameters
    ]


@pytest.mark.parametrize("kernel", [begin_decode_loop, end_decode_step], ids=lambda k: k.name)
def test_the_source_does_what_the_reference_does(
    library: Any, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided = SimpleNamespace(handle=-1, value=-1)

    def decide(handle: int, value: int) -> None:
        decided.handle, decided.value = handle, value

    monkeypatch.setattr("graphcore.driver.emulated.set_conditional", decide)
    values = set()
    for seed in range(200):
        rows = 1 + seed % 5
        ours, theirs = (Memory(random.Random(seed), rows, 6) for _ in range(2))
        kernel.reference(loop_config(rows), *_arguments(kernel, ours, 77))
        arguments = [
            ctypes.c_uint32(value)
            if each.type == "u32"
            else ctypes.c_uint64(getattr(value, "address", value))
            for each, value in zip(
                kernel.parameters, _arguments(kernel, theirs, 77), strict=True
            )
        ]  # fmt: skip
        getattr(library, kernel.name)(*arguments)
        assert ours.same_as(theirs), seed
        last = [ctypes.c_longlong.in_dll(library, f"last_{name}").value
                for name in ("handle", "value")]  # fmt: skip
        assert last == [decided.handle, decided.value] == [77, decided.value], seed
        assert ours.control[reference.OVER] == 1 - decided.value
        values.add(decided.value)
    assert values == {0, 1}
