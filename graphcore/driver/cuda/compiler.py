"""Kernel source to a loadable image, by NVRTC. Pure: no context, no device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from graphcore.driver.codes import cuda_error
from graphcore.driver.kernel import Kernel
from graphcore.errors import DriverUnavailable

_ARCHITECTURE_OPTIONS = ("-arch", "--gpu-architecture")
_LOG_LINES = 12
T = TypeVar("T")


def compile_kernel(kernel: Kernel, capability: tuple[int, int]) -> bytes:
    """A cubin of ``kernel`` (PTX where its options ask for a virtual architecture).

    Args:
        kernel: Its options are passed on; without an architecture among them the device's is used.
        capability: Compute capability of the device.

    Raises:
        CudaError: ``CUDA_ERROR_INVALID_SOURCE`` with the compiler's log.
        DriverUnavailable: NVRTC is not installed.
    """
    options = list(kernel.options)
    if not any(option.startswith(_ARCHITECTURE_OPTIONS) for option in options):
        options.append(f"-arch=sm_{capability[0]}{capability[1]}")
    return _compiled(kernel, options, _image)


def assembler_log(kernel: Kernel, architecture: str) -> str:
    """What the assembler says of each function of ``kernel``: registers, memory, stack, spills.

    Args:
        kernel: Its options are passed on, an architecture among them before ``architecture``.
        architecture: A real one, such as "sm_90a": where there is no code there is nothing to say.

    Raises:
        CudaError: ``CUDA_ERROR_INVALID_SOURCE`` with the compiler's log.
        DriverUnavailable: NVRTC is not installed.
    """
    options = [*kernel.options, "-Xptxas=-v"]
    if not any(option.startswith(_ARCHITECTURE_OPTIONS) for option in kernel.options):
        options.append(f"-arch={architecture}")
    return _compiled(kernel, options, _log)


def compiler_version() -> tuple[int, int]:
    """(major, minor) of NVRTC.

    Raises:
        DriverUnavailable: NVRTC is not installed.
    """
    try:
        _, major, minor = _nvrtc().nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise DriverUnavailable(
            f"NVRTC could not be loaded ({error}): pip install nvidia-cuda-nvrtc"
        ) from error
    return major, minor


def _compiled(kernel: Kernel, options: Sequence[str], read: Callable[[Any, Any], T]) -> T:
    """What ``read`` finds in the compiled program."""
    nvrtc = _nvrtc()
    try:
        program = _value(
            nvrtc.nvrtcCreateProgram(
                kernel.source.encode(), f"{kernel.name}.cu".encode(), 0, None, None
            ),
            "nvrtcCreateProgram",
        )
    except RuntimeError as error:  # the bindings raise where the library is missing
        raise DriverUnavailable(
            f"kernel {kernel.name}: NVRTC could not be loaded ({error}): "
            "pip install nvidia-cuda-nvrtc"
        ) from error
    try:
        flags = [option.encode() for option in options]
        code, *_ = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
        if code:
            log = "\n".join(_log(nvrtc, program).splitlines()[:_LOG_LINES])
            raise cuda_error(
                "CUDA_ERROR_INVALID_SOURCE",
                "nvrtcCompileProgram",
                description=f"kernel {kernel.name} does not compile:\n{log}",
            )
        return read(nvrtc, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _nvrtc() -> Any:
    from cuda.bindings import nvrtc

    return nvrtc


def _value(answer: Any, call: str) -> Any:
    code = answer[0]
    if code:
        name = str(getattr(code, "name", code))
        raise cuda_error(name, call, number=int(code), description="NVRTC refused the call")
    return answer[1] if len(answer) > 1 else None


def _image(nvrtc: Any, program: Any) -> bytes:
    size = _value(nvrtc.nvrtcGetCUBINSize(program), "nvrtcGetCUBINSize")
    if size:
        image = bytearray(size)
        _value(nvrtc.nvrtcGetCUBIN(program, image), "nvrtcGetCUBIN")
        return bytes(image)
    image = bytearray(_value(nvrtc.nvrtcGetPTXSize(program), "nvrtcGetPTXSize"))
    _value(nvrtc.nvrtcGetPTX(program, image), "nvrtcGetPTX")
    return bytes(image)


def _log(nvrtc: Any, program: Any) -> str:
    text = bytearray(_value(nvrtc.nvrtcGetProgramLogSize(program), "nvrtcGetProgramLogSize"))
    _value(nvrtc.nvrtcGetProgramLog(program, text), "nvrtcGetProgramLog")
    return text.decode(errors="replace").rstrip("\0 \n")
