"""What is left of a layer on a rank, and what cannot be spread."""

from types import SimpleNamespace

import pytest
import torch

from graphcore.decode import transformers_sharding as sharding
from graphcore.errors import ConfigurationError
from graphcore.parallel import sharded_model


@pytest.fixture
def two_shards(monkeypatch):
    monkeypatch.setattr(sharding, "shards_of", lambda weight: 1 if weight is None else 2)


def attention(**projections):
    made = {
        name: SimpleNamespace(out_features=width, weight=torch.zeros(1))
        for name, width in projections.items()
    }
    return SimpleNamespace(layer_idx=4, **made)


def test_a_projection_over_two_ranks_gives_half_its_width_here(two_shards):
    assert sharding.features_here(attention(k_proj=64), "k_proj", 16) == 32
    assert sharding.features_here(attention(), "k_proj", 16) is None


def test_heads_that_two_ranks_cannot_share_are_refused_with_their_layer(two_shards):
    with pytest.raises(ConfigurationError, match="the 3 heads of k_proj in layer 4, got 2"):
        sharding.features_here(attention(k_proj=48), "k_proj", 16)


def test_k_and_v_in_one_sharded_projection_are_refused_by_name(two_shards):
    sharding.refuse_fused(attention(k_proj=64))
    with pytest.raises(ConfigurationError, match="qkv_proj over 2 ranks"):
        sharding.refuse_fused(attention(qkv_proj=96))


def model_of(parts, monkeypatch):
    monkeypatch.setattr(sharding, "ranks_of", lambda weight: parts)
    text = SimpleNamespace(num_attention_heads=4, num_key_value_heads=4)
    config = SimpleNamespace(get_text_config=lambda decoder: text)
    return SimpleNamespace(config=config, parameters=lambda: [torch.zeros(1)])


@pytest.mark.parametrize(
    ("parts", "text"), [(None, "got whole weights"), (4, r"over 2 ranks, got \[4\]")]
)
def test_a_model_that_is_not_spread_over_just_these_ranks_is_refused(parts, text, monkeypatch):
    with pytest.raises(ConfigurationError, match=text):
        sharded_model.check_sharded(model_of(parts, monkeypatch), SimpleNamespace(size=2))


def test_a_model_that_is_spread_over_these_ranks_passes(monkeypatch):
    sharded_model.check_sharded(model_of(2, monkeypatch), SimpleNamespace(size=2))
