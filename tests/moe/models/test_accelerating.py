"""A model whose experts lie in slots decodes what it decoded: eagerly, captured, and restored."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from helpers.every_fault import each_fault
from helpers.moe_models import (
    DECODED,
    EXPERTS,
    FAMILIES,
    VOCABULARY,
    counted_calls,
    device_of,
    make_moe,
)

import graphcore
from graphcore.decode import CUDAGraphAR, DecodeBuckets, StaticKVCache
from graphcore.driver import Driver
from graphcore.errors import CaptureError, ConfigurationError, LifecycleError
from graphcore.moe import AcceleratedModel, SlotExperts, StagingMemory, accelerate

CAPACITY, NEW = 32, 10
RESIDENT = [EXPERTS // 4, EXPERTS // 2, EXPERTS]
LAYERS = [f"model.layers.{index}.mlp.experts" for index in range(2)]
CHANGING = {"set_exec_node_params", "set_node_enabled", "update_exec", "instantiate", "launch",
            "alloc", "alloc_pinned", "begin_capture", "write"}  # fmt: skip


def make_prompt(tokens: int = 7, batch: int = 1, *, device: str = "cpu", seed: int = 0) -> Any:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, tokens), generator=draw).to(device)


def decoded(runner: CUDAGraphAR, prompt: Any, count: int = NEW) -> tuple[list[Any], torch.Tensor]:
    """Tokens and logits of every step."""
    runner.cache.reset()
    runner.capture(prompt)
    tokens, logits = [], []
    for _ in range(count):
        tokens.append(runner.replay().tolist())
        logits.append(runner.logits.clone())
    return tokens, torch.stack(logits)


def runner_of(model: Any, driver: Driver, **options: Any) -> CUDAGraphAR:
    return CUDAGraphAR(model, max_seq_len=CAPACITY, driver=driver, **options)


@pytest.fixture
def model(graphcore_driver: Driver) -> Any:
    return make_moe(device=device_of(graphcore_driver))


# ---- what it decodes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "slots"),
    [
        (family, slots)
        for family in DECODED
        for slots in RESIDENT
        if family == "qwen3-moe" or slots != EXPERTS // 2
    ],
)
def test_captured_eager_and_original_decode_the_same_tokens(
    graphcore_driver: Driver, family: str, slots: int
) -> None:
    """Captured and eager to the last bit of every step's logits."""
    device = device_of(graphcore_driver)
    model, prompt = make_moe(family, device=device), make_prompt(device=device)
    with runner_of(model, graphcore_driver, capture=False) as runner:
        own, own_logits = decoded(runner, prompt)
    with accelerate(model, slots, driver=graphcore_driver) as handle:
        with runner_of(model, graphcore_driver, capture=False) as runner:
            eager, eager_logits = decoded(runner, prompt)
        with runner_of(model, graphcore_driver) as runner:
            captured, captured_logits = decoded(runner, prompt)
            assert runner.captures == 1
        assert handle.faults() == {}
        misses = sum(each.misses for each in handle.totals().values())
        assert (misses > 2 * EXPERTS) == (slots < EXPERTS), "all resident: each comes once"
    assert captured == eager == own
    assert torch.equal(captured_logits, eager_logits)
    assert (captured_logits - own_logits).abs().max() < 1e-4 * own_logits.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_half_precision_captured_and_eager_agree_to_the_last_bit(
    graphcore_driver: Driver, dtype: torch.dtype
) -> None:
    device = device_of(graphcore_driver)
    model, prompt = make_moe(device=device, dtype=dtype), make_prompt(device=device)
    with torch.no_grad():
        own = model(prompt).logits
    with accelerate(model, 4, driver=graphcore_driver):
        with torch.no_grad():
            found = model(prompt).logits
        with runner_of(model, graphcore_driver, capture=False) as runner:
            eager = decoded(runner, prompt)
        with runner_of(model, graphcore_driver) as runner:
            captured = decoded(runner, prompt)
    assert captured[0] == eager[0]
    assert torch.equal(captured[1], eager[1])
    assert (found - own).abs().max() < 0.05 * own.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_own_generate_gives_the_same_ids(
    graphcore_driver: Driver, family: str
) -> None:
    device = device_of(graphcore_driver)
    model, prompt = make_moe(family, device=device), make_prompt(device=device, batch=2)
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 8, "do_sample": False}
    own = model.generate(prompt, **options)
    with accelerate(model, 4, driver=graphcore_driver):
        assert torch.equal(model.generate(prompt, **options), own)
    assert torch.equal(model.generate(prompt, **options), own)


def test_bits_do_not_depend_on_how_many_experts_are_resident(
    graphcore_driver: Driver, model: Any
) -> None:
    prompt = make_prompt(11, batch=2, device=device_of(graphcore_driver))
    found = []
    for slots in (*RESIDENT, dict(zip(LAYERS, (2, 8), strict=True))):
        with (
            accelerate(model, slots, driver=graphcore_driver),
            runner_of(model, graphcore_driver, batch_size=2) as runner,
        ):
            found.append(decoded(runner, prompt)[1])
    assert all(torch.equal(each, found[0]) for each in found)


def test_prompts_beside_decode_change_nothing_of_it(graphcore_driver: Driver, model: Any) -> None:
    """Two caches of one model take turns over the same slots."""
    device = device_of(graphcore_driver)
    prompts = [make_prompt(length, device=device, seed=length) for length in (5, 9)]
    with accelerate(model, 4, driver=graphcore_driver):
        with runner_of(model, graphcore_driver) as runner:
            alone = [decoded(runner, prompt)[0] for prompt in prompts]
        with runner_of(model, graphcore_driver) as one, runner_of(model, graphcore_driver) as two:
            one.capture(prompts[0])
            tokens: tuple[list[Any], list[Any]] = ([], [])
            for step in range(NEW):
                tokens[0].append(one.replay().tolist())
                if step % 5 == 0:
                    two.cache.reset()
                    two.capture(prompts[1])
                    tokens[1].clear()
                tokens[1].append(two.replay().tolist())
            assert one.captures == two.captures == 1
    assert tokens[0] == alone[0]
    assert tokens[1] == alone[1][: len(tokens[1])]


def test_a_prompt_of_more_routes_than_experts_leaves_the_slots_alone(
    graphcore_driver: Driver, model: Any
) -> None:
    """Through staging memory: the same bits, each expert copied once, decode's residents stay."""
    device = device_of(graphcore_driver)
    short, long = make_prompt(2, device=device), make_prompt(20, device=device)
    with torch.no_grad(), accelerate(model, 4, driver=graphcore_driver, staging=False) as handle:
        assert handle.staging is None
        wanted = model(long).logits
        assert handle.totals()[LAYERS[0]].steps == 10
    with torch.no_grad(), accelerate(model, 4, driver=graphcore_driver) as handle:
        assert handle.staging is not None
        model(short)
        before = handle.pool.residents(), handle.totals()
        assert torch.equal(model(long).logits, wanted)
        assert (handle.pool.residents(), handle.totals()) == before
        assert handle.faults() == {}


@pytest.mark.parametrize("capture", [True, False], ids=["captured", "eager"])
def test_fewer_slots_than_a_row_needs_decode_through_staging_memory(
    graphcore_driver: Driver, model: Any, capture: bool
) -> None:
    prompt = make_prompt(device=device_of(graphcore_driver))
    with accelerate(model, EXPERTS, driver=graphcore_driver) as handle:
        assert handle.staging is None, "every expert has a slot"
        with runner_of(model, graphcore_driver) as runner:
            wanted = decoded(runner, prompt)[1]
    with (
        accelerate(model, 1, driver=graphcore_driver) as handle,
        runner_of(model, graphcore_driver, capture=capture) as runner,
    ):
        assert torch.equal(decoded(runner, prompt)[1], wanted)
        assert handle.totals()[LAYERS[0]].steps == 0


def test_staging_memory_may_be_shared_and_stays_its_owners(
    graphcore_driver: Driver, model: Any
) -> None:
    other = make_moe(device=device_of(graphcore_driver))
    prompt = make_prompt(20, device=device_of(graphcore_driver))
    with (
        StagingMemory(expert_bytes=50_000, row_bytes=50_000, driver=graphcore_driver) as memory,
        torch.no_grad(),
    ):
        one = accelerate(model, 3, driver=graphcore_driver, staging=memory)
        two = accelerate(other, 5, driver=graphcore_driver, staging=memory)
        assert one.staging is two.staging is memory
        assert torch.equal(model(prompt).logits, other(prompt).logits)
        one.restore()
        two.restore()
        assert not memory.is_closed
    mine = accelerate(model, 3, driver=graphcore_driver)
    mine.restore()
    assert mine.staging is not None
    assert mine.staging.is_closed


@pytest.mark.parametrize(
    "options",
    [
        {"prefill_chunk_size": 3},
        {"prefill_chunk_size": 3, "capture_prefill": True},
        {"prefill_chunk_size": 5, "capture_prefill": True},
    ],
    ids=["eager pieces", "captured pieces", "captured staged pieces"],
)
def test_prompts_in_pieces_decode_the_same(
    graphcore_driver: Driver, model: Any, options: dict[str, Any]
) -> None:
    prompt = make_prompt(11, device=device_of(graphcore_driver))
    with accelerate(model, 4, driver=graphcore_driver):
        with runner_of(model, graphcore_driver) as runner:
            wanted = decoded(runner, prompt)[0]
        with runner_of(model, graphcore_driver, **options) as runner:
            assert decoded(runner, prompt)[0] == wanted
            assert decoded(runner, prompt)[0] == wanted


def test_buckets_of_several_batches_share_the_slots(graphcore_driver: Driver, model: Any) -> None:
    device = device_of(graphcore_driver)
    prompts = [make_prompt(5, batch=rows, device=device, seed=rows) for rows in (1, 2, 3)]
    found = []
    for slots in (EXPERTS, 4):
        with (
            accelerate(model, slots, driver=graphcore_driver),
            DecodeBuckets(
                model, max_seq_lens=[24], batch_sizes=[1, 4], driver=graphcore_driver
            ) as buckets,
        ):
            found.append([buckets.generate(prompt, 8).ids for prompt in prompts])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_another_cache_is_bound_to_the_captured_step(graphcore_driver: Driver, model: Any) -> None:
    """Its addresses change in the graph; those of slots, and of what lies in the pool, stay."""
    prompt = make_prompt(device=device_of(graphcore_driver))
    with (
        accelerate(model, 4, driver=graphcore_driver),
        runner_of(model, graphcore_driver) as runner,
    ):
        wanted = decoded(runner, prompt)
        runner.use(StaticKVCache.for_model(model, CAPACITY))
        found = decoded(runner, prompt)
        assert (runner.captures, runner.rebinds) == (1, 1)
    assert torch.equal(found[1], wanted[1])


def test_what_a_router_says_of_itself_is_told_as_before(
    graphcore_driver: Driver, model: Any
) -> None:
    """The block and its router are the model's own: hooks on them go on working."""
    prompt = make_prompt(device=device_of(graphcore_driver))
    with torch.no_grad():
        own = model(prompt, output_router_logits=True)
        with accelerate(model, 4, driver=graphcore_driver):
            found = model(prompt, output_router_logits=True)
    assert len(found.router_logits) == 2
    assert torch.equal(found.router_logits[0], own.router_logits[0])
    assert torch.allclose(found.router_logits[1], own.router_logits[1], atol=1e-4)
    assert torch.allclose(found.aux_loss, own.aux_loss)


def test_a_generation_in_one_launch_admits_experts_in_its_loop(
    graphcore_driver: Driver, model: Any
) -> None:
    prompt = make_prompt(device=device_of(graphcore_driver))
    with (
        accelerate(model, 2, driver=graphcore_driver) as handle,
        runner_of(model, graphcore_driver) as runner,
    ):
        wanted = runner.generate(prompt, NEW)
        before = handle.totals()[LAYERS[0]].steps
        runner.cache.reset()
        found = runner.generate_in_one_launch(prompt, NEW)
        assert handle.totals()[LAYERS[0]].steps >= before + NEW
    assert torch.equal(found.cpu(), wanted.cpu())


# ---- what a step does ---------------------------------------------------------------------------


def test_experts_move_between_replays_without_an_update(
    graphcore_driver: Driver, model: Any
) -> None:
    """Emptied slots refill elsewhere; what replays decode then is what a fresh capture decodes."""
    prompt = make_prompt(device=device_of(graphcore_driver))
    with accelerate(model, 4, driver=graphcore_driver) as handle:
        with runner_of(model, graphcore_driver) as runner:
            wanted = decoded(runner, prompt)
            before = handle.pool.residents()
            handle.pool.reset()
            handle.layers[LAYERS[0]](
                *_step_of(model, [7, 6], device_of(graphcore_driver))
            )  # the first slots are theirs now
            moved = decoded(runner, prompt)
            assert runner.captures == 1
            assert handle.pool.residents() != before
        with runner_of(model, graphcore_driver) as fresh:
            again = decoded(fresh, prompt)
    for found in (moved, again):
        assert found[0] == wanted[0]
        assert torch.equal(found[1], wanted[1])


def _step_of(model: Any, experts: list[int], device: str) -> tuple[torch.Tensor, ...]:
    ids = torch.tensor([experts], device=device)
    return torch.zeros(1, 64, device=device), ids, torch.ones(1, 2, device=device)


@pytest.mark.parametrize("slots", [2, EXPERTS], ids=["every step misses", "all resident"])
def test_a_replay_asks_the_driver_for_one_launch(
    graphcore_driver: Driver, model: Any, slots: int
) -> None:
    prompt = make_prompt(device=device_of(graphcore_driver))
    with (
        accelerate(model, slots, driver=graphcore_driver) as handle,
        runner_of(model, graphcore_driver) as runner,
    ):
        decoded(runner, prompt)  # warm
        decoded(runner, prompt, 1)
        before = handle.totals()[LAYERS[0]]
        with counted_calls(graphcore_driver) as calls:
            for _ in range(10):
                runner.replay()
        assert not CHANGING & set(calls)
        after = handle.totals()[LAYERS[0]]
        assert after.steps == before.steps + 10
        assert (after.misses > before.misses) == (slots == 2)


@pytest.mark.gpu
def test_replays_neither_wait_nor_allocate(graphcore_driver: Driver, model: Any) -> None:
    """torch's own debug mode raises at a wait; misses are copied all the same."""
    if graphcore_driver.is_emulated:
        pytest.skip("torch tells of waits and allocations on a device only")
    prompt = make_prompt(device=device_of(graphcore_driver))
    with (
        accelerate(model, 2, driver=graphcore_driver) as handle,
        runner_of(model, graphcore_driver) as runner,
    ):
        decoded(runner, prompt, 2)
        eager = _step_of(model, [3, 4], str(prompt.device))
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(8):
                runner.replay()
            with torch.no_grad():  # nor does an eager layer
                handle.layers[LAYERS[1]](*eager)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        made = torch.cuda.memory_stats()["allocation.all.allocated"] - before
        assert made <= 2, "the eager layer's"
        assert handle.totals()[LAYERS[0]].misses > 10


@pytest.mark.gpu
def test_a_compiled_step_decodes_the_tokens_of_an_uncompiled_one(
    graphcore_driver: Driver, model: Any
) -> None:
    if graphcore_driver.is_emulated:
        pytest.skip("inductor's kernels are captured on a device only")
    prompt = make_prompt(device=device_of(graphcore_driver))
    tokens = {}
    for compiled in (False, True):
        with (
            accelerate(model, 4, driver=graphcore_driver) as handle,
            runner_of(model, graphcore_driver, compile=compiled) as runner,
        ):
            tokens[compiled] = runner.generate(prompt, NEW).tolist()
            assert handle.totals()[LAYERS[0]].steps >= NEW
    assert tokens[True] == tokens[False]


# ---- and back -----------------------------------------------------------------------------------


def test_restored_the_model_is_what_it_was(graphcore_driver: Driver, model: Any) -> None:
    before = {name: (each, each.detach().clone()) for name, each in model.named_parameters()}
    modules = dict(model.named_modules())
    handle = accelerate(model, 2, driver=graphcore_driver)
    assert len(dict(model.named_parameters())) == len(before) - 4
    assert isinstance(model.get_submodule(LAYERS[0]), SlotExperts)
    handle.restore()
    handle.restore()
    assert handle.is_restored
    assert dict(model.named_modules()) == modules
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    for name, (parameter, values) in before.items():
        assert after[name] is parameter
        assert parameter.device == values.device
        assert torch.equal(parameter, values)


def test_a_runner_outlives_both_ways_and_captures_anew(
    graphcore_driver: Driver, model: Any
) -> None:
    prompt = make_prompt(device=device_of(graphcore_driver))
    with runner_of(model, graphcore_driver) as runner:
        own = decoded(runner, prompt)[0]
        handle = accelerate(model, 4, driver=graphcore_driver)
        assert decoded(runner, prompt)[0] == own
        assert runner.captures == 2
        assert decoded(runner, prompt)[0] == own
        assert runner.captures == 2
        handle.restore()
        with pytest.raises(LifecycleError):
            runner.replay()
        assert decoded(runner, prompt)[0] == own
        assert runner.captures == 3


def test_growth_makes_the_next_prompt_capture_anew(graphcore_driver: Driver, model: Any) -> None:
    prompt = make_prompt(device=device_of(graphcore_driver))
    with (
        accelerate(model, 2, driver=graphcore_driver) as handle,
        runner_of(model, graphcore_driver) as runner,
    ):
        wanted = decoded(runner, prompt)
        handle.pool.grow(6)
        with pytest.raises(LifecycleError):
            runner.replay()
        found = decoded(runner, prompt)
        assert runner.captures == 2
    assert torch.equal(found[1], wanted[1])


def test_a_model_and_its_handle_are_not_kept_by_what_they_made(graphcore_driver: Driver) -> None:
    model = make_moe(device=device_of(graphcore_driver))
    with (
        accelerate(model, 2, driver=graphcore_driver) as handle,
        runner_of(model, graphcore_driver) as runner,
    ):
        decoded(runner, make_prompt(device=device_of(graphcore_driver)), 2)
        graphcore_driver.synchronize()  # what a launch may still use outlives a close
    gone = weakref.ref(model)
    del model, handle, runner
    gc.collect()
    assert gone() is None


def test_something_else_in_the_experts_place_is_not_overwritten(
    graphcore_driver: Driver, model: Any
) -> None:
    handle = accelerate(model, 2, driver=graphcore_driver)
    held = model.model.layers[0].mlp.experts
    model.model.layers[0].mlp.experts = torch.nn.Identity()
    with pytest.raises(LifecycleError, match=r"layers.0.mlp.experts, got Identity"):
        handle.restore()
    model.model.layers[0].mlp.experts = held
    handle.restore()


def test_what_the_steps_came_to_is_told_by_layer(graphcore_driver: Driver, model: Any) -> None:
    prompt = make_prompt(4, device=device_of(graphcore_driver))
    with accelerate(model, EXPERTS, driver=graphcore_driver) as handle:
        assert handle.hit_rate == 1.0
        with torch.no_grad():
            model(prompt)
            model(prompt)
        totals = handle.totals()
        assert list(totals) == LAYERS == list(handle.layers) == list(handle.pool)
        assert {(each.steps, each.routes) for each in totals.values()} == {(2, 16)}
        assert handle.hit_rate == 0.5
        handle.pool.close_admission(LAYERS[1])
        with torch.no_grad():
            model(prompt)
        assert list(handle.faults()) == [LAYERS[1]]
        assert "2 layers" in repr(handle)
    assert "restored" in repr(handle)


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "slots",
    [9, 0, -1, True, 2.5, {}, {LAYERS[0]: 4}, {LAYERS[0]: 4, LAYERS[1]: 4, "x": 4},
     {LAYERS[0]: 4, LAYERS[1]: 9}],
    ids=str,
)  # fmt: skip
def test_a_number_of_slots_that_cannot_be_is_refused(slots: Any) -> None:
    model = make_moe()
    with pytest.raises(ConfigurationError, match="slots_per_layer: expected"):
        accelerate(model, slots)
    with pytest.raises(ConfigurationError, match="slots_per_layer: expected 2 to 8"):
        accelerate(model, 1, staging=False)
    assert not any(isinstance(module, SlotExperts) for module in model.modules())


def test_training_mode_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="training mode"):
        accelerate(make_moe().train(), 4)
    model = make_moe()
    model.model.layers[1].mlp.experts.train()
    with pytest.raises(ConfigurationError, match="training mode"):
        accelerate(model, 4)


def test_a_compiled_model_or_part_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="compiled by torch"):
        accelerate(torch.compile(make_moe()), 4)
    model = make_moe()
    model.model.layers[1].compile()
    with pytest.raises(ConfigurationError, match=r"got model.layers.1 compiled"):
        accelerate(model, 4)


def test_inside_a_capture_neither_way_goes(graphcore_driver: Driver, model: Any) -> None:
    handle = accelerate(make_moe(device=device_of(graphcore_driver)), 4, driver=graphcore_driver)
    x = torch.zeros(4, device=device_of(graphcore_driver))
    with graphcore.capture(driver=graphcore_driver) as captured:
        x.add_(1)
        with pytest.raises(CaptureError, match="accelerate: not while"):
            accelerate(model, 4, driver=graphcore_driver)
        with pytest.raises(CaptureError, match="restore: not while"):
            handle.restore()
    captured.graph.close()
    assert not handle.is_restored


def test_a_model_on_several_devices_or_another_than_the_drivers_is_refused() -> None:
    model = make_moe()
    model.model.embed_tokens.to("meta")
    with pytest.raises(ConfigurationError, match="one device for all weights but the experts'"):
        accelerate(model, 4)
    driver = graphcore.open_driver("emulated")
    with pytest.raises(ConfigurationError, match="expected the cuda driver"):
        accelerate(make_moe(), 4, device="cuda:0", driver=driver)
    with pytest.raises(ConfigurationError, match="driver"):
        accelerate(make_moe(), 4, driver="emulated")


def test_a_fault_at_any_call_leaves_the_model_as_it_was() -> None:
    whole = make_moe().state_dict()
    for _, fault in each_fault(
        lambda driver: (make_moe(), driver),
        lambda made: accelerate(made[0], 4, driver=made[1]),
    ):
        model, driver = fault.state
        has_slots = any(isinstance(module, SlotExperts) for module in model.modules())
        assert has_slots == (fault.error is None), fault.where
        if fault.error is not None:
            assert all(torch.equal(each, whole[name]) for name, each in model.state_dict().items())
            assert fault.leaves_nothing(driver), fault.where


def test_precision_is_checked_with_the_rest_and_changes_the_numbers(
    graphcore_driver: Driver, model: Any
) -> None:
    prompt = make_prompt(device=device_of(graphcore_driver))
    with pytest.raises(ConfigurationError, match="precision"):
        accelerate(model, 4, driver=graphcore_driver, precision="half")
    assert not any(isinstance(module, SlotExperts) for module in model.modules())
    logits = {}
    for precision in ("ieee", "tf32"):
        with accelerate(model, 4, driver=graphcore_driver, precision=precision) as handle:
            assert isinstance(handle, AcceleratedModel)
            with torch.no_grad():
                logits[precision] = model(prompt).logits
    difference = (logits["ieee"] - logits["tf32"]).abs().max()
    assert 0 < difference < 0.05 * logits["ieee"].abs().max()
