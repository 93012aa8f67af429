"""The exception tree: builtin bases, what a message carries, and the way through a process pool."""

from __future__ import annotations

import pickle

import pytest

from graphcore import errors


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.ConfigurationError, ValueError),
        (errors.CapacityError, ValueError),
        (errors.PlanError, ValueError),
        (errors.CacheTypeError, TypeError),
        (errors.LifecycleError, RuntimeError),
        (errors.CaptureError, RuntimeError),
        (errors.StaleGraphError, RuntimeError),
        (errors.OverwrittenOutputError, RuntimeError),
        (errors.UpdateRefused, RuntimeError),
        (errors.CudaError, errors.GraphcoreError),
        (errors.DriverUnavailable, errors.GraphcoreError),
    ],
)
def test_whoever_expects_the_builtin_catches_ours(
    error: type[Exception], builtin: type[Exception]
) -> None:
    assert issubclass(error, builtin)
    assert issubclass(error, errors.GraphcoreError)


FULL = errors.CudaError(
    "CUDA_ERROR_INVALID_VALUE",
    "cuGraphLaunch",
    number=1,
    description="a value does not fit",
    node=0x40,
    hint="look at the node",
    is_sticky=True,
)


def test_a_cuda_error_says_call_code_number_meaning_node_and_hint() -> None:
    assert str(FULL) == (
        "cuGraphLaunch: CUDA_ERROR_INVALID_VALUE (1): a value does not fit [node 0x40] "
        "Hint: look at the node"
    )
    bare = errors.CudaError("CUDA_ERROR_UNKNOWN", "cuInit", number=999)
    assert str(bare) == "cuInit: CUDA_ERROR_UNKNOWN (999)"
    assert not bare.is_sticky


def test_a_cuda_error_comes_whole_out_of_another_process() -> None:
    copy = pickle.loads(pickle.dumps(FULL))
    assert type(copy) is errors.CudaError
    assert (str(copy), vars(copy)) == (str(FULL), vars(FULL))


def test_a_capture_error_comes_whole_out_of_another_process() -> None:
    error = errors.CaptureError("it failed", code="CUDA_ERROR_UNKNOWN", location="a.py:3")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.code, copy.location) == ("it failed", "CUDA_ERROR_UNKNOWN", "a.py:3")
