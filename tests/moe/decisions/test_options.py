"""What is switched on: who beats whom, which values there are, and when it is too late."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from graphcore import ConfigurationError, LifecycleError
from graphcore.moe.decisions.options import (
    NAMES,
    MoEOptions,
    OptionSetting,
    OptionSource,
    command_line_name,
    environment_name,
    resolve_options,
)

BOTH = ("decode_boundary_overlap", "decode_overlap")


def test_both_options_are_off_where_nothing_was_said() -> None:
    assert NAMES == BOTH
    found = resolve_options(environment={})
    assert found.options == MoEOptions(decode_boundary_overlap=False, decode_overlap=False)
    assert str(found) == "decode_boundary_overlap off (default), decode_overlap off (default)"


@pytest.mark.parametrize(
    ("option", "variable", "flag"),
    [
        (
            "decode_boundary_overlap",
            "GRAPHCORE_DECODE_BOUNDARY_OVERLAP",
            "--decode-boundary-overlap",
        ),
        ("decode_overlap", "GRAPHCORE_DECODE_OVERLAP", "--decode-overlap"),
    ],
    ids=BOTH,
)
def test_an_option_has_its_name_in_every_place(option: str, variable: str, flag: str) -> None:
    assert (environment_name(option), command_line_name(option)) == (variable, flag)


PLACES = (None, 0, 1)
SETTINGS = list(product(PLACES, PLACES, PLACES))


@pytest.mark.parametrize("option", BOTH)
@pytest.mark.parametrize(
    ("keyword", "command_line", "environment"),
    SETTINGS,
    ids=["-".join(map(str, each)) for each in SETTINGS],
)
def test_a_keyword_beats_the_command_line_and_that_the_environment(
    option: str, keyword: int | None, command_line: int | None, environment: int | None
) -> None:
    variables = {} if environment is None else {environment_name(option): str(environment)}
    found = resolve_options({option: keyword}, {option: command_line}, variables)
    said = [each for each in (keyword, command_line, environment) if each is not None]
    order = [OptionSource.KEYWORD, OptionSource.COMMAND_LINE, OptionSource.ENVIRONMENT]
    places = [
        source
        for source, value in zip(order, (keyword, command_line, environment), strict=True)
        if value is not None
    ]
    assert getattr(found.options, option) is bool(said[0] if said else 0)
    assert dict(found.sources)[option] is (places[0] if places else OptionSource.DEFAULT)
    other = BOTH[1 - BOTH.index(option)]
    assert getattr(found.options, other) is False


@pytest.mark.parametrize("value", [True, False, 0, 1], ids=repr)
def test_a_keyword_may_be_a_truth_value(value: Any) -> None:
    assert MoEOptions(decode_overlap=value).decode_overlap is bool(value)
    assert resolve_options({"decode_overlap": value}, {}, {}).options.decode_overlap is bool(value)


VALUES = [2, -1, 0.0, 1.0, "", "yes", "on", "2", " 1", "01", "true", [], b"1"]


@pytest.mark.parametrize("value", [*VALUES, "0", "1"], ids=repr)
def test_a_keyword_of_another_value_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="decode_overlap: expected 0 or 1, got"):
        resolve_options({"decode_overlap": value}, {}, {})
    with pytest.raises(ConfigurationError, match="decode_overlap: expected 0 or 1, got"):
        MoEOptions(decode_overlap=value)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_command_line_of_another_value_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="--decode-overlap: expected 0 or 1, got"):
        resolve_options({}, {"decode_overlap": value}, {})


@pytest.mark.parametrize(
    "value", [each for each in VALUES if isinstance(each, str) and each], ids=repr
)
def test_an_environment_of_another_value_is_refused_though_a_keyword_beats_it(value: str) -> None:
    with pytest.raises(ConfigurationError, match="GRAPHCORE_DECODE_OVERLAP: expected 0 or 1, got"):
        resolve_options({"decode_overlap": 1}, {}, {"GRAPHCORE_DECODE_OVERLAP": value})


def test_an_empty_variable_says_nothing() -> None:
    found = resolve_options({}, {}, {"GRAPHCORE_DECODE_OVERLAP": ""})
    assert dict(found.sources)["decode_overlap"] is OptionSource.DEFAULT


def test_the_environment_of_the_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHCORE_DECODE_BOUNDARY_OVERLAP", "1")
    monkeypatch.delenv("GRAPHCORE_DECODE_OVERLAP", raising=False)
    assert resolve_options().options == MoEOptions(decode_boundary_overlap=True)


@pytest.mark.parametrize(
    ("keywords", "command_line", "where"),
    [({"overlap": 1}, {}, "keyword"), ({}, {"overlap": 1}, "command line")],
    ids=["keyword", "command line"],
)
def test_an_unknown_option_is_refused(
    keywords: dict[str, int], command_line: dict[str, int], where: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"{where}: expected options .*'overlap'"):
        resolve_options(keywords, command_line, {})


ALL = [MoEOptions(*each) for each in product((False, True), repeat=2)]


@pytest.mark.parametrize("options", ALL, ids=repr)
@pytest.mark.parametrize("driver", ["cuda", "emulated", "hip", "cpu"])
def test_options_do_something_with_drivers_that_capture_and_say_why_not_elsewhere(
    options: MoEOptions, driver: str
) -> None:
    effective, reason = options.effective(driver)
    if driver in ("cuda", "emulated") or options == MoEOptions():
        assert (effective, reason) == (options, "")
    else:
        assert effective == MoEOptions()
        assert reason == f"backend: expected driver cuda or emulated, got {driver!r}"


# ---- when it is too late ------------------------------------------------------------------------


def test_options_are_set_until_the_first_step() -> None:
    setting = OptionSetting(MoEOptions())
    setting.set(decode_overlap=1)
    setting.set(decode_boundary_overlap=True)
    assert setting.options == MoEOptions(decode_boundary_overlap=True, decode_overlap=True)
    assert not setting.is_fixed
    setting.fix()
    setting.fix()
    assert setting.is_fixed
    with pytest.raises(LifecycleError, match=r"decode_overlap.* set after the first step"):
        setting.set(decode_overlap=0)
    assert setting.options == MoEOptions(decode_boundary_overlap=True, decode_overlap=True)


@pytest.mark.parametrize(
    "changes", [{"overlap": 1}, {"decode_overlap": 2}], ids=["unknown", "another value"]
)
def test_a_setting_that_cannot_work_changes_nothing(changes: dict[str, int]) -> None:
    setting = OptionSetting(MoEOptions())
    with pytest.raises(ConfigurationError, match=r"expected"):
        setting.set(decode_boundary_overlap=1, **changes)
    assert setting.options == MoEOptions()
