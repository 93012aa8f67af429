"""Random numbers made on the device from integers, so that a replay of a graph draws new ones.

torch's generators cannot be used in a capture of ours. Here a number is a pure function of a row's
state and a token's id; the state lives in a static tensor and each draw moves it on in place. The
integers are exact, hence the same eager, captured, on the host and on any device.

The function is SplitMix's (Steele, Lea, Flood, OOPSLA 2014): a Weyl sequence, here one step of
``_TOKEN`` for a token and one of ``_DRAW`` for a draw, put through a 64-bit mixer. The mixer is
Lea's (``mixLea64`` in Steele and Vigna, "LXM", OOPSLA 2021), whose shifts by 32 are exclusive ors
of the two words of an int64: one operation of torch instead of three.
"""

from __future__ import annotations

import torch

from graphcore.decode.cache_state import static_zeros

_WORD = 1 << 64
_MIXER = 0xDABA0B6EB09322E3
_TOKEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, as in SplitMix
_DRAW = 0xD1342543DE82EF95  # the 64-bit multiplier of LXM: far from small multiples of the other


def mixed(word: int) -> int:
    """Lea's mixer of 64-bit words, with Python's integers."""
    for _ in range(2):
        word = ((word ^ (word >> 32)) * _MIXER) % _WORD
    return word ^ (word >> 32)


class RowNoise:
    """Independent noise for each of ``rows`` rows, and in a row for each token id.

    Attributes:
        state: int64 ``[rows, 1]``; a draw moves it on in place.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.state = static_zeros((rows, 1), torch.int64, device)
        # uniform numbers are centre + word / 2^32, inside (0, 1); all are float64 exactly
        self._centre = static_zeros((), torch.float64, device).fill_(0.5 + 2.0**-33)

    def begin(self, seed: int) -> None:
        """Sets every row to its own place in the sequence of ``seed``; the next draw is its first.

        A row's place does not depend on how many rows there are.
        """
        base = mixed(seed % _WORD)
        rows = self.state.shape[0]
        states = [[_signed(mixed((base + (row + 1) * _TOKEN) % _WORD))] for row in range(rows)]
        self.state.copy_(torch.tensor(states, dtype=torch.int64, device="cpu"))

    def take_back(self, draws: int) -> None:
        """Moves the state back by ``draws``."""
        self.state.sub_(_signed(draws * _DRAW % _WORD))

    def words(self, ids: torch.Tensor) -> torch.Tensor:
        """The draw's int32 ``[rows, n]`` for token ids ``[n]`` or ``[rows, n]``; moves the state.

        The high words of Lea's mixer of state + id * ``_TOKEN``; its last shift leaves them alone.
        """
        words = torch.add(self.state, ids, alpha=_signed(_TOKEN))
        self.state.add_(_signed(_DRAW))
        return _high_mixed_fused(words) if torch.compiler.is_compiling() else _high_mixed(words)

    def log_exponentials(self, ids: torch.Tensor) -> torch.Tensor:
        """Logarithms of standard exponential numbers, float64 ``[rows, n]``: negated Gumbel noise.

        Every one is finite (-22.9 to 3.2).
        """
        uniform = torch.add(self._centre, self.words(ids), alpha=2.0**-32)
        exponentials: torch.Tensor = torch.special.xlogy(-1.0, uniform)
        return exponentials.log_()

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """The static tensors by the name reports use."""
        return {"random state": self.state, "centre of uniform numbers": self._centre}


def _high_mixed(words: torch.Tensor) -> torch.Tensor:
    halves = words.view(torch.int32)
    low, high = halves[:, 0::2], halves[:, 1::2]  # of little-endian words
    for _ in range(2):
        low.bitwise_xor_(high)
        words.mul_(_signed(_MIXER))
    return high


def _high_mixed_fused(words: torch.Tensor) -> torch.Tensor:
    """The same with shifts: a compiler makes one kernel of it, and would copy for the views."""
    for _ in range(2):
        words = (words ^ ((words >> 32) & 0xFFFFFFFF)) * _signed(_MIXER)
    return (words >> 32).to(torch.int32)


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word
