"""What the kernels take of a multiprocessor, as NVRTC says: a table in a document.

``python -m graphcore_kernels.resource_usage docs/kernel-resources.md`` compiles every kernel that a
launcher may choose for every listed architecture (minutes; no device is needed) and writes what
stands between the two markers. Shared memory that a launch asks for is the launchers' own plan.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from graphcore.driver.cuda.compiler import assembler_log, compiler_version
from graphcore.errors import ConfigurationError
from graphcore_kernels._catalogue import CAPABILITIES, Entry, catalogue

BEGIN = "<!-- kernel-resources:begin -->"
END = "<!-- kernel-resources:end -->"

HEAD = (
    "kernel", "architectures", "threads", "registers", "static", "dynamic", "stack", "spills",
    "blocks",
)  # fmt: skip

_REGISTERS = 64 * 1024  # of a multiprocessor, in all listed architectures
_PARTS, _UNIT = 4, 256
_WARP = 32

_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
_PROPERTIES = re.compile(
    r"Function properties for (\S+)\n\D*(\d+) bytes stack frame, (\d+) bytes spill stores, "
    r"(\d+) bytes spill loads"
)
_USED = re.compile(r"Used (\d+) registers(.*)")
_STATIC = re.compile(r"(\d+) bytes smem")

Cells = tuple[str, ...]
"""A row of the table without kernel and architectures."""
Table = dict[tuple[str, str], Cells]
"""(kernel, architecture) -> its cells."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What the assembler says of a kernel.

    Args:
        registers: Of a thread.
        static_bytes: Shared memory that the source declares.
        stack_bytes: Local memory of a thread.
        spill_stores: Bytes that a thread stores for want of registers.
        spill_loads: Bytes that it loads back.
    """

    registers: int
    static_bytes: int
    stack_bytes: int
    spill_stores: int
    spill_loads: int


def parse_usage(log: str, kernel: str) -> Usage:
    """What a log of the assembler says of ``kernel``.

    Stack and spills of functions that were not inlined count, since the kernel's threads have them.

    Raises:
        ConfigurationError: The log is of another kernel, or not in the known form.
    """
    entries = [entry for entry, _ in _ENTRY.findall(log)]
    parts = {name: log[at:] for name, at in _places(log)}
    used = _USED.search(parts.get(kernel, ""))
    functions = [found for found in _PROPERTIES.findall(log) if found[0] not in entries]
    own = [found for found in _PROPERTIES.findall(log) if found[0] == kernel]
    if used is None or len(own) != 1:
        raise ConfigurationError(f"log: expected registers and stack of {kernel}, got:\n{log}")
    stack, stores, loads = (
        max(int(found[column]) for found in (*own, *functions)) for column in (1, 2, 3)
    )
    static = _STATIC.search(used[2])
    return Usage(int(used[1]), int(static[1]) if static else 0, stack, stores, loads)


def _places(log: str) -> list[tuple[str, int]]:
    return [(found[1], found.start()) for found in _ENTRY.finditer(log)]


def blocks_by_registers(registers: int, threads: int) -> int:
    """Blocks of ``threads`` threads whose registers a multiprocessor holds.

    Each of its four parts has a quarter of the registers and gives warps whole units of them.
    Threads, shared memory and the largest number of blocks may allow fewer.
    """
    of_a_warp = -(-registers * _WARP // _UNIT) * _UNIT
    warps = _REGISTERS // _PARTS // of_a_warp * _PARTS
    return warps // -(-threads // _WARP)


def cells_of(entry: Entry, architecture: str) -> Cells:
    """The row of one kernel, compiled now.

    Raises:
        CudaError: It does not compile.
        DriverUnavailable: NVRTC is not installed.
    """
    kernel = entry.kernel
    usage = parse_usage(assembler_log(kernel, architecture), kernel.name)
    blocks = (blocks_by_registers(usage.registers, threads) for threads in entry.threads)
    return (
        ", ".join(map(str, entry.threads)),
        str(usage.registers),
        str(usage.static_bytes),
        str(entry.dynamic_bytes),
        str(usage.stack_bytes),
        f"{usage.spill_stores} / {usage.spill_loads}",
        ", ".join(map(str, blocks)),
    )


def compiled_table(known: Table, pattern: str = "") -> Table:
    """All kernels for all architectures, each told on stderr as it comes, since it takes long.

    Args:
        known: What a page says of them.
        pattern: Kernels in whose names it is found are compiled now; the others are as known.

    Raises:
        ConfigurationError: A kernel is neither known nor compiled; nothing is compiled then.
    """
    entries = [(each, name) for name in CAPABILITIES for each in catalogue(name)]
    asked = {each.kernel.name for each, _ in entries if re.search(pattern, each.kernel.name)}
    unknown = {each.kernel.name for each, name in entries if (each.kernel.name, name) not in known}
    if unknown - asked:
        raise ConfigurationError(
            f"--only: expected a pattern that finds {sorted(unknown - asked)} too, of which the "
            f"page says nothing, got {pattern!r}"
        )
    table: Table = {}
    for entry, architecture in entries:
        key = entry.kernel.name, architecture
        if entry.kernel.name in asked:
            table[key] = cells_of(entry, architecture)
            sys.stderr.write(f"{architecture} {entry.kernel.name}: {table[key][1]} registers\n")
        else:
            table[key] = known[key]
    return table


def written(table: Table) -> str:
    """The text between the markers: a section and a table for each function of the package."""
    groups: dict[str, dict[str, None]] = {}
    for architecture in CAPABILITIES:
        for entry in catalogue(architecture):
            groups.setdefault(entry.group, {})[entry.kernel.name] = None
    major, minor = compiler_version()
    parts = [f"Compiled by NVRTC {major}.{minor}."]
    for group, kernels in groups.items():
        lines = [HEAD, ("---", "---", *("---:" for _ in HEAD[2:]))]
        lines += [row for kernel in kernels for row in _rows(kernel, table)]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        parts += [f"## {group}", text]
    return "\n\n".join(parts)


def _rows(kernel: str, table: Table) -> Iterable[Cells]:
    """One row for architectures that agree in everything."""
    same: dict[Cells, list[str]] = {}
    for architecture in CAPABILITIES:
        cells = table.get((kernel, architecture))
        if cells is not None:
            same.setdefault(cells, []).append(architecture)
    for cells, architectures in same.items():
        yield (f"`{kernel}`", ", ".join(architectures), *cells)


def read_table(document: str) -> Table:
    """What a document's table says.

    Raises:
        ConfigurationError: It lacks the markers, or says something twice.
    """
    table: Table = {}
    for line in _between(document)[1].splitlines():
        cells = tuple(cell.strip() for cell in line.strip("|").split(" | "))
        if len(cells) == len(HEAD) and cells[0].startswith("`"):
            for architecture in cells[1].split(", "):
                key = cells[0].strip("`"), architecture
                if key in table:
                    raise ConfigurationError(f"document: expected one row of {key}, got two")
                table[key] = cells[2:]
    return table


def _between(document: str) -> tuple[str, str, str]:
    head, begin, rest = document.partition(BEGIN)
    text, end, tail = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in head + tail:
        raise ConfigurationError(f"document: expected {BEGIN} and {END}, once each and in order")
    return head, text, tail


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the table into a document, or, with ``--check``, tells what differs.

    Args:
        argv: Arguments after the program's name; None takes the process's.

    Returns:
        0, or 1 where ``--check`` found a difference.
    """
    parser = argparse.ArgumentParser(
        prog="python -m graphcore_kernels.resource_usage", description=__doc__
    )
    parser.add_argument("document", type=Path, help="a text with the two markers")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where it differs")
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="compile kernels of such names; keep others"
    )
    options = parser.parse_args(argv)
    before = options.document.read_text(encoding="utf-8")
    head, old, tail = _between(before)
    known = read_table(before)
    table = compiled_table(known, options.only)
    new = f"\n{written(table)}\n"
    if not options.check:
        options.document.write_text(f"{head}{BEGIN}{new}{END}{tail}", encoding="utf-8")
        return 0
    for line in differences(known, table):
        sys.stdout.write(f"{options.document}: {line}\n")
    return int(old != new)


def differences(page: Table, compiled: Table) -> list[str]:
    """Each row in which a page is not what the compiler says, in words."""
    return [
        f"{kernel} for {architecture}: expected {compiled.get((kernel, architecture))}, "
        f"got {page.get((kernel, architecture))}"
        for kernel, architecture in sorted({*page, *compiled})
        if page.get((kernel, architecture)) != compiled.get((kernel, architecture))
    ]


if __name__ == "__main__":
    sys.exit(main())
