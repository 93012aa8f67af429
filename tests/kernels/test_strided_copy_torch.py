"""strided_copy on a device with torch and CuPy tensors, against torch's own copy_, bit for bit."""

from __future__ import annotations

import textwrap

import pytest
from graphcore_kernels import CopyClass, strided_copy
from helpers.isolated import run_script

import graphcore
from graphcore.errors import ConfigurationError

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture(autouse=True)
def _device():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device that torch can use")


DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.bool,
    torch.int64,
    torch.float64,
    torch.complex64,
)


def bits(count: int, dtype, seed: int):
    """A flat device tensor of random bytes: NaN payloads, denormals and all."""
    itemsize = torch.empty(0, dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (count * itemsize,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        raw &= 1
    return raw.view(dtype).cuda()


def same_bits(one, other) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


class Case:
    """Flat buffers of these sizes, and the views of them that are copied."""

    def __init__(self, dst_size, dst, src_size, src, copy_class):
        self.dst_size, self.dst, self.src_size, self.src = dst_size, dst, src_size, src
        self.copy_class = copy_class


def whole(*shape, start=0):
    count = 1
    for size in shape:
        count *= size
    return lambda flat: flat[start : start + count].view(shape)


CASES = {
    "contiguous, odd": Case(100_003, whole(100_003), 100_003, whole(100_003), CopyClass.CONTIGUOUS),
    "contiguous, large": Case(
        2**24 + 5, whole(2**24 + 5), 2**24 + 5, whole(2**24 + 5), CopyClass.CONTIGUOUS
    ),
    "contiguous, one element off": Case(
        100_010, whole(100_003, start=1), 100_010, whole(100_003, start=1), CopyClass.CONTIGUOUS
    ),
    "contiguous, source one element off": Case(
        100_010, whole(100_003), 100_010, whole(100_003, start=1), CopyClass.CONTIGUOUS
    ),
    "pitched rows": Case(
        515 * 640, lambda b: b.view(515, 640)[:, :512], 515 * 512, whole(515, 512), CopyClass.ROWS
    ),
    "odd rows": Case(
        333 * 1029,
        lambda b: b.view(333, 1029)[:, :1021],
        333 * 1033,
        lambda b: b.view(333, 1033)[:, 7:1028],
        CopyClass.ROWS,
    ),
    "rows, one element off": Case(
        515 * 640,
        lambda b: b.view(515, 640)[:, 1:513],
        515 * 512,
        whole(515, 512),
        CopyClass.ROWS,
    ),
    "short rows": Case(
        4001 * 8, lambda b: b.view(4001, 8)[:, 1:4], 4001 * 3, whole(4001, 3), CopyClass.SHORT_INNER
    ),
    "transpose": Case(
        701 * 997, whole(701, 997), 701 * 997, lambda b: b.view(997, 701).t(), CopyClass.TRANSPOSE
    ),
    "transpose, batched": Case(
        7 * 129 * 65,
        whole(7, 129, 65),
        7 * 129 * 65,
        lambda b: b.view(7, 65, 129).mT,
        CopyClass.TRANSPOSE,
    ),
    "BSHD to BHSD": Case(
        3 * 17 * 33 * 64,
        whole(3, 17, 33, 64),
        3 * 17 * 33 * 64,
        lambda b: b.view(3, 33, 17, 64).transpose(1, 2),
        CopyClass.ROWS,
    ),
    "BHSD to BHDS": Case(
        3 * 5 * 64 * 77,
        whole(3, 5, 64, 77),
        3 * 5 * 64 * 77,
        lambda b: b.view(3, 5, 77, 64).mT,
        CopyClass.TRANSPOSE,
    ),
    "5-D reverse": Case(
        16 * 32 * 9 * 17 * 13,
        whole(16, 32, 9, 17, 13),
        16 * 32 * 9 * 17 * 13,
        lambda b: b.view(13, 17, 9, 32, 16).permute(4, 3, 2, 1, 0),
        CopyClass.TRANSPOSE,
    ),
    "8-D reverse": Case(
        3**8,
        whole(*[3] * 8),
        3**8,
        lambda b: b.view(*[3] * 8).permute(7, 6, 5, 4, 3, 2, 1, 0),
        CopyClass.TRANSPOSE,
    ),
    "every second column": Case(
        501 * 500,
        whole(501, 500),
        501 * 1000,
        lambda b: b.view(501, 1000)[:, ::2],
        CopyClass.GENERAL,
    ),
    "broadcast row": Case(
        501 * 500, whole(501, 500), 500, lambda b: b.expand(501, 500), CopyClass.ROWS
    ),
    "broadcast column": Case(
        501 * 500,
        whole(501, 500),
        501,
        lambda b: b.view(501, 1).expand(501, 500),
        CopyClass.GENERAL,
    ),
    "reshape, dense": Case(420 * 9, whole(60, 63), 420 * 9, whole(54, 70), CopyClass.CONTIGUOUS),
    "reshape without common axes": Case(
        150 * 300,
        lambda b: b.view(150, 300)[:, :280],
        210 * 240,
        lambda b: b.view(210, 240)[:, :200],
        CopyClass.GENERAL,
    ),
}


def check(case: Case, dtype, stream=None) -> None:
    dst, src = bits(case.dst_size, dtype, 1), bits(case.src_size, dtype, 2)
    expected = dst.clone()
    case.dst(expected).copy_(case.src(src).reshape(case.dst(expected).shape))
    torch.cuda.synchronize()
    strided_copy(case.dst(dst), case.src(src), stream)
    torch.cuda.synchronize()
    assert same_bits(dst, expected)


@pytest.mark.parametrize("name", CASES)
def test_every_class_copies_as_torch_does(name):
    case = CASES[name]
    plan = strided_copy.plan(
        case.dst(bits(case.dst_size, torch.float32, 1)),
        case.src(bits(case.src_size, torch.float32, 2)),
    )
    assert plan.copy_class is case.copy_class
    check(case, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "name", ["contiguous, source one element off", "odd rows", "transpose", "5-D reverse"]
)
def test_every_element_type_copies_as_torch_does(name, dtype):
    check(CASES[name], dtype)


def test_a_copy_goes_to_torchs_current_stream():
    case, side = CASES["transpose"], torch.cuda.Stream()
    dst, src = bits(case.dst_size, torch.float32, 1), bits(case.src_size, torch.float32, 2)
    other = bits(case.src_size, torch.float32, 3)
    strided_copy.plan(case.dst(dst), case.src(src))
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        src.copy_(other)  # a copy on any other stream would read src before this
        strided_copy(case.dst(dst), case.src(src))
    assert not side.query()
    torch.cuda.synchronize()
    assert same_bits(case.dst(dst).contiguous(), case.src(other).contiguous())


def test_a_copy_is_captured_by_torchs_own_capture():
    case = CASES["odd rows"]
    dst, src = bits(case.dst_size, torch.float32, 1), bits(case.src_size, torch.float32, 2)
    strided_copy.plan(case.dst(dst), case.src(src))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        strided_copy(case.dst(dst), case.src(src))
    replay_and_check(case, dst, src, graph.replay)


def test_a_copy_is_captured_among_torchs_work_by_graphcore():
    case = CASES["5-D reverse"]
    dst, src = bits(case.dst_size, torch.float32, 1), bits(case.src_size, torch.float32, 2)
    strided_copy.plan(case.dst(dst), case.src(src))
    with graphcore.capture() as capture:
        strided_copy(case.dst(dst), case.src(src))
    with capture.graph as graph, graph.instantiate() as made:
        assert {"strided_copy dst", "strided_copy src"} <= set(graph.owners.labels())
        replay_and_check(case, dst, src, made.launch)


def test_a_fork_of_torchs_in_a_capture_takes_the_copy_along():
    case = CASES["pitched rows"]
    dst, src = bits(case.dst_size, torch.float32, 1), bits(case.src_size, torch.float32, 2)
    strided_copy.plan(case.dst(dst), case.src(src))
    side = torch.cuda.Stream()
    with graphcore.capture() as capture:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            strided_copy(case.dst(dst), case.src(src))
        main.wait_stream(side)
    with capture.graph as graph, graph.instantiate() as made:
        assert graph.snapshot().summary()["kernel"] == 1
        replay_and_check(case, dst, src, made.launch)


def replay_and_check(case, dst, src, replay) -> None:
    for seed in (5, 6):
        src.copy_(bits(case.src_size, torch.float32, seed))
        dst.fill_(torch.nan)
        expected = dst.clone()
        case.dst(expected).copy_(case.src(src).reshape(case.dst(expected).shape))
        torch.cuda.synchronize()
        replay()
        torch.cuda.synchronize()
        assert same_bits(dst, expected)


FIRST_USE = """
    import graphcore, torch
    from graphcore_kernels import strided_copy
    src, dst = torch.rand(67, 45, device="cuda"), torch.full((45, 67), torch.nan, device="cuda")
    with graphcore.capture(mode="{mode}") as capture:
        strided_copy(dst, src.t())
    with capture.graph as graph, graph.instantiate() as made:
        torch.cuda.synchronize()
        assert dst.isnan().all()
        made.launch()
        torch.cuda.synchronize()
        assert torch.equal(dst, src.t())
    print("replayed")
"""


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_the_first_use_in_a_process_may_be_inside_a_capture(mode):
    script = textwrap.dedent(FIRST_USE).format(mode=mode)
    done = run_script(script)
    assert done.stdout.strip() == "replayed", done.stderr


def test_more_than_2_to_the_31_elements_arrive():
    rows, columns = 2**16 + 3, 2**15 + 1
    needed = 3 * rows * columns
    if torch.cuda.mem_get_info()[0] < needed + 2**30:
        pytest.skip(f"needs {needed >> 20} MiB of free device memory")
    src = torch.empty(rows, columns, dtype=torch.uint8, device="cuda").random_()
    dst = torch.zeros(columns, rows, dtype=torch.uint8, device="cuda")
    plan = strided_copy.plan(dst, src.t())
    assert plan.layout.index_bits == 64
    plan.launch()
    assert torch.equal(dst, src.t())
    dst.zero_()
    strided_copy(dst, src)
    assert torch.equal(dst.view(-1), src.view(-1))


def test_operands_of_two_devices_are_refused_and_the_context_lives():
    dst, src = torch.zeros(4, device="cuda"), torch.ones(4)
    with pytest.raises(ConfigurationError, match=r"src\.device: expected cuda:0"):
        strided_copy(dst, src)
    strided_copy(dst, src.cuda())
    assert dst.tolist() == [1.0] * 4


def test_cupy_arrays_with_negative_strides_are_copied_on_cupys_current_stream():
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    src = cupy.arange(35 * 64, dtype=cupy.float32).reshape(35, 64)
    dst = cupy.full((64, 35), cupy.nan, cupy.float32)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        src += 1
        strided_copy(dst, src[::-1, ::-1].T)
        stream.synchronize()
    assert (dst == src[::-1, ::-1].T).all()
