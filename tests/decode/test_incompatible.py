"""Every configuration that static caches and captured decode cannot serve has an error of its own.

The list is that of the systems this was built after: what makes the captured step impossible or
wrong there is refused here, by name, before anything is launched.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.decode_models import device_of, eager_tokens, make_model, make_prompt
from transformers import DynamicCache, StaticCache

import graphcore
from graphcore.decode import CUDAGraphAR, StaticKVCache, generate
from graphcore.driver import Driver
from graphcore.errors import (
    CacheTypeError,
    CapacityError,
    CaptureError,
    ConfigurationError,
    GraphcoreError,
    LifecycleError,
    OverwrittenOutputError,
    StaleGraphError,
)

SLOTS = 12
TOKENS = 5


@dataclass
class Scene:
    """A model with a runner that has forwarded a prompt."""

    driver: Driver
    model: Any
    prompt: torch.Tensor
    runner: CUDAGraphAR

    def other_runner(self, **options: Any) -> CUDAGraphAR:
        return CUDAGraphAR(self.model, **{"max_seq_len": SLOTS, "driver": self.driver, **options})

    def cache(self, **changes: Any) -> StaticKVCache:
        sizes = {"num_layers": 3, "batch_size": 1, "num_kv_heads": 2, "max_seq_len": SLOTS}
        more = {"head_dim": 16, "dtype": torch.float32, "device": self.prompt.device}
        return StaticKVCache(**{**sizes, **more, **changes})  # type: ignore[arg-type]


@pytest.fixture
def scene(graphcore_driver: Driver) -> Any:
    model = make_model(device=device_of(graphcore_driver))
    prompt = make_prompt(TOKENS, device=device_of(graphcore_driver))
    with CUDAGraphAR(model, max_seq_len=SLOTS, driver=graphcore_driver) as runner:
        runner.capture(prompt)
        yield Scene(graphcore_driver, model, prompt, runner)


Case = tuple[type[GraphcoreError], str, Callable[[Scene], object]]


def _without_cache(scene: Scene) -> None:
    scene.model.config.use_cache = False
    try:
        scene.other_runner()
    finally:
        scene.model.config.use_cache = True


def _in_training(scene: Scene) -> None:
    scene.model.train()
    for module in scene.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    try:
        scene.other_runner()
    finally:
        scene.model.eval()


def _checkpointing(scene: Scene) -> None:
    scene.model.model.gradient_checkpointing = True
    scene.model.train()
    try:
        scene.other_runner()
    finally:
        scene.model.eval()
        scene.model.model.gradient_checkpointing = False


def _beams_by_config(scene: Scene) -> None:
    scene.model.generation_config.num_beams = 4
    try:
        scene.other_runner()
    finally:
        scene.model.generation_config.num_beams = 1


def _past_the_end(scene: Scene) -> None:
    for _ in range(SLOTS):
        scene.runner.replay()


def _update_past_the_end(scene: Scene) -> None:
    states = torch.zeros(1, 2, SLOTS + 1, 16, device=scene.prompt.device)
    scene.cache().update(states, states, 0)


def _cast_keys(scene: Scene) -> None:
    scene.runner.cache.layers[1].keys = scene.runner.cache.layers[1].keys.half()
    scene.runner.replay()


def _quantised_values(scene: Scene) -> None:
    values = scene.runner.cache.layers[0].values
    scene.runner.cache.layers[0].values = values.to(torch.float8_e4m3fn)
    scene.runner.replay()


def _moved_position(scene: Scene) -> None:
    scene.runner.cache.position = scene.runner.cache.position.clone()
    scene.runner.replay()


def _fresh_cache_without_a_prompt(scene: Scene) -> None:
    scene.runner.use(scene.cache())
    scene.runner.replay()


def _stale_output(scene: Scene) -> None:
    scene.runner.replay()
    guard = scene.runner.guarded_token()
    scene.runner.replay()
    guard.get()


def _inside_a_capture(action: Callable[[Scene], object]) -> Callable[[Scene], object]:
    def run(scene: Scene) -> None:
        with graphcore.capture(driver=scene.driver):
            action(scene)

    return run


def _early_initialised(scene: Scene, **changes: Any) -> None:
    asked = {"batch_size": 1, "num_heads": 2, "head_dim": 16, "dtype": torch.float32}
    scene.cache().early_initialization(**{**asked, "device": scene.prompt.device, **changes})


cases: dict[str, Case] = {
    # the first system: a captured step over a static cache
    "use_cache=False": (ConfigurationError, "use_cache: expected True", _without_cache),
    "a DynamicCache": (
        CacheTypeError, "got a DynamicCache: it allocates new K/V",
        lambda scene: scene.other_runner(cache=DynamicCache(), max_seq_len=None),
    ),
    "a transformers StaticCache": (
        CacheTypeError, r"got a transformers StaticCache.*from_transformers\(cache, model\)",
        lambda scene: scene.other_runner(
            cache=StaticCache(config=scene.model.config, max_cache_len=8), max_seq_len=None
        ),
    ),
    "no cache at all": (
        CacheTypeError, "got dict, whose buffers are not static",
        lambda scene: scene.other_runner(cache={}, max_seq_len=None),
    ),
    "a prompt that is too long": (
        CapacityError, "a prompt of 14 tokens behind 5 held needs 19",
        lambda scene: scene.runner.capture(make_prompt(14, device=str(scene.prompt.device))),
    ),
    "more new tokens than fit": (
        CapacityError, "a prompt of 5 tokens and 8 new ones need 13; max_seq_len is 12",
        lambda scene: scene.runner.generate(scene.prompt, 8),
    ),
    "a replay past the end": (
        CapacityError, "12 are held; one more needs 13. Nothing was launched", _past_the_end,
    ),
    "an update past the end": (
        CapacityError, "13 more need 13. Nothing was written", _update_past_the_end,
    ),
    "positions that the model lacks": (
        ConfigurationError, "expected at most 64 .the model's max_position_embeddings., got 65",
        lambda scene: scene.other_runner(max_seq_len=65),
    ),
    "other heads in one layer": (
        ConfigurationError, r"cache num_kv_heads of layer 1: expected 2 \(the model's\), got 4",
        lambda scene: scene.other_runner(cache=scene.cache(num_kv_heads=[2, 4, 2])),
    ),
    "another head size in one layer": (
        ConfigurationError, "cache head_dim of layer 2: expected 16",
        lambda scene: scene.other_runner(cache=scene.cache(head_dim=[16, 16, 8])),
    ),
    "another number of layers": (
        ConfigurationError, "cache num_layers: expected 3",
        lambda scene: scene.other_runner(cache=scene.cache(num_layers=2)),
    ),
    "another batch": (
        ConfigurationError, r"input_ids: expected batch 1 .*got 2",
        lambda scene: scene.runner.generate(scene.prompt.expand(2, -1), 2),
    ),
    "keys cast after the capture": (StaleGraphError, "layer 1 keys.*float16", _cast_keys),
    "values quantised after the capture": (
        StaleGraphError, "layer 0 values.*float8", _quantised_values,
    ),
    "a position replaced after the capture": (
        StaleGraphError, "cache position.*another tensor", _moved_position,
    ),
    "a dtype that is not floating": (
        ConfigurationError, "dtype: expected a floating torch dtype, got torch.int8",
        lambda scene: scene.cache(dtype=torch.int8),
    ),
    "beam search in the call": (
        ConfigurationError, "^num_beams: expected 1, got 4: beam search",
        lambda scene: scene.runner.generate(scene.prompt, 2, num_beams=4),
    ),
    "beam search in the function": (
        ConfigurationError, "^num_beams: expected 1, got 3: beam search",
        lambda scene: generate(scene.model, scene.prompt, 2, num_beams=3),
    ),
    "beam search in the config": (
        ConfigurationError, "^generation_config.num_beams: expected 1", _beams_by_config,
    ),
    "rows reordered after the capture": (
        LifecycleError, "reorder_cache: refused, a captured graph uses this cache",
        lambda scene: scene.runner.cache.reorder_cache(torch.tensor([0])),
    ),
    "tokens cropped after the capture": (
        LifecycleError, "crop: refused, a captured graph uses this cache",
        lambda scene: scene.runner.cache.crop(-1),
    ),
    "training mode with dropout": (
        ConfigurationError, "training mode with active dropout: attention_dropout", _in_training,
    ),
    "gradient checkpointing": (
        ConfigurationError, "gradient checkpointing in training mode drops the cache",
        _checkpointing,
    ),
    "a batch of no rows": (
        ConfigurationError, "batch_size: expected a positive int, got 0",
        lambda scene: scene.cache(batch_size=0),
    ),
    # the second system: buffers that a graph depends on come to be outside of it
    "a cache made inside a capture": (
        CaptureError, "StaticKVCache: not while a graph is captured",
        _inside_a_capture(lambda scene: scene.cache()),
    ),
    "a runner made inside a capture": (
        CaptureError, "CUDAGraphAR: not while a graph is captured",
        _inside_a_capture(lambda scene: scene.other_runner()),
    ),
    "early initialisation inside a capture": (
        CaptureError, r"early_initialization\(\): not while a graph is captured",
        _inside_a_capture(
            lambda scene: scene.runner.cache.early_initialization(
                1, 2, 16, torch.float32, scene.prompt.device
            )
        ),
    ),
    "a reset inside a capture": (
        CaptureError, r"reset\(\): not while a graph is captured",
        _inside_a_capture(lambda scene: scene.runner.cache.reset()),
    ),
    "another cache inside a capture": (
        CaptureError, r"use\(\): not while a graph is captured",
        _inside_a_capture(lambda scene: scene.runner.use(scene.runner.cache)),
    ),
    "a second initialisation that differs": (
        ConfigurationError, "layer 0: initialised with .* buffers never change for life",
        lambda scene: _early_initialised(scene, head_dim=8),
    ),
    "a list that does not name each layer": (
        ConfigurationError, "num_heads: expected one value for each of 3 layers, got 2",
        lambda scene: _early_initialised(scene, num_heads=[2, 2]),
    ),
    "another cache and no prompt": (
        LifecycleError, "the runner was given another cache: expected a prompt",
        _fresh_cache_without_a_prompt,
    ),
    "an output read after the next run": (
        OverwrittenOutputError, "token: expected the output of", _stale_output,
    ),
    "more rows after the construction": (
        ConfigurationError, "batch_repeat_interleave: batch_size is fixed at 1",
        lambda scene: scene.runner.cache.batch_repeat_interleave(2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", cases)
def test_an_incompatible_configuration_has_its_own_error_and_harms_nothing(
    scene: Scene, name: str
) -> None:
    kind, message, act = cases[name]
    with pytest.raises(GraphcoreError, match=message) as caught:
        act(scene)
    assert type(caught.value) is kind
    builtin = {ConfigurationError: ValueError, CapacityError: ValueError, CacheTypeError: TypeError}
    assert isinstance(caught.value, builtin.get(kind, RuntimeError))
    others = [other for other in cases if other != name]
    claimed = [other for other in others if re.search(cases[other][1], str(caught.value))]
    assert claimed == []  # the error of no other configuration
    if kind is not StaleGraphError:  # those hold a buffer of another kind now
        expected = eager_tokens(scene.model, scene.prompt, 4)
        assert torch.equal(scene.runner.generate(scene.prompt, 4), expected)
