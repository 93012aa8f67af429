"""What is read from a model's configuration, however versions of transformers write it."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.decode_models import ARCHITECTURES, make_model

import graphcore.decode
from graphcore.decode import StaticKVCache, decoder_stack
from graphcore.decode import transformers_compat as compat
from graphcore.decode.transformers_compat import LayerShape


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_shapes_come_out_as_the_projections_have_them(architecture: str) -> None:
    model = make_model(architecture)
    heads, size = {"qwen3": (2, 24), "gpt2": (4, 16)}.get(architecture, (2, 16))
    assert compat.layer_shapes(model) == [LayerShape(heads, size, size)] * 3
    assert compat.cache_keyword(model) in ("cache", "past_key_values")
    assert compat.owning_layers(model.config) == (0, 1, 2)
    assert {kind for kind, _ in compat.layer_kinds(model.config)} == {"full_attention"}


def config_of(**fields: Any) -> Any:
    """A configuration of a version that keeps no view per layer."""
    return SimpleNamespace(
        **({"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64} | fields)
    )


@pytest.mark.parametrize(
    ("fields", "owners"),
    [
        ({}, (0, 1, 2)),
        ({"num_kv_shared_layers": 1}, (0, 1)),
        ({"kv_sharing_modes": ["own", "own", "reuse"]}, (0, 1)),
        ({"kv_sharing_modes": None, "num_kv_shared_layers": 2}, (0,)),
    ],
    ids=str,
)
def test_layers_that_share_k_and_v_are_left_out(
    fields: dict[str, Any], owners: tuple[int, ...]
) -> None:
    assert compat.owning_layers(config_of(**fields)) == owners


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({}, [("full_attention", None)] * 3),
        ({"sliding_window": 8}, [("sliding_attention", 8)] * 3),
        (
            {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention", "moe"]},
            [("full_attention", None), ("sliding_attention", 8), ("moe", None)],
        ),
    ],
    ids=str,
)
def test_kinds_and_windows_come_layer_by_layer(fields: dict[str, Any], kinds: list[Any]) -> None:
    assert compat.layer_kinds(config_of(**fields)) == kinds


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({}, LayerShape(4, 16, 16)),
        ({"num_key_value_heads": 2}, LayerShape(2, 16, 16)),
        ({"num_key_value_heads": None, "head_dim": 24}, LayerShape(4, 24, 24)),
    ],
    ids=str,
)
def test_shapes_come_from_the_configuration_where_no_projection_shows_them(
    fields: dict[str, Any], shape: LayerShape
) -> None:
    config = config_of(**fields)
    config.get_text_config = lambda decoder: config
    model = torch.nn.Linear(2, 2)
    model.config = config  # type: ignore[assignment]
    assert compat.layer_shapes(model) == [shape] * 3


def test_a_model_that_does_not_list_its_layers_has_none_to_name() -> None:
    model = make_model()
    assert [layer.self_attn.layer_idx for layer in decoder_stack.decoder_layers(model)] == [0, 1, 2]
    model.model.layers = None
    assert decoder_stack.decoder_layers(model) == []


def test_a_value_head_of_another_width_is_seen() -> None:
    model = make_model()
    model.model.layers[2].self_attn.v_proj = torch.nn.Linear(64, 16)
    assert compat.layer_shapes(model)[2] == LayerShape(2, 16, 8)
    model.model.layers[2].self_attn.v_proj = torch.nn.Linear(64, 17)  # not one width per head
    assert compat.layer_shapes(model)[2] == LayerShape(2, 16, 16)


def test_a_cache_for_a_model_that_shares_k_and_v_has_no_buffers_where_it_needs_none() -> None:
    model = make_model()
    model.config.num_kv_shared_layers = 1
    cache = StaticKVCache.for_model(model, 8)
    assert cache.owning_layers == (0, 1)
    assert cache.layers[2].keys is None
    whole = StaticKVCache(3, 1, 2, 8, 16, torch.float32, "cpu")
    whole.bind_model(model)
    states = torch.zeros(1, 2, 1, 16)
    whole.update(states, states, 1)
    assert whole.seen_tokens == 1  # the last owner is layer 1


def test_a_logits_argument_that_a_model_lacks_is_not_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, Any] = {}

    class Old:
        def forward(
            self, input_ids: Any, position_ids: Any, attention_mask: Any, past_key_values: Any
        ) -> None:
            """Only its signature is read."""

        def __call__(self, **arguments: Any) -> Any:
            seen.update(arguments)
            return SimpleNamespace(logits=torch.arange(6).view(1, 2, 3))

    logits = compat.forward_logits(
        Old(), torch.zeros(1, 2), position_ids=torch.zeros(1, 2), mask=torch.ones(1), cache="mine"
    )
    assert logits.tolist() == [[3, 4, 5]]
    assert seen["past_key_values"] == "mine"
    assert "logits_to_keep" not in seen


def test_without_transformers_the_names_say_what_to_install() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import graphcore.decode\n"
        "try:\n    graphcore.decode.StaticKVCache\n"
        "except ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'graphcore-cuda[transformers]'" in done.stdout


def test_importing_the_package_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, graphcore.decode; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_package_offers_its_public_names_and_no_others() -> None:
    assert dir(graphcore.decode) == sorted(graphcore.decode.__all__)
    for name in graphcore.decode.__all__:
        assert getattr(graphcore.decode, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'DynamicCache'"):
        graphcore.decode.DynamicCache  # noqa: B018
