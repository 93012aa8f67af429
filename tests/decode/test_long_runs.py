"""Thousands of replays: nothing moves, nothing grows, and the mirror stays with the device."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from helpers.decode_models import device_of, eager_tokens, make_model, make_prompt
from helpers.every_fault import handles

from graphcore.decode import CUDAGraphAR
from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver

PROMPT = 8
_REPLAYS = {"emulated": 100, "cuda": 1_000}
_ROUNDS = {"emulated": 2, "cuda": 10}


def long_model(device: str, tokens: int) -> Any:
    model = make_model(device=device)
    model.config.max_position_embeddings = tokens
    return model


def facts_of(runner: CUDAGraphAR) -> dict[str, Any]:
    """What must not change: the graph's fingerprint, all addresses, handles where one can count."""
    driver = runner.driver
    counted = {"handles": handles(driver)} if isinstance(driver, EmulatedDriver) else {}
    return {
        **counted,
        "fingerprint": runner.fingerprint().digest,
        **{name: tensor.data_ptr() for name, tensor in runner.named_tensors().items()},
    }


def held_bytes(driver: Driver) -> dict[str, int]:
    """What must not grow: bytes of the device that are taken, and bytes of torch's tensors."""
    gc.collect()  # what earlier tests left in cycles would be freed somewhere between two looks
    driver.synchronize()
    free, total = driver.memory_info()
    allocated = 0 if driver.is_emulated else torch.cuda.memory_allocated()
    return {"taken of the device": total - free, "allocated by torch": allocated}


@pytest.mark.exclusive
def test_thousands_of_replays_leave_addresses_fingerprint_and_memory_as_they_were(
    graphcore_driver: Driver,
) -> None:
    device, replays = device_of(graphcore_driver), _REPLAYS[graphcore_driver.name]
    model = long_model(device, PROMPT + replays)
    prompt = make_prompt(PROMPT, device=device)
    with CUDAGraphAR(model, max_seq_len=PROMPT + replays, driver=graphcore_driver) as runner:
        runner.generate(prompt, 4)
        first = runner.generate(prompt, replays, eos_token_id=())
        kept = first[:, :40].clone()
        total = int(first.sum())
        del first  # what it held is free again
        before, held = facts_of(runner), held_bytes(graphcore_driver)
        for _ in range(_ROUNDS[graphcore_driver.name]):
            runner.cache.reset()
            runner.capture(prompt)
            for count in range(1, replays + 1):
                runner.replay()
                if count % (replays // 5) == 0:
                    assert runner.cache.seen_tokens == int(runner.position) == PROMPT + count
            again = runner._step.history
            assert int(again.sum()) == total
            assert torch.equal(again[:, :40], kept)
            again.zero_()
        assert facts_of(runner) == before
        grown = {name: now - held[name] for name, now in held_bytes(graphcore_driver).items()}
        assert max(grown.values()) <= 0, grown
        # a second prompt reuses the graph, and decodes as eager
        other = make_prompt(5, device=device, seed=3)
        assert torch.equal(runner.generate(other, 20), eager_tokens(model, other, 20))
        assert runner.captures == 1
        assert facts_of(runner)["fingerprint"] == before["fingerprint"]
    assert torch.equal(kept, eager_tokens(model, prompt, 32))


def test_runners_in_two_threads_decode_as_eager_from_the_first_prompt_on(
    graphcore_driver: Driver,
) -> None:
    device = device_of(graphcore_driver)
    model = make_model(device=device)
    prompts = [make_prompt(5, device=device), make_prompt(7, device=device, seed=2)]
    expected = [eager_tokens(model, prompt, 8) for prompt in prompts]
    models = [make_model(device=device) for _ in prompts]  # hooks of a capture are the model's
    together = threading.Barrier(2)
    decoded: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            with CUDAGraphAR(
                models[index], max_seq_len=16, driver=graphcore_driver, on_legacy_work="ignore"
            ) as runner:
                together.wait(timeout=60)
                for _ in range(4):
                    decoded[index].append(runner.generate(prompts[index], 8))
                assert runner.captures == 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert errors == []
    for index in range(2):
        assert len(decoded[index]) == 4
        assert all(torch.equal(ids, expected[index]) for ids in decoded[index])
