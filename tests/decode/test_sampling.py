"""Sampling: what a description takes, and what it takes from a generation config."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
from helpers.decode_models import make_model

from graphcore.decode import CUDAGraphAR, Sampling
from graphcore.decode.generation_settings import _neutral
from graphcore.errors import ConfigurationError


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


@pytest.fixture(autouse=True)
def unset(model: Any) -> None:
    """Every test begins with a generation config that says nothing."""
    model.generation_config = type(model.generation_config)()


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("temperature", -0.1, "a finite number of at least 0"),
        ("temperature", math.inf, "a finite number of at least 0"),
        ("temperature", math.nan, "a finite number of at least 0"),
        ("temperature", "hot", "a finite number of at least 0"),
        ("temperature", True, "a finite number of at least 0"),
        ("top_k", -1, "an int, 0"),
        ("top_k", 5.0, "an int, 0"),
        ("top_k", True, "an int, 0"),
        ("top_p", -0.1, "a finite number from 0 to 1"),
        ("top_p", 1.5, "a finite number from 0 to 1"),
        ("top_p", None, "a finite number from 0 to 1"),
        ("min_p", 1.01, "a finite number from 0 to 1"),
        ("min_p", math.nan, "a finite number from 0 to 1"),
        ("repetition_penalty", 0, "a number above 0"),
        ("repetition_penalty", -1.0, "a finite number of at least 0"),
        ("repetition_penalty", math.inf, "a finite number of at least 0"),
        ("seed", 2**64, "an int from"),
        ("seed", -(2**63) - 1, "an int from"),
        ("seed", 1.5, "an int from"),
        ("seed", True, "an int from"),
    ],
    ids=lambda value: str(value).replace(" ", "-"),
)
def test_a_value_out_of_range_is_refused_with_field_expected_and_actual(
    field: str, value: Any, expected: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Sampling(**{field: value})
    assert str(caught.value).startswith(f"{field}: expected {expected}")
    assert str(caught.value).endswith(f"got {value!r}")


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0},
        {"temperature": 1e-30},
        {"top_k": 10**9},
        {"top_p": 0},
        {"top_p": 1},
        {"min_p": 1},
        {"repetition_penalty": 0.5},
        {"seed": 2**64 - 1},
        {"seed": -(2**63)},
    ],
    ids=str,
)
def test_the_ends_of_the_ranges_are_taken(values: dict[str, Any]) -> None:
    ((field, value),) = values.items()
    assert getattr(Sampling(**values), field) == value


def test_only_temperature_zero_is_greedy() -> None:
    assert Sampling() == Sampling.greedy()
    assert Sampling(repetition_penalty=1.2, seed=3).is_greedy
    assert not Sampling(temperature=0.01).is_greedy
    assert not Sampling(temperature=1.0, top_k=1).is_greedy


# ---- the generation config ----------------------------------------------------------------------


def test_a_generation_config_that_says_nothing_is_greedy(model: Any) -> None:
    assert Sampling.from_generation_config(model) == Sampling.greedy()
    assert Sampling.from_generation_config(object()) == Sampling.greedy()


def test_do_sample_takes_transformers_defaults_for_what_is_not_set(model: Any) -> None:
    model.generation_config.do_sample = True
    assert Sampling.from_generation_config(model, seed=4) == Sampling(
        temperature=1.0, top_k=50, seed=4
    )


def test_every_setting_of_the_generation_config_is_taken(model: Any) -> None:
    settings = {
        "temperature": 0.7,
        "top_k": 0,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
    }
    for name, value in {"do_sample": True, **settings}.items():
        setattr(model.generation_config, name, value)
    assert Sampling.from_generation_config(model) == Sampling(**settings)


def test_without_do_sample_only_the_penalty_counts(model: Any) -> None:
    for name, value in {"temperature": 0.7, "top_k": 9, "repetition_penalty": 1.1}.items():
        setattr(model.generation_config, name, value)
    assert Sampling.from_generation_config(model) == Sampling(repetition_penalty=1.1)


def test_a_setting_out_of_range_is_refused_by_its_name(model: Any) -> None:
    model.generation_config.do_sample = True
    model.generation_config.top_p = 1.5
    with pytest.raises(ConfigurationError, match="top_p: expected"):
        Sampling.from_generation_config(model)


@pytest.mark.parametrize("name", ["do_sample", "repetition_penalty"])
def test_a_greedy_runner_says_at_info_which_sampling_it_does_not_follow(
    model: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    value = {"do_sample": True, "repetition_penalty": 1.3}[name]
    setattr(model.generation_config, name, value)
    with caplog.at_level(logging.INFO, logger="graphcore"):
        CUDAGraphAR(model, max_seq_len=16).close()
        assert f"generation_config.{name}={value} is not followed" in caplog.text
        assert "Sampling.from_generation_config(model) follows it" in caplog.text
        caplog.clear()
        CUDAGraphAR(model, max_seq_len=16, sampling=Sampling.from_generation_config(model)).close()
    assert "is not followed" not in caplog.text


def test_a_runner_says_at_info_which_other_settings_it_does_not_follow(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    unfollowed = {"no_repeat_ngram_size": 3, "suppress_tokens": [5], "typical_p": 0.5}
    for name, value in unfollowed.items():
        setattr(model.generation_config, name, value)
    with caplog.at_level(logging.INFO, logger="graphcore"):
        CUDAGraphAR(model, max_seq_len=16, sampling=Sampling(temperature=1.0)).close()
    for name, value in unfollowed.items():
        assert f"generation_config.{name}={value} is not followed" in caplog.text
    assert caplog.text.count("is not followed") == len(unfollowed)


def test_transformers_own_defaults_are_among_the_values_that_change_nothing(model: Any) -> None:
    defaults = model.generation_config._get_default_generation_params()
    named = {name: defaults[name] for name in _neutral if name in defaults}
    assert len(named) > 10
    assert [name for name, value in named.items() if value not in _neutral[name]] == []


def test_greedy_says_at_info_which_settings_have_no_effect(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="graphcore"):
        CUDAGraphAR(model, max_seq_len=16, sampling=Sampling(top_k=50, seed=1)).close()
        assert "sampling.top_k=50 has no effect: temperature 0 is greedy" in caplog.text
        assert "sampling.seed=1 has no effect" in caplog.text
        caplog.clear()
        CUDAGraphAR(model, max_seq_len=16, sampling=Sampling(repetition_penalty=1.2)).close()
    assert "has no effect" not in caplog.text
