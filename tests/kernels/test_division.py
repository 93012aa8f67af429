"""Division by multiplication, as the kernels do it, against Python's."""

from __future__ import annotations

import pytest
from graphcore_kernels._division import divide, magic
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize("bits", [32, 64])
@given(data=st.data())
def test_every_quotient_below_half_the_range_is_exact(bits, data):
    most = 2 ** (bits - 1) - 1
    divisor = data.draw(st.one_of(st.integers(1, 300), st.integers(1, most)))
    quotient = data.draw(st.integers(0, most // divisor))
    by = magic(divisor, bits)
    assert 0 < by.magic < 2**bits
    assert 0 <= by.shift < bits
    # the multiples of the divisor and their neighbours are where rounding goes wrong
    for number in (quotient * divisor - 1, quotient * divisor, quotient * divisor + divisor - 1):
        if 0 <= number <= most:
            assert divide(number, by, bits) == number // divisor
