"""Real events for the events of a plan: given by name, or made and owned by who asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from graphcore.driver import Driver, Event
from graphcore.errors import PlanError
from graphcore.interop.drivers import same_driver

if TYPE_CHECKING:
    from graphcore.plan.plan import GraphPlan


def check_events(plan: GraphPlan, events: Any, driver: Driver) -> dict[str, Event]:
    """The events that were given for a plan and the plans in it, checked.

    Raises:
        PlanError: No mapping, a name that no plan knows, an external event that is not given, or
            an event that is none of the driver.
    """
    given = {} if events is None else events
    if not isinstance(given, Mapping):
        raise PlanError(f"events: expected a mapping of name -> Event, got {type(given).__name__}")
    registries = plan._registry.reached()
    known = {name: event for one in registries for name, event in one.events.items()}
    unknown = [name for name in given if name not in known]
    if unknown:
        raise PlanError(f"events: expected events of the plan {sorted(known)}, got {unknown} too")
    for name, event in known.items():
        if event.external and name not in given:
            raise PlanError(f"events[{name!r}]: expected an Event, as the plan's is external")
    for name, event in given.items():
        if not isinstance(event, Event) or not same_driver(event.driver, driver):
            kind = "one of another driver" if isinstance(event, Event) else type(event).__name__
            raise PlanError(
                f"events[{name!r}]: expected an event of driver {driver.name}:{driver.device} "
                f"(driver.event()), got {kind}"
            )
    return dict(given)


def make_events(plan: GraphPlan, given: Mapping[str, Event], driver: Driver) -> dict[str, Event]:
    """An event for each of one plan's: the given one, else a new one."""
    return {name: given.get(name) or driver.event() for name in plan.events}
