"""Acceptance with a whole model: decode and prompts in turns for long, in all settings, bit-equal.

Qwen3-MoE's own shape on a device, in two layers, and Mixtral's in one; small ones without. Without
the mark ``slow`` the runs are short.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers.moe_models import causal_mask, device_of
from helpers.moe_shaped import make_mixtral_shaped, make_prompt, make_shaped

from graphcore.decode import CUDAGraphAR
from graphcore.driver import Driver
from graphcore.moe import (
    AcceleratedModel,
    GraphReuse,
    Kind,
    Namespace,
    RowSemantics,
    Way,
    accelerate,
)

SETTINGS = [
    {"decode_boundary_overlap": boundary, "decode_overlap": overlap}
    for boundary, overlap in itertools.product((0, 1), (0, 1))
]
PROMPT_ROWS = 21
LONG = (pytest.mark.slow, pytest.mark.lengthy)
LENGTHS = [pytest.param(34, id="short"), pytest.param(2000, id="long", marks=LONG)]


class Rows:
    """The layers of a model over static rows; the output moves between two places."""

    def __init__(self, handle: AcceleratedModel, rows: int) -> None:
        self.handle, self.rows = handle, rows
        hidden = handle.model.config.hidden_size
        self.x = torch.zeros(1, rows, hidden, device=handle.device, dtype=torch.bfloat16)
        self.places = [torch.full_like(self.x, float("nan")) for _ in range(2)]
        self.mask = causal_mask(rows, self.x)
        self.step = handle.step(
            "layers", self.run, tensors={"x": self.x, "out": self.places[0]}, rows=rows
        )

    @property
    def out(self) -> torch.Tensor:
        return self.places[0]

    def move(self) -> None:
        """A decode boundary: what follows writes elsewhere."""
        self.places.reverse()
        self.step.set("out", self.places[0])

    def run(self) -> None:
        self.out.copy_(self.eagerly())

    def eagerly(self) -> torch.Tensor:
        with torch.no_grad():
            out: torch.Tensor = self.handle.model.model(
                inputs_embeds=self.x, attention_mask=self.mask, use_cache=False
            ).last_hidden_state
            return out

    def fill(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        values = torch.randn(self.x.shape, generator=draw)
        self.x.copy_(values.to(torch.bfloat16))
        for place in self.places:
            place.fill_(float("nan"))

    def is_right(self) -> bool:
        self.handle.driver.synchronize()
        return torch.equal(self.out, self.eagerly())


@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("share", [4, 1], ids=["a quarter resident", "all resident"])
@pytest.mark.parametrize("setting", SETTINGS, ids=["off", "overlap", "boundary", "both"])
def test_decode_and_prompts_in_turns_are_the_layers_own_bits(
    graphcore_driver: Driver, setting: dict[str, int], share: int, steps: int
) -> None:
    """Every 16th step a prompt, every 10th a boundary; off and on give the same bits."""
    model = make_shaped(graphcore_driver)
    take_turns(graphcore_driver, model, model.config.num_experts // share, setting, share, steps)


@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("share", [4, 1], ids=["a quarter resident", "all resident"])
@pytest.mark.parametrize("setting", [SETTINGS[0], SETTINGS[-1]], ids=["off", "both"])
def test_layers_of_mixtrals_shape_take_turns_with_their_own_bits_too(
    graphcore_driver: Driver, setting: dict[str, int], share: int, steps: int
) -> None:
    model = make_mixtral_shaped(graphcore_driver)
    slots = model.config.num_local_experts // share
    take_turns(graphcore_driver, model, slots, setting, share, steps)


def take_turns(
    driver: Driver, model: Any, slots: int, setting: dict[str, int], share: int, steps: int
) -> None:
    """Decode steps and prompts, each held to the layers without a graph."""
    with (
        accelerate(model, slots, driver=driver) as handle,
        handle.reuse(**setting) as reuse,
    ):
        decode, prompt = Rows(handle, 1), Rows(handle, PROMPT_ROWS)
        for step in range(steps):
            if step % 10 == 9:
                decode.move()
            decode.fill(step)
            reuse.run(decode.step)
            assert decode.is_right(), step
            if step % 16 == 15:
                prompt.fill(step)
                result = reuse.run(prompt.step, prompt_rows=PROMPT_ROWS)
                assert (result.way is Way.STAGED) == (share > 1)
                assert prompt.is_right(), step
        counters = reuse.counters
        assert handle.faults() == {}
        assert counters.failed == counters.reinstantiations == 0
        assert counters.replays > steps // 2
        assert (counters.updates > 0) == bool(setting["decode_boundary_overlap"])
        prompts = 1 if share == 1 else 0
        if setting["decode_boundary_overlap"]:
            assert counters.captures == 1 + prompts, "boundaries are updates"


@pytest.mark.parametrize(
    "rounds",
    [pytest.param(6, id="short"), pytest.param(1000, id="long", marks=LONG)],
)
def test_rounds_of_draft_verification_decode_and_prompt_capture_each_variant_once(
    graphcore_driver: Driver, rounds: int
) -> None:
    model = make_shaped(graphcore_driver)
    experts = model.config.num_experts
    with (
        accelerate(model, experts, driver=graphcore_driver) as handle,
        handle.reuse() as reuse,
    ):
        decode, verify, prompt = Rows(handle, 1), Rows(handle, 4), Rows(handle, PROMPT_ROWS)
        for number in range(rounds):
            for rows, options in (
                (decode, {"certificate": _draft(reuse, decode)}),
                (verify, {"certificate": _verification(reuse, verify)}),
                (decode, {}),
                (prompt, {"prompt_rows": PROMPT_ROWS}),
            ):
                rows.fill(number)
                result = reuse.run(rows.step, **options)
                assert rows.is_right(), number
                assert (result.kind is Kind.REPLAY) == (number > 1), (number, result)
        assert reuse.counters.captures == 4
        assert len(reuse.cache) == 4
        assert not reuse.departures


def _draft(reuse: GraphReuse, rows: Rows) -> Any:
    return reuse.certificate(
        rows.step,
        namespace=Namespace.DRAFT,
        row_semantics=RowSemantics.SEQUENTIAL,
        required=True,
    )


def _verification(reuse: GraphReuse, rows: Rows) -> Any:
    return reuse.certificate(
        rows.step, row_semantics=RowSemantics.SPECULATIVE, sequences=1, required=True
    )


@pytest.mark.parametrize(
    "tokens",
    [pytest.param(60, id="short"), pytest.param(4096, id="long", marks=LONG)],
)
def test_a_long_generation_is_bit_equal_with_a_graph_and_without(
    graphcore_driver: Driver, tokens: int
) -> None:
    """Ids of a whole generation, and the logits behind its last token.

    Attention is transformers' own arithmetic: torch's fused one gives other bits at each call on a
    device once some hundred keys are read, with a graph and without.
    """
    model = make_shaped(graphcore_driver)
    model.set_attn_implementation("eager")
    model.config.max_position_embeddings = tokens + 32
    prompt = make_prompt(graphcore_driver, 9, seed=6)
    found = []
    with accelerate(model, model.config.num_experts // 4, driver=graphcore_driver) as handle:
        for capture in (True, False):
            with CUDAGraphAR(
                model, max_seq_len=tokens + 16, driver=graphcore_driver, capture=capture
            ) as runner:
                ids = runner.generate(prompt, tokens)
                found.append((ids, runner.logits.clone()))
        assert handle.faults() == {}
    assert found[0][0].shape == (1, 9 + tokens)
    assert str(found[0][0].device) == device_of(graphcore_driver)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
