"""What graphcore.driver.cuda does to the stub: device, streams, memory, kernels."""

import ctypes
import os
import struct

import pytest
from helpers.stub_driver import (
    PLAIN,
    RICH,
    SCALE,
    LaunchStruct,
    arguments,
    driver,
    function,
    raises,
    stub,
)

from graphcore.driver import kernel
from graphcore.driver.cuda.launching import Parameters
from graphcore.driver.records import (
    CopyOperand,
    LaunchConfig,
    MemcpyParams,
    MemoryKind,
    MemsetParams,
)
from graphcore.errors import DriverUnavailable

# ---- device ----


def the_device_is_described():
    info = driver().device_info()
    assert (info.name, info.capability, info.multiprocessors) == ("Stub", (9, 0), 132)
    assert info.driver_version[0] == 13
    assert info.total_memory == 1 << 30
    assert driver().context_id() == 1
    assert driver().memory_info() == (1 << 20, 1 << 30)


def memory_that_runs_out_is_told_in_bytes():
    cuda = driver()
    executable = cuda.instantiate(cuda.create_graph())
    launch = cuda.bind_launch(executable, cuda.create_stream(blocking=False))
    there = f"{1 << 20} of {1 << 30}"
    for call, failing, words in (
        ("cuMemAlloc", lambda: cuda.alloc(4321), f"asked for 4321 bytes, {there} are free"),
        ("cuMemHostAlloc", lambda: cuda.alloc_pinned(99), "the host has no 99 bytes to page-lock"),
        ("cuGraphInstantiate", lambda: cuda.instantiate(cuda.create_graph()), f"{there} bytes are"),
        ("cuGraphLaunch", lambda: cuda.raise_launch(launch()), f"{there} bytes are free"),
    ):
        stub().stub_fail(call.encode() + b"WithParams" * ("Inst" in call), 2)
        error = raises("CUDA_ERROR_OUT_OF_MEMORY", failing)
        assert error.call.startswith(call)
        assert words in error.description, error
        assert error.hint.startswith("page-locked" if "Host" in call else "close graphs")
    stub().stub_fail(b"cuMemAlloc", 2)
    stub().stub_fail(b"cuMemGetInfo", 999)
    error = raises("CUDA_ERROR_OUT_OF_MEMORY", cuda.alloc, 8)
    assert error.description == "the device has not enough free memory"
    cuda.free(cuda.alloc(8))


def a_driver_older_than_cuda_13_is_refused_with_both_versions():
    stub().stub_set(12080, 1)
    try:
        with pytest.raises(DriverUnavailable, match=r"13\.0 or newer, got one for CUDA 12\.8"):
            driver()
    finally:
        stub().stub_set(int(os.environ.get("STUB_CUDA_VERSION", "13000")), 1)


def an_ordinal_out_of_range_is_refused_with_the_range():
    from graphcore.driver.cuda import CudaDriver

    for ordinal in (1, -1):
        with pytest.raises(DriverUnavailable, match=rf"in 0\.\.0, got {ordinal}"):
            CudaDriver(ordinal)


def a_machine_without_devices_is_refused():
    stub().stub_fail(b"cuInit", 100)
    with pytest.raises(DriverUnavailable, match="CUDA_ERROR_NO_DEVICE"):
        driver()


def another_current_context_is_current_again_after_a_call():
    from cuda.bindings import driver as bindings

    cuda = driver()
    bindings.cuCtxSetCurrent(bindings.CUcontext(0x4242))
    cuda.synchronize()
    assert int(bindings.cuCtxGetCurrent()[1]) == 0x4242
    raises("CUDA_ERROR_INVALID_VALUE", cuda.alloc, 0)
    assert int(bindings.cuCtxGetCurrent()[1]) == 0x4242
    bindings.cuCtxSetCurrent(bindings.CUcontext(0))
    cuda.synchronize()
    assert int(bindings.cuCtxGetCurrent()[1]) == 0x1000


def errors_carry_code_name_number_call_and_sentence():
    cuda = driver()
    stub().stub_fail(b"cuCtxSynchronize", 700)
    error = raises("CUDA_ERROR_ILLEGAL_ADDRESS", cuda.synchronize)
    assert error.is_sticky
    assert (error.number, error.call) == (700, "cuCtxSynchronize")
    stub().stub_fail(b"cuCtxSynchronize", 214)
    error = raises("CUDA_ERROR_ECC_UNCORRECTABLE", cuda.synchronize)
    assert error.description == "stub sentence"
    cuda.synchronize()


# ---- streams, events, memory ----


def streams_and_events_reach_the_driver():
    cuda = driver()
    blocking = cuda.create_stream(blocking=True)
    free = cuda.create_stream(blocking=False, priority=-1)
    asked = stub().stub_calls(b"cuStreamGetFlags")
    assert cuda.stream_is_blocking(blocking)
    assert not cuda.stream_is_blocking(free)
    assert stub().stub_calls(b"cuStreamGetFlags") == asked
    assert cuda.stream_device(free) == 0
    start, end = cuda.create_event(timing=True), cuda.create_event(timing=False)
    cuda.record_event(start, free)
    cuda.record_event(end, free, external=True)
    cuda.wait_event(blocking, end)
    cuda.wait_event(blocking, end, external=True)
    cuda.synchronize_event(end)
    cuda.synchronize_stream(free)
    assert cuda.elapsed_ms(start, end) == 1.5
    assert cuda.query_stream(free)
    assert cuda.query_event(end)
    stub().stub_fail(b"cuStreamQuery", 600)
    assert not cuda.query_stream(free)
    stub().stub_fail(b"cuEventQuery", 907)
    raises("CUDA_ERROR_CAPTURED_EVENT", cuda.query_event, end)
    for event in (start, end):
        cuda.destroy_event(event)
    for stream in (blocking, free):
        cuda.destroy_stream(stream)


def the_device_of_a_capturing_stream_is_told_without_asking_for_it():
    cuda, other = driver(), driver()
    stream = cuda.create_stream(blocking=False)
    before = stub().stub_calls(b"cuStreamGetDevice")
    assert other.stream_device(stream) == 0
    assert stub().stub_calls(b"cuStreamGetDevice") == before + 1
    cuda.begin_capture(stream, "relaxed")
    assert [one.stream_device(stream) for one in (cuda, other)] == [0, 0]
    assert cuda.stream_device(1) == 0
    assert stub().stub_calls(b"cuStreamGetDevice") == before + 1
    cuda.end_capture(stream)
    cuda.destroy_stream(stream)


def whether_a_capturing_stream_is_blocking_is_told_by_its_own_driver_only():
    cuda, other = driver(), driver()
    stream = cuda.create_stream(blocking=True)
    before = stub().stub_calls(b"cuStreamGetFlags")
    assert other.stream_is_blocking(stream)
    assert stub().stub_calls(b"cuStreamGetFlags") == before + 1
    cuda.begin_capture(stream, "relaxed")
    assert cuda.stream_is_blocking(stream)
    raises("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", other.stream_is_blocking, stream)
    assert [cuda.stream_is_blocking(named) for named in (0, 1, 2)] == [True] * 3
    assert stub().stub_calls(b"cuStreamGetFlags") == before + 1
    cuda.end_capture(stream)
    cuda.destroy_stream(stream)


def memory_is_allocated_written_copied_filled_and_read():
    cuda = driver()
    stream = cuda.create_stream(blocking=False)
    a, b = cuda.alloc(64), cuda.alloc(64)
    cuda.write(a, bytes(range(64)))
    cuda.write(a, b"")
    kinds = (MemoryKind.DEVICE, MemoryKind.HOST, MemoryKind.UNIFIED)
    for source in kinds:
        for target in kinds:
            cuda.write(b, bytes(64))
            cuda.copy(MemcpyParams(CopyOperand(b, target), CopyOperand(a, source), 64), stream)
            assert cuda.read(b, 64) == bytes(range(64)), (source, target)
    assert cuda.read(a, 0) == b""
    for size, value in ((1, 0xAB), (2, 0xABCD), (4, 0x89ABCDEF)):
        cuda.fill(MemsetParams(b, value, size, 3), stream)
        assert cuda.read(b, 3 * size) == value.to_bytes(size, "little") * 3
        cuda.fill(MemsetParams(b, value, size, 2, 2, 16), stream)
        assert cuda.read(b + 16, 2 * size) == value.to_bytes(size, "little") * 2
    cuda.copy(MemcpyParams(CopyOperand(b, pitch=16), CopyOperand(a, pitch=32), 8, height=2), stream)
    assert stub().stub_calls(b"cuMemcpy3DAsync") == 1
    pinned = cuda.alloc_pinned(16)
    cuda.free_pinned(pinned)
    cuda.free(a)
    raises("CUDA_ERROR_INVALID_VALUE", cuda.free, a)


def numbers_that_fit_no_field_are_refused_as_invalid_values():
    cuda = driver()
    raises("CUDA_ERROR_INVALID_VALUE", cuda.alloc, -1)
    address = cuda.alloc(64)
    for fill in (
        MemsetParams(address, 256, 1, 4),
        MemsetParams(address, 1, 3, 4),
        MemsetParams(address, 1, 1, -4),
    ):
        raises("CUDA_ERROR_INVALID_VALUE", cuda.fill, fill, 0)
        raises("CUDA_ERROR_INVALID_VALUE", cuda.add_node, cuda.create_graph(), [], fill)
    shape = LaunchConfig((-1, 1, 1), (1, 1, 1))
    raises("CUDA_ERROR_INVALID_VALUE", cuda.launch, function(cuda), shape, arguments(), 0)


def an_address_finds_its_allocation_until_it_is_freed():
    cuda = driver()
    address = cuda.alloc(256)
    found = cuda.allocation_of(address + 100)
    assert (found.base, found.size, found.memory) == (address, 256, MemoryKind.DEVICE)
    assert found.device == 0
    cuda.free(address)
    assert cuda.allocation_of(address) is None
    assert cuda.allocation_of(3) is None


# ---- kernels ----


def a_kernel_compiles_through_nvrtc_and_loads_once():
    cuda = driver()
    assert cuda.function(SCALE) == cuda.function(SCALE)
    assert stub().stub_calls(b"cuModuleLoadData") == 1
    broken = kernel("broken", "i32 n", 'extern "C" __global__ void broken(int n) { oops; }')
    error = raises("CUDA_ERROR_INVALID_SOURCE", cuda.function, broken)
    assert "oops" in str(error)


def a_virtual_architecture_gives_ptx():
    from graphcore.driver.cuda.compiler import compile_kernel

    virtual = kernel("scale", "i32 n", SCALE.source, options=("-arch=compute_90",))
    assert b".target sm_90" in compile_kernel(virtual, (9, 0))
    assert compile_kernel(SCALE, (9, 0)).startswith(b"\x7fELF")
    assert bytes([32]) == b" "  # the compiler's log did not overwrite the interpreter's blank


def function_names_are_demangled():
    cuda = driver()
    info = cuda.function_info(function(cuda))
    assert info.name == "add(float*, float*, int)"
    assert info.raw_name == "_Z3addPfS_i"
    assert info.layout == ((0, 8), (8, 8), (16, 4))
    assert (info.module, info.context) == (0x77, 1)


def a_launch_hands_over_shape_attributes_and_arguments():
    cuda = driver()
    stream = cuda.create_stream(blocking=False)
    config = LaunchConfig((8, 2, 1), (64, 1, 1), 128, (2, 2, 1), True, -3, True)
    cuda.launch(function(cuda), config, arguments(1 << 40, 2 << 40, -9), stream)
    seen = LaunchStruct.in_dll(stub(), "stub_launch")
    assert list(seen.sizes) == [8, 2, 1, 64, 1, 1, 128]
    assert seen.stream == stream
    attributes = (ctypes.c_char * 72 * 4).in_dll(stub(), "stub_attributes")
    found = [struct.unpack_from("i4x3i", attributes[i]) for i in range(seen.count)]
    assert [found[0], *((kind, value) for kind, value, *_ in found[1:])] == [
        (4, 2, 2, 1),
        (2, 1),
        (8, -3),
        (6, 1),
    ]
    passed = (ctypes.c_char * 8 * 3).in_dll(stub(), "stub_arguments")
    assert struct.unpack_from("QQi", bytes(passed)) == (1 << 40, 2 << 40, -9)
    cuda.launch(function(cuda), PLAIN, arguments(), stream)
    assert LaunchStruct.in_dll(stub(), "stub_launch").count == 0


def arguments_of_the_wrong_size_are_refused_before_the_launch():
    cuda = driver()
    loaded = function(cuda)
    before = stub().stub_calls(b"cuLaunchKernelEx")
    for wrong in (arguments()[:2], (*arguments()[:2], bytes(8))):
        error = raises("CUDA_ERROR_INVALID_VALUE", cuda.launch, loaded, PLAIN, wrong, 0)
        assert "[8, 8, 4]" in str(error)
    assert stub().stub_calls(b"cuLaunchKernelEx") == before


def large_shared_memory_and_clusters_are_granted_before_the_launch():
    cuda = driver()
    before = stub().stub_calls(b"cuFuncSetAttribute")
    cuda.launch(function(cuda), RICH, arguments(), 0)
    assert stub().stub_calls(b"cuFuncSetAttribute") == before + 2


def a_bound_launch_hands_over_the_same_as_a_launch_by_one_call():
    cuda = driver()
    stream = cuda.create_stream(blocking=False)
    config = LaunchConfig((8, 2, 1), (64, 1, 1), 128, priority=-3)
    launch = cuda.bind_kernel(function(cuda), config, arguments(1 << 40, 2 << 40, -9), stream)
    calls = (b"cuLaunchKernelEx", b"cuFuncGetParamInfo", b"cuCtxSetCurrent", b"cuCtxGetCurrent")
    before = [stub().stub_calls(name) for name in calls]
    assert not launch()
    after = [stub().stub_calls(name) for name in calls]
    assert [new - old for old, new in zip(before, after, strict=True)] == [1, 0, 0, 1]
    seen = LaunchStruct.in_dll(stub(), "stub_launch")
    assert list(seen.sizes) == [8, 2, 1, 64, 1, 1, 128]
    assert (seen.stream, seen.count) == (stream, 1)
    passed = (ctypes.c_char * 8 * 3).in_dll(stub(), "stub_arguments")
    assert struct.unpack_from("QQi", bytes(passed)) == (1 << 40, 2 << 40, -9)
    stub().stub_fail(b"cuLaunchKernelEx", 700)
    assert launch() == 700
    raises("CUDA_ERROR_INVALID_VALUE", cuda.bind_kernel, function(cuda), PLAIN, (b"",), stream)


def a_bound_launch_finds_its_context_and_leaves_the_other_one():
    from cuda.bindings import driver as bindings

    cuda = driver()
    launch = cuda.bind_kernel(function(cuda), PLAIN, arguments(), 0)
    bindings.cuCtxSetCurrent(bindings.CUcontext(0x4242))
    assert not launch()
    assert int(bindings.cuCtxGetCurrent()[1]) == 0x4242
    bindings.cuCtxSetCurrent(bindings.CUcontext(0))
    assert not launch()
    assert int(bindings.cuCtxGetCurrent()[1]) == 0x1000


def launches_on_many_threads_do_not_share_memory():
    import threading

    cuda, loaded = driver(), function(driver())
    held = [cuda._parameters(loaded).take() for _ in range(2)]
    assert held[0] is not held[1]
    for memory in held:
        cuda._parameters(loaded).give_back(memory)
    assert cuda._parameters(loaded).take() is held[1]
    failed = []

    def work(number):
        try:
            for _ in range(200):
                cuda.launch(loaded, PLAIN, arguments(number, number, number), 0)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def a_function_that_was_not_loaded_here_is_looked_at_again_before_each_launch():
    cuda, other = driver(), driver()
    loaded = function(cuda)
    asked = b"cuFuncGetParamInfo"
    for one, each in ((cuda, 0), (other, 2)):
        one.launch(loaded, PLAIN, arguments(), 0)
        before = stub().stub_calls(asked)
        one.launch(loaded, PLAIN, arguments(), 0)
        assert stub().stub_calls(asked) == before + each


def a_function_at_the_handle_of_one_that_went_has_parameters_of_its_own():
    cuda, loaded = driver(), function(driver())
    cuda._known_parameters[loaded] = Parameters(((0, 4),))  # of whoever had the handle before
    newcomer = kernel("newcomer", "f32* x, f32* y, i32 n", "", loader=lambda *_: loaded)
    assert cuda.function(newcomer) == loaded
    cuda.launch(loaded, PLAIN, arguments(), 0)
    assert cuda._parameters(loaded).layout == ((0, 8), (8, 8), (16, 4))
