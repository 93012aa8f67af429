"""The words of expert caching: namespaces, roles, outcomes and reasons, each an enumeration.

Nothing here decides anything. The value of a member is what a message says. Where order matters
(reasons of a group), it is the order of definition.
"""

from __future__ import annotations

from enum import Enum


class Namespace(Enum):
    """Whose step it is: graphs of different namespaces never stand in for each other."""

    MAIN = "main"
    DRAFT = "draft"
    MTP = "multi-token prediction"


class RowSemantics(Enum):
    """What the rows of a step are to each other."""

    INDEPENDENT = "each row is its own sequence"
    SEQUENTIAL = "consecutive positions of sequences"
    SPECULATIVE = "rows to verify"


class Phase(Enum):
    """Whether a step reads a prompt or generates; one with rows of both counts as a prompt."""

    PROMPT = "prompt"
    DECODE = "decode"


class Role(Enum):
    """What a bank is in the feed-forward network that its group makes up."""

    GATE_UP = "gate_up"
    GATE = "gate"
    UP = "up"
    DOWN = "down"
    GATE_UP_SCALE = "gate_up scale"
    GATE_SCALE = "gate scale"
    UP_SCALE = "up scale"
    DOWN_SCALE = "down scale"
    GATE_UP_BIAS = "gate_up bias"
    GATE_BIAS = "gate bias"
    UP_BIAS = "up bias"
    DOWN_BIAS = "down bias"

    @property
    def base(self) -> Role:
        """The weights that a scale or a bias belongs to; a base role itself."""
        return Role(self.value.split(" ")[0])

    @property
    def is_auxiliary(self) -> bool:
        """Whether it is a scale or a bias."""
        return self.base is not self


class Layout(Enum):
    """Which base roles make up a group."""

    FUSED = "fused gate_up, down"
    SEPARATE = "separate gate, up, down"
    UNGATED = "ungated up, down"

    @property
    def roles(self) -> frozenset[Role]:
        """The base roles, each of which a group has exactly once."""
        return _LAYOUT_ROLES[self]


_LAYOUT_ROLES = {
    Layout.FUSED: frozenset({Role.GATE_UP, Role.DOWN}),
    Layout.SEPARATE: frozenset({Role.GATE, Role.UP, Role.DOWN}),
    Layout.UNGATED: frozenset({Role.UP, Role.DOWN}),
}


class Location(Enum):
    """What memory the experts of a bank lie in."""

    PINNED = "pinned host memory"
    PAGEABLE = "pageable host memory"
    DEVICE = "device memory"


class BankStatus(Enum):
    """What a manifest says of a bank: only an active one is served from slots."""

    ACTIVE = "active"
    DORMANT = "its layout is dormant"
    ADAPTED = "a LoRA adapter is active on it"
    OVERRIDDEN = "an override replaces its tensor"
    NOT_ROUTED = "no router chooses its experts"
    EXCLUDED = "its user excluded it"
    UNCLASSIFIED = "it was not classified"
    UNSUPPORTED = "its type or shape is not supported"


class Rejection(Enum):
    """Why a manifest is not published."""

    VERSION = "unknown version"
    FLAGS = "unknown flags"
    COUNT = "a count out of range"
    LAYOUT = "unknown layout"
    ROLE = "a role that the layout does not have, or a missing one"
    DUPLICATE_ROLE = "a role twice in one group"
    DUPLICATE_TENSOR = "a tensor twice"
    INVALID_TENSOR = "no tensor of experts"
    UNSUPPORTED_TYPE = "an element type that no kernel reads"
    UNSUPPORTED_ROLE = "a role that this layout cannot serve"
    INACCESSIBLE_SOURCE = "memory that cannot be read"
    BOUNDS = "rows beyond the end of the memory"
    SHAPE = "shapes that do not fit each other"
    OVERFLOW = "more bytes than 63 bits count"
    DEVICE = "banks on different devices or ranks"
    RANKS = "another rank does not take it"
    ALLOCATION = "no memory for the slots"
    GENERATION_EXHAUSTED = "no generation number is left"


class PublicationCode(Enum):
    """What became of a manifest that was handed over."""

    ACCEPTED = "accepted"
    INVALID_VERSION = "invalid version"
    REJECTED = "rejected"
    BUSY = "still in use"
    ERROR = "error"


class CoverageReason(Enum):
    """How an expert product of a graph stands to the manifest: only the first is fine."""

    REGISTERED = "registered"
    NOT_IN_REVERSE_MAP = "its weights are in no bank"
    SOURCE_CHANGED = "its weights are not where the manifest has them"
    INVALID_REVERSE_MAP = "its bank does not point back at it"
    DORMANT_LAYOUT = "the layout of its group is dormant"
    ACTIVE_LORA = "a LoRA adapter is active on its bank"
    TENSOR_OVERRIDE = "an override replaces its weights"
    NON_ROUTED_BASE = "no router chooses its experts"
    EXCLUDED = "its bank is excluded"
    UNCLASSIFIED = "its bank was not classified"
    UNSUPPORTED_DESCRIPTOR = "the type or shape of its bank is not supported"
    INCOMPLETE = "its group is not complete"


class GroupReason(Enum):
    """Why a group of a graph is not run grouped, in order of priority; the last: it is."""

    DESCRIPTOR = "its banks are not those of the manifest"
    SOURCE = "its weights lie elsewhere than the manifest says"
    GEOMETRY = "rows, routes and experts do not fit each other"
    EXECUTION = "no certificate, another number of rows, or more experts than slots"
    CAPABILITY = "no kernel serves it"
    CONSUMER_EQUIVALENCE = "its reader would see other bits than without grouping"
    ROUTE = "where its expert ids come from is not proven"
    DUPLICATE_ROLE = "two products of one role"
    MIXED_IDS = "its products read different expert ids"
    AUXILIARY = "a scale or bias does not belong to it"
    EXTERNAL_CONSUMER = "something outside the group reads what lies between its products"
    MISSING_ROLE = "a product of its layout is missing"
    UNPROVEN = "not every reader was observed"
    PREFILL = "rows of a prompt"
    MATERIALISATION = "its experts lie in memory that the device cannot map"
    ELIGIBLE = "eligible"

    @property
    def is_soft(self) -> bool:
        """Whether ordinary work falls back for it; what is neither soft nor fine is an error."""
        return self in _SOFT

    @property
    def is_fine(self) -> bool:
        """Whether the group runs grouped, in a prompt or in decoding."""
        return self in (GroupReason.ELIGIBLE, GroupReason.PREFILL)


_SOFT = frozenset(
    {GroupReason.EXECUTION, GroupReason.CONSUMER_EQUIVALENCE, GroupReason.MATERIALISATION}
)


class Strategy(Enum):
    """How the routes of a group reach its experts."""

    DEVICE_DIRECT = "slots for every expert that it may need: the device admits experts"
    HOST_STAGED = "more experts than slots: chunks through scratch memory"


class PlanOutcome(Enum):
    """What the plan of one graph comes to."""

    DECODE_GROUPED = "decoding, every group grouped"
    DECODE_STAGED = "decoding, a group declined"
    PROMPT_GROUPED = "a prompt, every group grouped"
    PROMPT_STAGED = "a prompt, not every group grouped"
    ORDINARY = "no cached experts"
    INCOMPLETE = "expert products that the manifest does not cover"
    ERROR = "a group breaks its contract"

    @property
    def is_grouped(self) -> bool:
        """Whether every group runs from slots."""
        return self in (PlanOutcome.DECODE_GROUPED, PlanOutcome.PROMPT_GROUPED)

    @property
    def is_prompt(self) -> bool:
        """Whether rows of a prompt are in it."""
        return self in (PlanOutcome.PROMPT_GROUPED, PlanOutcome.PROMPT_STAGED)


class Bind(Enum):
    """Where the plan of a call comes from."""

    REUSED = "reused"
    COMPILED = "compiled"
    UNAVAILABLE = "unavailable"


class Kind(Enum):
    """What a call does, or did."""

    DIRECT = "direct"
    STAGED = "staged"
    CAPTURE = "capture"
    REPLAY = "replay"
    UPDATE = "update"
    REINSTANTIATE = "re-instantiate"
    DECLINED = "declined"
    FAILED = "failed"


class Way(Enum):
    """How the work of a call runs; all ways give the same bits."""

    GRAPH = "through a graph"
    DIRECT = "the same kernels, no graph"
    STAGED = "chunks through scratch memory, slots untouched"
    NOTHING = "nothing is launched"
