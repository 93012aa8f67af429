"""Prepared changes of one kernel node's arguments, at the price of the driver's call.

The fast form packs plain numbers by the signature into a prepared block and makes one bound call.
Whatever does not fit it (tensors, numbers out of range, an executable that has changed since) goes
the way of ``GraphExec.set_params``, which explains.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from graphcore.driver.kernel import SCALARS, Kernel
from graphcore.driver.kernel_update import KernelUpdate
from graphcore.driver.records import KernelParams, NodeHandle

if TYPE_CHECKING:
    from graphcore.executable.changing import ChangeableExec


class LiveArguments:
    """What an executable knows of a node with prepared changes.

    ``pack`` and ``commit`` are the prepared form; without one ``pack`` raises. ``values`` are those
    of the last change, not looked at yet unless they are ``_seen``.
    """

    __slots__ = (
        "_pack_into", "_seen", "_template", "_update", "commit", "node", "pack", "values",
    )  # fmt: skip

    def __init__(self, node: NodeHandle) -> None:
        self.node: NodeHandle | None = node
        self.pack: Callable[..., object] = _not_prepared
        self._pack_into: Callable[..., object] = _not_prepared
        self.commit: Callable[[], Any] = _not_prepared
        self.values: tuple[Any, ...] = ()
        self._seen: tuple[Any, ...] = self.values
        self._update: KernelUpdate | None = None
        self._template: KernelParams | None = None

    def prepare(self, update: KernelUpdate, kernel: Kernel | None) -> None:
        """Takes a prepared update, of a node that has ``update.params`` now."""
        self._update, self._template = update, update.params
        self._pack_into = packer(update, kernel)
        self.pack = partial(self._pack_into, update.block, 0)
        self.commit = update.commit
        self._seen = self.values = ()

    def params_if_new(self) -> KernelParams | None:
        """The node's parameters where a change was made since this was last asked."""
        values = self.values
        if values is self._seen:
            return None
        assert self._update is not None
        assert self._template is not None
        block = bytearray(len(self._update.block))
        self._pack_into(block, 0, *values)
        arguments = tuple([bytes(block[at : at + size]) for at, size in self._update.layout])
        self._seen = values
        return replace(self._template, arguments=arguments)

    def refuse(self, result: object) -> None:
        """Raises the error of a commit that failed."""
        assert self._update is not None
        self._update.refuse(result)

    def forget(self) -> None:
        """The node was changed another way: the next change prepares again."""
        self.params_if_new()
        self._seen = self.values = ()
        self.pack = self.commit = self._pack_into = _not_prepared
        self._update = self._template = None

    def close(self) -> None:
        """The executable is gone."""
        self.forget()
        self.node = None


BoundParams = Callable[..., None]
"""Changes the arguments of one kernel node; made by ``GraphExec.bind_params``.

``bound(x_address, 2.0, 1024)`` takes every argument in order, as ``set_params`` does. Numbers are
checked for their range; who owns the memory at a plain address is the caller's affair. A change is
allowed while a launch runs, which keeps the old arguments. Not locked.
"""


def bound_params(executable: ChangeableExec, live: LiveArguments) -> BoundParams:
    """The fast form of a node's changes: a function, because calling an object costs more."""

    def change(*values: Any) -> None:
        try:
            live.pack(*values)
        except (struct.error, TypeError, OverflowError, _NotPreparedError):
            executable.change_slowly(live, values)
            return
        result = live.commit()
        if result:
            live.refuse(result)
        live.values = values

    change.__name__ = change.__qualname__ = f"change of node {live.node:#x} of {executable!r}"
    return change


class _NotPreparedError(Exception):
    """There is no prepared form now."""


def _not_prepared(*_: object) -> object:
    raise _NotPreparedError


# where a number of the right range is all there is to check: as a bool anything would pass
_CODES = {name: code for name, code in SCALARS.items() if name != "bool"}


def packer(update: KernelUpdate, kernel: Kernel | None) -> Callable[..., object]:
    """``pack(block, 0, *values)`` for ``update``; raises where they do not fit."""
    if kernel is not None:
        codes = ["Q" if p.is_pointer else _CODES.get(p.type) for p in kernel.parameters]
        if all(codes):
            pieces = [
                f"{code}{-size % 8}x" for code, (_, size) in zip(codes, update.layout, strict=True)
            ]
            return struct.Struct("=" + "".join(pieces)).pack_into
    sizes = [size for _, size in update.layout]

    def pack(block: bytearray, _start: int, *values: Any) -> None:
        # anything but bytes of the right size goes the slow way
        if [type(value) is bytes and len(value) for value in values] != sizes:
            raise TypeError
        for (offset, size), value in zip(update.layout, values, strict=True):
            block[offset : offset + size] = value

    return pack
