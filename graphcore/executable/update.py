"""What an update of an executable came to, and why the driver refused one.

The answer of the driver alone ("update failed") helps nobody: a refusal is explained by the node
the driver names, or else by the first difference our own comparison finds, with the field and the
public rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

from graphcore.advice import advises, instead
from graphcore.driver import Driver, active
from graphcore.driver.pairing import Outline
from graphcore.driver.records import RawUpdate, UpdateResult
from graphcore.errors import CacheTypeError, ConfigurationError, CudaError, LifecycleError
from graphcore.executable.handles import MEMORY_KINDS, ExecResource, GraphResource
from graphcore.graph.attributes import LaunchAttributes
from graphcore.graph.diff import diff
from graphcore.graph.nodes import NodeRecord
from graphcore.graph.pairing import outline, read_outline
from graphcore.graph.prediction import (
    CLUSTER_RULE,
    COOPERATIVE_RULE,
    Difference,
    first_difference,
    trap_differences,
)
from graphcore.graph.reading import Annotation, read
from graphcore.graph.snapshot import GraphSnapshot
from graphcore.interop.drivers import same_driver

if TYPE_CHECKING:
    from graphcore.executable.graph import Graph


class UpdateStatus(Enum):
    """What became of the executable."""

    UPDATED = "updated"
    REINSTANTIATED = "reinstantiated"
    REFUSED = "refused"


@advises
@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """The result of ``GraphExec.update``.

    Args:
        status: UPDATED in place; REINSTANTIATED: the executable is a new one behind the same
            object; REFUSED: nothing changed.
        reason: One sentence: why it came to this.
        node: The node at fault in the new graph, where there is one.
        field: The field of it that changed, for example "height" or "cluster".
        rule: The public rule the change breaks, in words.
        named_by: Who names the node: "driver", or "graphcore" where the driver names none.
        result: What the driver answered; None where it was not asked (the cluster trap).
        advice: What to do where such outcomes repeat.
    """

    status: UpdateStatus
    reason: str
    node: NodeRecord | None = None
    field: str | None = None
    rule: str | None = None
    named_by: Literal["driver", "graphcore"] | None = None
    result: UpdateResult | None = None
    advice: str | None = None

    @property
    def is_current(self) -> bool:
        """Whether the executable now does what the new graph says."""
        return self.status is not UpdateStatus.REFUSED

    def __repr__(self) -> str:
        """Short: the fields of a node on one line cannot be read."""
        return f"<UpdateOutcome {self}>"

    def __str__(self) -> str:
        advice = f" ({self.advice})" if self.advice else ""
        return f"{self.status.value}: {self.reason}{advice}"


UPDATED = UpdateOutcome(UpdateStatus.UPDATED, "updated in place", result=UpdateResult.SUCCESS)
"""The outcome of every update in place."""

_RULES = {
    UpdateResult.ERROR: "the driver gives no reason",
    UpdateResult.TOPOLOGY_CHANGED: "an update keeps the number of nodes and their dependencies",
    UpdateResult.NODE_TYPE_CHANGED: "an update keeps each node's kind",
    UpdateResult.FUNCTION_CHANGED: "this driver keeps each kernel node's function",
    UpdateResult.PARAMETERS_CHANGED: "an update keeps what cannot be changed in a node of its kind",
    UpdateResult.NOT_SUPPORTED: "nodes of this kind cannot be updated",
    UpdateResult.UNSUPPORTED_FUNCTION_CHANGE: "an update keeps the context a kernel's function was "
    "loaded in, and whether it launches work itself",
    UpdateResult.ATTRIBUTES_CHANGED: "an update keeps launch attributes such as cooperative",
}


@dataclass(frozen=True, slots=True)
class Version:
    """The parameters an executable has: the graph they came from and its launch attributes.

    Holds the graph's handle, so that it can be read for an explanation after the graph was closed.
    """

    resource: GraphResource
    attributes: LaunchAttributes
    annotations: tuple[Annotation, ...]
    _outline: list[Outline | None] = field(default_factory=list, repr=False, compare=False)

    @classmethod
    def of(cls, graph: Graph, *, read_again: bool = False) -> Version:
        """The version a graph stands for; ``read_again`` where it may have changed in place."""
        if not read_again:
            return graph.version
        attributes = LaunchAttributes.read(graph.driver, graph.handle)
        return cls(graph.resource, attributes, graph.annotations)

    def snapshot(self) -> GraphSnapshot:
        """The graph as it is now."""
        resource = self.resource
        return read(resource.driver, resource.handle, annotations=self.annotations)

    def keeps_its_attributes_in(self, new: Version) -> bool:
        """Whether each kernel of ``new`` has the attributes of the one that it is paired with here.

        For graphs of one outline, whose nodes are paired place by place; False proves nothing.
        """
        if self.attributes != new.attributes:
            return False
        shape = self._shape()
        return shape is not None and shape == new._shape()

    def _shape(self) -> Outline | None:
        """What an update compares besides parameters, where no node has graphs inside; kept."""
        if not self._outline:
            resource = self.resource
            self._outline.append(read_outline(resource.driver, resource.handle))
        return self._outline[0]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an update cannot be done in place; what an outcome says about it.

    ``shapes`` are the topologies before and after, where both were read.
    """

    reason: str
    node: NodeRecord | None
    field: str | None
    rule: str
    named_by: Literal["driver", "graphcore"] | None
    result: UpdateResult | None
    shapes: tuple[Outline, Outline] | None = None

    def outcome(self, status: UpdateStatus, advice: str | None = None) -> UpdateOutcome:
        """The outcome of this refusal."""
        return UpdateOutcome(
            status, self.reason, self.node, self.field, self.rule, self.named_by, self.result,
            advice,
        )  # fmt: skip


Now = Callable[[], GraphSnapshot]


def check_new_graph(driver: Driver, graph: Any) -> None:
    """Refuses what no executable of ``driver`` can be updated with, before the driver is asked.

    Raises:
        LifecycleError: A capture is under way on this thread, or the graph is closed or gone.
        CacheTypeError: No graph.
        ConfigurationError: A graph of another driver, device or context.
    """
    capture = active.current()
    if capture is not None:
        raise LifecycleError(
            f"update: not while a capture is under way on this thread ({capture.name}): it would "
            "happen now, and at no replay"
        )
    if not isinstance(getattr(graph, "resource", None), GraphResource):
        raise CacheTypeError(
            f"graph: expected a Graph, got {type(graph).__name__}{instead(graph, 'graph')}"
        )
    other = graph.driver
    if not same_driver(other, driver):
        raise ConfigurationError(
            f"graph: expected one of driver {driver.name}:{driver.device}, got one of "
            f"{other.name}:{other.device}; where both read alike, two open_driver() calls made two "
            "drivers: pass the same driver= everywhere"
        )


def try_in_place(
    driver: Driver, executable: ExecResource, old: Version, new: Version, now: Now
) -> Refusal | None:
    """Updates ``executable`` from ``old`` to ``new``; None, or why it has not been done.

    Args:
        driver: The driver of all three.
        executable: The executable.
        old: The version it has.
        new: The version it is to have.
        now: Reads what it runs now: ``old`` with the changes of single nodes since.

    Raises:
        CudaError: A failure that is no refusal.
    """
    if old.attributes.may_hide_a_change_to(new.attributes):
        trap = _find_trap(old, new, now)
        if trap is not None:
            return trap
    try:
        executable.upload_first()
        answer = driver.update_exec(executable.handle, new.resource.handle)
    except CudaError as error:
        taken = _owned_memory_is_taken(error, new)
        if taken is None:
            raise
        return taken
    if answer.result is UpdateResult.SUCCESS:
        return None
    before = None if old.resource is new.resource else now()
    return explain_refusal(answer, before, new.snapshot())


def _owned_memory_is_taken(error: CudaError, new: Version) -> Refusal | None:
    """The refusal behind an error that CUDA raises where it could have refused."""
    if error.code != "CUDA_ERROR_NOT_SUPPORTED" or not new.resource.has(*MEMORY_KINDS):
        return None
    rule = "a graph that owns memory (allocation nodes) can be in one executable at a time"
    reason = f"not_supported: the graph has an executable of its own: {rule}"
    return Refusal(reason, None, "executables", rule, None, UpdateResult.NOT_SUPPORTED)


def _find_trap(old: Version, new: Version, now: Now) -> Refusal | None:
    if old.resource is not new.resource:
        if old.keeps_its_attributes_in(new):
            return None
        before, after = now(), new.snapshot()
        traps = trap_differences(before, after)
        return explain_trap(traps[0], (outline(before), outline(after))) if traps else None
    # one graph, changed in place: what it was like is known from the stored summary only
    was, is_now = old.attributes, new.attributes
    if [entry[0] for entry in was.entries] != [entry[0] for entry in is_now.entries]:
        field, rule = "cluster", CLUSTER_RULE
    elif was.functions != is_now.functions:
        field, rule = "function", COOPERATIVE_RULE
    else:
        return None
    return Refusal(f"{field} changed in the graph: {rule}", None, field, rule, None, None)


def explain_trap(trap: Difference, shapes: tuple[Outline, Outline] | None = None) -> Refusal:
    """A change that the driver would accept and not apply."""
    reason = f"{trap}; an update in place would be accepted and would do nothing"
    named_by: Literal["graphcore"] | None = None if trap.node is None else "graphcore"
    return Refusal(reason, trap.node, trap.field, trap.rule, named_by, None, shapes)


def explain_refusal(answer: RawUpdate, old: GraphSnapshot | None, new: GraphSnapshot) -> Refusal:
    """Why the driver refused: its own words, completed by our comparison.

    Args:
        answer: What the driver said.
        old: The graph the executable runs; None where it cannot be read any more.
        new: The graph it was to take.
    """
    expected = None if old is None else first_difference(old, new)
    if expected is not None and expected.result is not answer.result:
        expected = None  # the driver stumbled over something else: its word counts
    node = new.find(answer.node)
    if node is None:
        node = None if expected is None else expected.node
        named_by: Literal["driver", "graphcore"] | None = None if node is None else "graphcore"
    else:
        named_by = "driver"
        if expected is not None and (expected.node is None or expected.node.handle != node.handle):
            expected = None
    field: str | None
    if expected is not None:
        field, rule, words = expected.field, expected.rule, str(expected)
    else:
        field, rule = _changed_field(old, new, node), _RULES[answer.result]
        where = "the graph" if node is None else str(node)
        words = f"{where}: {field}: {rule}" if field else f"{where}: {rule}"
    shapes = None if old is None else (outline(old), outline(new))
    reason = f"{answer.result.value}: {words}"
    return Refusal(reason, node, field, rule, named_by, answer.result, shapes)


def _changed_field(
    old: GraphSnapshot | None, new: GraphSnapshot, node: NodeRecord | None
) -> str | None:
    """The first field in which ``node`` differs from its counterpart."""
    if old is None or node is None:
        return None
    for change in diff(old, new).changed:
        if change.after.handle == node.handle:
            return change.fields[0].field
    return None
