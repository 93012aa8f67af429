"""The streaming read: every word is read, which its sum says; a lazy kernel is found out."""

from dataclasses import replace

import pytest

from graphcore.bench import streaming_read
from graphcore.bench.streaming_read import READ, StreamingRead
from graphcore.driver import open_driver
from graphcore.errors import GraphcoreError


def test_a_read_has_a_bandwidth_and_can_be_timed_in_shares(graphcore_driver, monkeypatch):
    if not graphcore_driver.is_emulated:
        monkeypatch.setattr(streaming_read, "_BYTES", 1 << 28)
    with graphcore_driver.stream(blocking=True) as stream:
        read = StreamingRead(graphcore_driver, stream)
        assert read.bytes_a_second > 0
        whole = read.replayed.arm(turns=2).burst(1)
        monkeypatch.setattr(type(graphcore_driver), "elapsed_ms", lambda *_: 8.0)
        assert whole > 0
        assert read.replayed.arm(turns=2).burst(3) == pytest.approx(3 * 0.004)
        assert read.replayed.arm(share=0.5, turns=2).burst(1) == pytest.approx(0.002)


def test_a_kernel_that_leaves_words_out_is_found_out(monkeypatch):
    def lazy(config, data, chunks, out):
        streaming_read._sum_words(config, data, chunks - 1, out)

    monkeypatch.setattr(streaming_read, "READ", replace(READ, reference=lazy))
    driver = open_driver("emulated")
    with driver.stream() as stream, pytest.raises(GraphcoreError, match="expected the sum"):
        StreamingRead(driver, stream)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)], ids=str)
def test_the_kernel_compiles_for_every_device(capability):
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda.bindings is not installed")
    from graphcore.driver.cuda.compiler import compile_kernel
    from graphcore.errors import DriverUnavailable

    try:
        image = compile_kernel(READ, capability)
    except DriverUnavailable as error:
        pytest.skip(str(error))
    assert image.startswith(b"\x7fELF")
