"""Plans of steps by their sizes: shared, bounded, with one form for parts of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graphcore_kernels import RoutePolicy
from helpers.moe_models import counted_calls

from graphcore.driver import Driver
from graphcore.errors import ConfigurationError
from graphcore.moe.layers.product_options import ProductOptions
from graphcore.moe.layers.products_plan import MOST_PLANS, ProductsPlans, ProductsSizes

SIZES = ProductsSizes(
    experts=8, slots=4, hidden=64, inner=32, dtype="float32", options=ProductOptions(),
    rows=2, top_k=2,
)  # fmt: skip


@pytest.fixture
def plans(graphcore_driver: Driver) -> ProductsPlans:
    return ProductsPlans(graphcore_driver, RoutePolicy())


def test_equal_sizes_have_one_plan_and_each_size_has_its_own(plans: ProductsPlans) -> None:
    plan = plans.find(SIZES)
    assert plans.find(replace(SIZES)) is plan
    assert plans.find(replace(SIZES, rows=1)) is not plan
    assert plans.find(replace(SIZES, weights="bfloat16")) is not plan


def test_of_many_sizes_the_oldest_plan_goes(plans: ProductsPlans) -> None:
    first = plans.find(SIZES)
    for rows in range(3, 3 + MOST_PLANS):
        plans.find(replace(SIZES, rows=rows, slots=8))
    assert len(plans._plans) == MOST_PLANS
    assert plans.find(SIZES) is not first


def test_a_plan_allocates_and_launches_nothing(plans: ProductsPlans) -> None:
    with counted_calls(plans.driver) as calls:
        plans.find(SIZES)
    assert calls["function"], "its kernels are loaded"
    assert not {"alloc", "alloc_pinned", "launch", "synchronize", "write"} & set(calls)


@pytest.mark.parametrize(
    ("rows", "slots", "fits", "most"),
    [(2, 4, True, 2), (3, 4, False, 2), (50, 8, True, 4), (1, 1, False, 0)],
    ids=["as many", "one more", "all experts", "less than a row"],
)
def test_a_step_fits_where_every_route_has_a_slot(
    rows: int, slots: int, fits: bool, most: int
) -> None:
    sizes = replace(SIZES, rows=rows, slots=slots)
    assert (sizes.fits, sizes.most_rows) == (fits, most)


def test_parts_of_a_step_have_its_forms_where_alone_they_would_have_others(
    plans: ProductsPlans,
) -> None:
    whole, alone = replace(SIZES, rows=200, slots=8), replace(SIZES, rows=2, slots=8)
    part = plans.find(whole.part(2, plans.driver.device_info().capability))
    assert part.sizes.rows == 2
    assert part.form == plans.find(whole).form != plans.find(alone).form


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden": 62}, "multiple"),
        ({"experts": 513, "slots": 513}, "experts"),
        ({"dtype": "float64"}, "x.dtype"),
        ({"options": ProductOptions(gate_up="both")}, "gate_up"),
        ({"options": ProductOptions(activation=None)}, "activation"),
        ({"options": ProductOptions(precision="half")}, "precision"),
        ({"ids": "int16"}, "ids"),
        ({"weights": "float64"}, "weights.dtype"),
    ],
    ids=["hidden", "experts", "type", "gate and up", "activation", "precision", "ids", "weights"],
)
def test_sizes_that_no_kernel_takes_are_refused(
    plans: ProductsPlans, changed: dict, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plans.find(replace(SIZES, **changed))
