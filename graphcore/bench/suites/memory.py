"""Suite memory: what captured decode steps take of the device, predicted and measured.

Four capacities of one model: ours over one storage and one pool, against a pool for each, and
against graphs of torch with a cache for each in one torch pool; and one executable more. The floor
of a row is what the library's own report predicts, so that 1.00 means that the report tells what
the device gave. Notes tell what was taken and predicted by part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphcore.bench.results import Row
from graphcore.bench.suites import Measured, Request
from graphcore.bench.suites.decode_models import subject_of
from graphcore.bench.suites.memory_arrangements import ARRANGEMENTS, CAPACITIES, MODEL, Found
from graphcore.bench.suites.memory_readings import PARTS
from graphcore.bench.turns import Lost, take_turns
from graphcore.driver import Driver, open_driver

Note = Mapping[str, Any]
Results = Mapping[str, Found | Lost]

PRIVATE, TORCH = "private pools", "torch graphs"
MOST_OFF = 0.05
"""How far from the measured bytes a prediction may be, as a share of them."""

_MIB = 1 << 20
_ROOM_OF_ONE = 6 << 30  # bytes of a process: model, context, loaded code
_PART_OF = {
    "K and V, stored once": "tensors",
    "static tensors": "tensors",
    "memory pool, shared": "pools",
    "memory pools, one each": "pools",
    "workspaces": "pools",
    "graph allocations": "executables",
    "executables": "executables",
}
"""Where a reading sees what the report names."""


def run(driver: Driver, request: Request) -> Measured:
    """Measures buckets and executables; on the emulated driver executables alone have a size.

    Raises:
        ConfigurationError: A peer to leave out that is none.
    """
    request.check_peers([PRIVATE, TORCH])
    left_out = [] if PRIVATE not in request.without else ["private buckets"]
    if driver.is_emulated or TORCH in request.without:
        left_out += ["torch buckets", "torch executable"]
    names = [name for name in ARRANGEMENTS if name not in left_out]
    return told(_here(names) if driver.is_emulated else _in_turns(names, driver))


def told(results: Results) -> Measured:
    """Rows and notes of what arrangements found."""
    table = _Table()
    table.buckets(results)
    table.executable(results)
    for name, found in results.items():
        if isinstance(found, Lost):
            table.notes.append({"left out": name, "reason": str(found)})
    return Measured(table.rows, table.notes)


def _here(names: Sequence[str]) -> Results:
    """Each on an emulated device of its own."""
    found: dict[str, Found] = {}
    for name in names:
        driver = open_driver("emulated")
        subject = subject_of(MODEL, driver)
        found[name] = ARRANGEMENTS[name](driver, subject, lambda: None)
        found[name]["weights"] = subject.weights
    return found


def _in_turns(names: Sequence[str], driver: Driver) -> Results:
    module = "graphcore.bench.suites.memory_arrangements"
    commands = {name: ["-m", module, name, str(driver.device)] for name in names}
    has_room = driver.memory_info()[0] > len(names) * _ROOM_OF_ONE
    return take_turns(commands, side_by_side=has_room)


class _Table:
    """Rows and notes, in their order."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.notes: list[Note] = []

    def buckets(self, results: Results) -> None:
        """Bytes of all buckets, against those of others' ways."""
        found = results.get("buckets")
        if found is None or isinstance(found, Lost):
            return
        self.notes.append({"about": f"{MODEL}: {found['weights']}"})
        peers = _taken_by(results, {PRIVATE: "private buckets", TORCH: "torch buckets"})
        is_emulated = found["taken"]["tensors"] == 0  # its device is host memory
        # of which it gives out graphs alone
        seen = ("executables",) if is_emulated else PARTS
        predicted = sum(_by_part(found["predicted"])[part] for part in seen)
        case = f"k={len(CAPACITIES)} buckets"
        self._row(case, sum(found["taken"].values()), predicted, peers)
        for name, size in found["buckets"].items():
            self._note(f"bucket {name}: alone", "MiB", size / _MIB)
        for name, key in ((case, "buckets"), (PRIVATE, "private buckets")):
            self._parts(name, results.get(key), seen)
        self._parts(TORCH, results.get("torch buckets"), seen)

    def executable(self, results: Results) -> None:
        """Bytes of one executable of a step."""
        found = results.get("executable")
        if found is None or isinstance(found, Lost):
            return
        peers = _taken_by(results, {TORCH: "torch executable"})
        self._row("executable", found["taken"], found["predicted"], peers)
        self._note("nodes of a step", "nodes", found["nodes"])
        self._note("bytes of a node, predicted", "bytes", found["bytes_per_node"])
        self._note("bytes of a node, measured", "bytes", found["taken"] / found["nodes"])
        self._note(
            f"steps of {found['count']} executables, smallest", "KiB", found["smallest step"] / 1024
        )
        self._note(
            f"steps of {found['count']} executables, largest", "KiB", found["largest step"] / 1024
        )
        self._note("executables, left when destroyed", "MiB", found["left"] / _MIB)

    def _parts(self, case: str, found: Found | Lost | None, seen: Sequence[str]) -> None:
        """What was taken, predicted and left of each part, and what the report names there."""
        if found is None or isinstance(found, Lost):
            return
        predicted = found.get("predicted")
        for name, size in (predicted or {}).items():
            if size:
                self._note(f"{case}: {name}, predicted", "MiB", size / _MIB)
        for part in seen:
            self._note(f"{case}: {part}, taken", "MiB", found["taken"][part] / _MIB)
            if predicted is not None:
                off = found["taken"][part] - _by_part(predicted)[part]
                self._note(f"{case}: {part}, taken beyond prediction", "MiB", off / _MIB)
                self._note(f"{case}: {part}, left when closed", "MiB", found["left"][part] / _MIB)

    def _row(self, case: str, ours: float, predicted: float, peers: Mapping[str, float]) -> None:
        """``of_floor``: prediction over measurement; ``vs_best_peer``: theirs over ours."""
        self.notes.append(_verdict(case, ours, predicted))
        if not peers or ours <= 0:
            self._note(f"{case}: measured", "MiB", ours / _MIB)
            self._note(f"{case}: predicted", "MiB", predicted / _MIB)
            return
        ratios = predicted / ours, min(peers.values()) / ours
        self.rows.append(
            Row(
                case=case,
                unit="MiB",
                ours=ours / _MIB,
                floor=predicted / _MIB,
                peers={name: taken / _MIB for name, taken in peers.items()},
                of_floor=ratios[0],
                vs_best_peer=ratios[1],
                spread={"of_floor": _one(ratios[0]), "vs_best_peer": _one(ratios[1])},
            )
        )

    def _note(self, what: str, unit: str, value: float) -> None:
        self.notes.append({"case": what, "unit": unit, "ours": round(value, 3)})


def _taken_by(results: Results, wanted: Mapping[str, str]) -> dict[str, float]:
    """Bytes of the peers that were measured, by their names in the row."""
    peers: dict[str, float] = {}
    for peer, name in wanted.items():
        found = results.get(name)
        if found is not None and not isinstance(found, Lost):
            taken = found["taken"]
            peers[peer] = float(sum(taken.values()) if isinstance(taken, dict) else taken)
    return peers


def _by_part(predicted: Mapping[str, int]) -> dict[str, int]:
    """What the report names, summed up by where a reading sees it."""
    sums = dict.fromkeys(PARTS, 0)
    for name, size in predicted.items():
        sums[_PART_OF[name]] += size
    return sums


def _verdict(case: str, ours: float, predicted: float) -> Note:
    off = abs(ours - predicted) / ours if ours > 0 else float("inf")
    verdict = "reached" if off <= MOST_OFF else "MISSED"
    return {
        "about": f"{case}: target prediction within {MOST_OFF:.0%} of what is taken "
        f"(got {off:.1%}): {verdict}"
    }


def _one(value: float) -> Sequence[float]:
    """Bounds of a figure that was measured once: memory does not vary as time does."""
    return [round(value, 4)] * 2
