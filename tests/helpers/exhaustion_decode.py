"""Static caches, buckets and runners for which the device has not memory enough."""

from __future__ import annotations

from typing import Any

import torch
from helpers.decode_models import device_of, eager_tokens, make_model, make_prompt
from helpers.exhaustion import MIB, Case

from graphcore import CaptureError
from graphcore.decode import CUDAGraphAR, DecodeBuckets, StaticKVCache
from graphcore.driver import Driver
from graphcore.errors import CudaError

NEW, TOKENS, ROOM = 4, 3, 32
TORCHS = (torch.OutOfMemoryError,)
# on a device the capture of a step and its executable take memory of the driver too
ANY = (torch.OutOfMemoryError, CaptureError, CudaError)


class Decoding(Case):
    """A runner that decoded before: it decodes on, as eager does, on a cache that was poisoned."""

    errors = ANY
    says = ()
    device_slack = 40 * MIB  # torch keeps a workspace for each stream it multiplied on

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self.device = device_of(driver)
        self.model = make_model(device=self.device)
        self.prompts = [make_prompt(TOKENS, device=self.device, seed=seed) for seed in (0, 1)]
        self.expected = [eager_tokens(self.model, each, NEW) for each in self.prompts]
        assert not torch.equal(*self.expected)
        self.runner = CUDAGraphAR(self.model, max_seq_len=ROOM, driver=driver)
        self.runner.generate(self.prompts[0], NEW)
        # as many rows as take some units of memory
        self.rows = 128 if driver.is_emulated else 8192
        self.wide = make_prompt(TOKENS, batch=self.rows, device=self.device, seed=2)
        self.wide_expected = eager_tokens(self.model, self.wide, NEW)

    def still_right(self) -> None:
        for prompt, expected in zip(self.prompts, self.expected, strict=True):
            self.runner.cache.layers[0].keys.fill_(7.0)
            self.runner.cache.reset()
            assert torch.equal(self.runner.generate(prompt, NEW), expected)
        assert self.runner.captures == 1

    def is_right(self, ids: torch.Tensor) -> None:
        assert torch.equal(ids, self.wide_expected)


class KeysAndValues(Decoding):
    """A cache of eight buffers, each of a unit; some find room, the others none."""

    errors = TORCHS
    says = (
        "Tried to allocate",
        "K and V of 4 layers for 1 rows of 64 tokens in torch.float32 take",
    )
    shares = (0.05, 0.3, 0.55, 0.8)

    def operate(self) -> Any:
        return StaticKVCache(4, 1, 1, 64, self.unit // 256, torch.float32, self.device)

    def check(self, made: Any) -> None:
        assert made.kv_bytes == 8 * self.unit
        for layer in range(4):
            states = torch.full((1, 1, 2, self.unit // 256), float(layer + 1), device=self.device)
            keys, values = made.update(states, -states, layer)
            assert keys[:, :, :2].unique().tolist() == [layer + 1]
            assert values[:, :, :2].unique().tolist() == [-layer - 1]
            assert not keys[:, :, 2:].any()
        assert made.seen_tokens == 2


class Runner(Decoding):
    """A runner and its first prompt, with memory for more and more of it."""

    shares = (0.1, 0.35, 0.6, 0.9)

    def operate(self) -> Any:
        runner = CUDAGraphAR(self.model, max_seq_len=ROOM, batch_size=self.rows, driver=self.driver)
        return runner, runner.generate(self.wide, NEW)

    def check(self, made: Any) -> None:
        self.is_right(made[1])
        assert made[0].captures == 1


class FirstPrompt(Decoding):
    """A runner that is there, whose prompt or capture finds no memory: it decodes once there is."""

    shares = (0.2, 0.6, 0.9)
    device_shares = (0.2,)
    keeps_for_life = True  # the first prompt makes the static logits, the first capture a stream

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self.large = CUDAGraphAR(self.model, max_seq_len=ROOM, batch_size=self.rows, driver=driver)

    def operate(self) -> Any:
        return self.large.generate(self.wide, NEW)

    def check(self, made: Any) -> None:
        self.is_right(made)
        assert self.large.captures == 1


class Buckets(Decoding):
    """Buckets over one storage: whichever finds no memory, none of them is left."""

    shares = (0.1, 0.5, 0.8, 0.95)

    def operate(self) -> Any:
        return DecodeBuckets(
            self.model, [16, ROOM], [1, self.rows], driver=self.driver, progress=False
        )

    def check(self, made: Any) -> None:
        assert made.captures == 4
        for prompt, expected in zip(self.prompts, self.expected, strict=True):
            assert torch.equal(made.generate(prompt, NEW).ids, expected)
        self.is_right(made.generate(self.wide, NEW).ids)
        made.close()
