"""A model with experts in slots through GraphReuse: decode replays, prompts beside are staged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.moe_models import EXPERTS, HIDDEN, VOCABULARY, causal_mask, device_of, make_moe

import graphcore
from graphcore.decode import CUDAGraphAR
from graphcore.driver import Driver
from graphcore.errors import CaptureError, ConfigurationError
from graphcore.moe import (
    AcceleratedModel,
    CallableStep,
    Kind,
    Namespace,
    RowSemantics,
    SlotExperts,
    Way,
    accelerate,
)

LAYERS = [f"model.layers.{index}.mlp.experts" for index in range(2)]


class Stack:
    """The layers of a model over static rows, without a cache: what comes in and what comes out."""

    def __init__(self, handle: AcceleratedModel, rows: int) -> None:
        self.handle, self.rows = handle, rows
        self.x = torch.zeros(1, rows, HIDDEN, device=handle.device)
        self.out = torch.full_like(self.x, float("nan"))
        self.mask = causal_mask(rows, self.x)
        self.step = handle.step(
            "layers", self.run, tensors={"x": self.x, "out": self.out}, rows=rows
        )

    def run(self) -> None:
        self.out.copy_(self.of(self.x))

    def of(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            out: torch.Tensor = self.handle.model.model(
                inputs_embeds=x, attention_mask=self.mask, use_cache=False
            ).last_hidden_state
            return out

    def fill(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.x.copy_(torch.randn(1, self.rows, HIDDEN, generator=draw))
        self.out.fill_(float("nan"))

    def is_right(self) -> bool:
        """Whether the last step gave what the layers give eagerly; their slots move by it."""
        self.handle.driver.synchronize()
        return torch.equal(self.out, self.of(self.x))


@pytest.fixture
def handle(graphcore_driver: Driver) -> Any:
    model = make_moe(device=device_of(graphcore_driver))
    with accelerate(model, 4, driver=graphcore_driver) as made:
        yield made


def test_decode_warms_up_is_captured_and_replays_while_experts_move(
    handle: AcceleratedModel,
) -> None:
    decode = Stack(handle, rows=1)
    kinds = []
    with handle.reuse() as reuse:
        for seed in range(12):
            decode.fill(seed)
            kinds.append(reuse.run(decode.step).kind)
            assert decode.is_right(), seed
    assert kinds == [Kind.DIRECT, Kind.CAPTURE, *[Kind.REPLAY] * 10]
    totals = handle.totals()[LAYERS[0]]
    assert totals.steps == 24, "the warm-up is the first step; a check is an eager one"
    assert totals.misses > EXPERTS


def test_prompts_beside_decode_are_staged_and_leave_it_captured(handle: AcceleratedModel) -> None:
    decode, prompt = Stack(handle, rows=1), Stack(handle, rows=7)
    with handle.reuse() as reuse:
        for seed in range(9):
            decode.fill(seed)
            result = reuse.run(decode.step)
            assert decode.is_right()
            if seed % 3 == 2:
                assert result.kind is Kind.REPLAY
                before = handle.pool.residents(), handle.totals()
                prompt.fill(seed)
                beside = reuse.run(prompt.step, prompt_rows=7)
                assert beside.way is Way.STAGED
                handle.driver.synchronize()
                assert (handle.pool.residents(), handle.totals()) == before
                assert prompt.is_right()
        assert reuse.counters.captures == 1
        staged = handle.staged_totals()
        # each prompt went there through reuse, and once more for the check
        assert [staged[name].passes for name in LAYERS] == [6, 6]
        assert str(staged[LAYERS[0]].routes) in str(reuse.report(staged=staged))


def test_all_resident_prompts_are_captured_as_a_variant_of_their_own(
    graphcore_driver: Driver,
) -> None:
    model = make_moe(device=device_of(graphcore_driver))
    with accelerate(model, EXPERTS, driver=graphcore_driver) as handle, handle.reuse() as reuse:
        decode, prompt = Stack(handle, rows=1), Stack(handle, rows=7)
        kinds: dict[str, list[Kind]] = {"decode": [], "prompt": []}
        for seed in range(5):
            for name, stack, rows in (("decode", decode, 0), ("prompt", prompt, 7)):
                stack.fill(seed)
                kinds[name].append(reuse.run(stack.step, prompt_rows=rows).kind)
                assert stack.is_right()
        assert kinds["decode"] == kinds["prompt"]
        assert kinds["decode"] == [Kind.DIRECT, Kind.CAPTURE, *[Kind.REPLAY] * 3]


def test_a_model_with_its_cache_decodes_the_tokens_of_a_runner(
    graphcore_driver: Driver, handle: AcceleratedModel
) -> None:
    device = device_of(graphcore_driver)
    draw = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, VOCABULARY, (1, 6), generator=draw).to(device)
    with CUDAGraphAR(handle.model, max_seq_len=32, driver=graphcore_driver) as runner:
        wanted = runner.generate(prompt, 10)[0, 6:].tolist()
    with (
        CUDAGraphAR(handle.model, max_seq_len=32, driver=graphcore_driver, capture=False) as runner,
        handle.reuse() as reuse,
        torch.no_grad(),
    ):
        runner.capture(prompt)
        step = runner._step
        work = handle.step("decode", step.run, tensors=step.named_tensors(), rows=1)
        found, kinds = [], []
        for _ in range(10):
            kinds.append(reuse.run(work).kind)
            found.append(int(step.token))
    assert found == wanted
    assert kinds == [Kind.DIRECT, Kind.CAPTURE, *[Kind.REPLAY] * 8]


def test_draft_and_verification_stand_beside_decode_and_each_is_captured_once(
    graphcore_driver: Driver,
) -> None:
    """Required work of a model: four rows that are verified, one that drafts, one that decodes."""
    model = make_moe(device=device_of(graphcore_driver))
    with accelerate(model, EXPERTS, driver=graphcore_driver) as handle, handle.reuse() as reuse:
        decode, verify = Stack(handle, rows=1), Stack(handle, rows=4)
        kinds: dict[str, list[Kind]] = {"draft": [], "verify": [], "decode": []}
        for seed in range(6):
            draft = reuse.certificate(
                decode.step,
                namespace=Namespace.DRAFT,
                row_semantics=RowSemantics.SEQUENTIAL,
                required=True,
            )
            check = reuse.certificate(
                verify.step, row_semantics=RowSemantics.SPECULATIVE, sequences=1, required=True
            )
            for name, stack, certificate in (
                ("draft", decode, draft), ("verify", verify, check), ("decode", decode, None)
            ):  # fmt: skip
                stack.fill(seed)
                kinds[name].append(reuse.run(stack.step, certificate).kind)
                assert stack.is_right()
        assert all(each[-2:] == [Kind.REPLAY] * 2 for each in kinds.values()), kinds
        assert all(each.count(Kind.CAPTURE) == 1 for each in kinds.values()), kinds


def test_required_work_of_more_routes_than_slots_is_staged(handle: AcceleratedModel) -> None:
    verify = Stack(handle, rows=4)
    with handle.reuse() as reuse:
        for seed in range(3):
            certificate = reuse.certificate(
                verify.step, row_semantics=RowSemantics.SPECULATIVE, sequences=1, required=True
            )
            verify.fill(seed)
            before = handle.totals()
            result = reuse.run(verify.step, certificate)
            assert (result.kind, result.way) == (Kind.STAGED, Way.STAGED)
            assert handle.totals() == before
            assert verify.is_right()


def test_closed_admission_runs_decode_through_staging_memory(handle: AcceleratedModel) -> None:
    decode = Stack(handle, rows=1)
    with handle.reuse() as reuse:
        for seed in range(3):
            decode.fill(seed)
            reuse.run(decode.step)
        with reuse.manifests.ownership.changing(list(handle.layers)[:1]):
            before = handle.totals()
            decode.fill(9)
            result = reuse.run(decode.step)
            assert result.way is Way.STAGED
            assert handle.totals() == before
        assert decode.is_right()


def test_after_growth_the_old_step_is_not_replayed_and_a_new_one_is(
    handle: AcceleratedModel,
) -> None:
    decode = Stack(handle, rows=1)
    with handle.reuse() as reuse:
        for seed in range(3):
            decode.fill(seed)
            reuse.run(decode.step)
        handle.pool.grow(6)
        decode.fill(5)
        assert reuse.run(decode.step).kind is not Kind.REPLAY
        assert decode.is_right()
        again = Stack(handle, rows=1)
        kinds = []
        for seed in range(4):
            again.fill(seed)
            kinds.append(reuse.run(again.step).kind)
            assert again.is_right()
        assert kinds[-1] is Kind.REPLAY


def test_a_step_says_its_groups_and_refuses_what_cannot_be(
    graphcore_driver: Driver, handle: AcceleratedModel
) -> None:
    x = torch.zeros(1, HIDDEN, device=handle.device)
    step = handle.step("one", lambda: None, tensors={"x": x}, rows=2)
    assert isinstance(step, CallableStep)
    assert [(use.group, use.rows, use.top_k) for use in step.groups] == [
        (name, 2, 2) for name in LAYERS
    ]
    assert all(use.admission is not None for use in step.groups)
    assert all(use.admission is None for use in handle.step("many", lambda: None,
               tensors={"x": x}, rows=3).groups)  # fmt: skip
    again = handle.step("one", lambda: None, tensors={"x": x}, rows=2)
    assert [each.ids for each in again.groups] == [each.ids for each in step.groups]
    with pytest.raises(ConfigurationError, match="tensors"):
        handle.step("none", lambda: None, tensors={}, rows=1)
    with graphcore.capture(driver=graphcore_driver) as captured:
        x.add_(1)
        with pytest.raises(CaptureError, match="binding a step: not while"):
            handle.step("new", lambda: None, tensors={"x": x}, rows=4)
    captured.graph.close()


def test_a_router_that_does_not_say_its_top_k_is_refused(graphcore_driver: Driver) -> None:
    model = make_moe(device=device_of(graphcore_driver))
    for layer in model.model.layers:
        layer.mlp.gate = _without_top_k(layer.mlp.gate)
    with accelerate(model, 4, driver=graphcore_driver) as handle:
        with pytest.raises(ConfigurationError, match="routers that say theirs"):
            handle.reuse()
        assert isinstance(handle.layers[LAYERS[0]], SlotExperts)


def _without_top_k(gate: Any) -> Any:
    class Gate(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner: Callable[..., Any] = gate

        def forward(self, hidden: torch.Tensor) -> Any:
            return self.inner(hidden)

    return Gate().eval()
