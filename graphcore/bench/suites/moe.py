"""Suite moe: tokens a second with 25, 50 and 100 % of the experts resident, prompts in between.

Ours is GraphReuse with each setting of its options; the floor are graphs of the same steps launched
without a question; peers are the same model without graphs, and transformers with all experts on
the device. Notes: the share of replays, what boundaries cost the host, by kind, and hits.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
import transformers

from graphcore.bench.harness import Effort, measure
from graphcore.bench.replays import torch_device
from graphcore.bench.results import Row, row_of
from graphcore.bench.suites import Measured, Request
from graphcore.bench.suites.moe_conversation import Conversation, Way, logits_of, requests_arm
from graphcore.bench.suites.moe_ways import DirectWay, GraphWay, ReuseWay, Steps
from graphcore.driver import Driver, Stream
from graphcore.errors import ConfigurationError, GraphcoreError
from graphcore.moe import AcceleratedModel, StepSeconds, accelerate

Note = Mapping[str, Any]

SHARES = (25, 50, 100)
OPTIONS: Mapping[str, Mapping[str, int]] = {
    "off": {},
    "boundary": {"decode_boundary_overlap": 1},
    "overlap": {"decode_overlap": 1},
    "both": {"decode_boundary_overlap": 1, "decode_overlap": 1},
}
EAGER = "same model eager"
EXPERTS = ("batched_mm", "grouped_mm")
PEERS = (EAGER, *(f"transformers {name}" for name in EXPERTS))

_QWEN3_MOE = {
    "hidden_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "vocab_size": 32000,
    "initializer_range": 0.04,  # random models like to repeat one token
}
_TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "vocab_size": 97,
    "initializer_range": 0.2,
}
_REQUESTS, _TOKENS, _LENGTH, _CAPACITY = 6, 16, 32, 64
_TINY_TOKENS, _TINY_LENGTH = 4, 5
_CHECKED = 5  # requests: they warm up, capture, and write elsewhere
_WRONG = 1e-2


def cases() -> list[str]:
    """Stable names of all rows."""
    return [_case(share, name) for share in SHARES for name in OPTIONS]


def run(driver: Driver, request: Request) -> Measured:
    """Measures the cases asked for; on the emulated driver a tiny model, whose times mean nothing.

    Raises:
        ConfigurationError: A peer to leave out, or a case, that is none; no peer is left.
        GraphcoreError: A way decodes something else than the model without graphs.
    """
    request.check_peers(PEERS)
    request.check_cases(cases())
    start = time.perf_counter()
    with driver.stream(blocking=True) as stream:
        suite = _Suite(driver, stream, request)
        for share in SHARES:
            wanted = [name for name in OPTIONS if request.wants(_case(share, name))]
            if wanted:
                suite.measure(share, wanted)
    suite.note("wall time of the suite", "s", time.perf_counter() - start)
    return Measured(suite.rows, suite.notes)


class _Suite:
    """The model, what it says without graphs, and what was measured so far."""

    def __init__(self, driver: Driver, stream: Stream, request: Request) -> None:
        self.driver, self.stream, self.request = driver, stream, request
        tiny, device = driver.is_emulated, torch_device(driver)
        torch.manual_seed(41)
        sizes: Any = _TINY if tiny else _QWEN3_MOE
        config = transformers.Qwen3MoeConfig(
            **sizes, norm_topk_prob=True, bos_token_id=1, eos_token_id=None, pad_token_id=None
        )
        dtype = torch.float32 if tiny else torch.bfloat16
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        self.model = model.eval()
        self.model.set_experts_implementation(EXPERTS[0])
        length = _TINY_LENGTH if tiny else _LENGTH
        prompts = torch.randint(3, config.vocab_size, (_REQUESTS, length), device=device)
        tokens = _TINY_TOKENS if tiny else _TOKENS
        self.whole = copy.deepcopy(self.model)  # its experts stay where they are
        self.talk, self.their_talk = (
            Conversation(each, prompts, tokens, _CAPACITY) for each in (self.model, self.whole)
        )
        way = self._transformers(EXPERTS[0])
        self.theirs = logits_of(way, self.their_talk, range(2), driver)
        self.rows: list[Row] = []
        self.notes: list[Note] = [
            {"about": f"a request: {length} tokens of a prompt, {tokens} new ones, which every "
             "second request writes elsewhere than the one before"}
        ]  # fmt: skip
        self._truth: Any = None

    def measure(self, share: int, wanted: list[str]) -> None:
        """All rows of one number of slots, in the same rounds."""
        slots = self.model.config.num_experts * share // 100
        with accelerate(self.model, slots, driver=self.driver) as handle:
            ours = self._rows(share, wanted, handle)
            self.note(f"slots={share}%: hits", "%", 100 * handle.hit_rate)
            self.note(f"slots={share}%: slots", "MiB", handle.pool.nbytes / 2**20)
            for way in ours:
                self._tell(way)
                way.close()

    def _rows(self, share: int, wanted: list[str], handle: AcceleratedModel) -> list[ReuseWay]:
        talk, driver, stream = self.talk, self.driver, self.stream
        eager = DirectWay(EAGER, talk, driver, stream)
        peers = self._peers(eager)
        floor = GraphWay(talk, Steps(talk, handle).fits_prompts, driver, stream)
        if floor.obstacle:
            self.notes.append({"left out": f"slots={share}% prompts", "reason": floor.obstacle})
        ours = [
            ReuseWay(_case(share, name), talk, handle, stream, OPTIONS[name], floor.obstacle)
            for name in wanted
        ]
        checked: list[Way] = [eager, floor, *ours]
        errors = {way.name: self._error(way, eager) for way in checked}
        _check(handle)
        arms = [requests_arm(way, talk.tokens, driver) for way in checked if way is not eager]
        arms += [requests_arm(way, talk.tokens, driver, share=2) for way in peers]
        timings = measure(arms, self._effort(), driver.synchronize)
        _check(handle)
        floor.close()
        self.rows += [
            row_of(
                way.name,
                timings,
                ours=way.name,
                floor=floor.name,
                peers=[peer.name for peer in peers],
                allowance=0.0,
                unit="tokens/s",
                error=errors[way.name],
            )
            for way in ours
        ]
        return ours

    def note(self, what: str, unit: str, value: float) -> None:
        """A figure beside the rows."""
        self.notes.append({"case": what, "unit": unit, "ours": round(value, 2)})

    # ---- ways ----------------------------------------------------------------------------------

    def _peers(self, eager: Way) -> list[Way]:
        known = [eager, *(self._transformers(name) for name in EXPERTS)]
        left = [way for way in known if way.name not in self.request.without]
        if not left:
            raise ConfigurationError("peers: expected at least one, got none")
        return left

    def _transformers(self, implementation: str) -> Way:
        """The model with its own experts, computed that way."""
        return _Transformers(self.whole, implementation, self.their_talk, self.driver, self.stream)

    def _effort(self) -> Effort:
        if self.driver.is_emulated:
            return Effort(rounds=1, bursts=1, calls=self.talk.tokens)
        return Effort(rounds=self.request.rounds, bursts=1, calls=2 * self.talk.tokens)

    # ---- checks and notes ----------------------------------------------------------------------

    def _error(self, way: Way, eager: Way) -> float:
        """Largest difference of logits from the model without graphs, over the largest; 0: none.

        Raises:
            GraphcoreError: It is so large that something else was computed.
        """
        if self._truth is None:
            self._truth = logits_of(eager, self.talk, range(_CHECKED), self.driver)
            first = self._truth[:2, 0], self.theirs[:, 0]
            self.note("logits of prompts against transformers", "", _difference(*first))
        found = logits_of(way, self.talk, range(_CHECKED), self.driver)
        error = _difference(found, self._truth)
        if not error <= _WRONG:
            raise GraphcoreError(
                f"bench moe: arm {way.name}: expected the logits of the model without graphs, got "
                f"a difference of {error:g}"
            )
        return error

    def _tell(self, way: ReuseWay) -> None:
        """Replays, and what boundaries cost the host, of all that ``way`` ran."""
        counters = way.reuse.counters
        self.note(f"{way.name}: replays", "%", 100 * counters.replays / counters.calls)
        for kind, total in way.reuse.totals.items():
            each = total.seconds.total / max(1, total.calls)
            self.note(f"{way.name}: {kind.value}, {total.calls} calls, host", "us", each * 1e6)
        by_kind: dict[str, list[StepSeconds]] = {}
        for result in way.boundaries:
            by_kind.setdefault(result.kind.value, []).append(result.seconds)
        for name, seconds in by_kind.items():
            what = f"{way.name}: boundary by {name}, {len(seconds)} of {len(way.boundaries)}"
            self.note(f"{what}, host", "us", median(each.total for each in seconds) * 1e6)
            if any(each.capture for each in seconds):
                beyond = median(each.total - each.capture for each in seconds)
                self.note(f"{what}, host beyond its capture", "us", beyond * 1e6)


class _Transformers:
    """Requests by a model with its own experts, by one of their ways."""

    def __init__(
        self, model: Any, implementation: str, talk: Conversation, driver: Driver, stream: Stream
    ) -> None:
        self.name = f"transformers {implementation}"
        self._model, self._implementation = model, implementation
        self._way = DirectWay(self.name, talk, driver, stream)

    def request(self, number: int, *look: Any) -> None:
        self._model.set_experts_implementation(self._implementation)
        self._way.request(number, *look)


def _check(handle: AcceleratedModel) -> None:
    """Raises GraphcoreError where a step was refused on the device, or a product went wrong."""
    faults: dict[str, Any] = dict(handle.faults())
    for name, layer in handle.layers.items():
        fault = layer.products.fault()
        if fault is not None:
            faults.setdefault(name, fault)
    if faults:
        raise GraphcoreError(f"bench moe: expected steps without faults, got {faults}")


def _case(share: int, options: str) -> str:
    return f"slots={share}% options={options}"


def _difference(found: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest, over the largest of the truth; infinite where something is NaN."""
    if not bool(torch.isfinite(found).all()):
        return float("inf")
    return float((found.float() - truth.float()).abs().max() / truth.float().abs().max())
