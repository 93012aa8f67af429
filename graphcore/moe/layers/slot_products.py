"""SlotProducts: the experts of one group as a function of rows: admitted, copied, multiplied.

Five kernels on one stream, and no host in between: a captured step follows the router, and experts
that move, without an update. Nothing is allocated: a step brings its tensors and its scratch
memory. Needs no torch.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

from graphcore_kernels import GemmFault, read_fault

from graphcore.driver import Driver, active, stream_handle
from graphcore.driver.records import StreamHandle
from graphcore.errors import CapacityError, CaptureError, ConfigurationError, GraphcoreError
from graphcore.interop import current_stream
from graphcore.moe.layers.product_options import ProductOptions
from graphcore.moe.layers.products_launch import ProductsTensors, ReadyProducts
from graphcore.moe.layers.products_plan import ProductsPlans, ProductsSizes
from graphcore.moe.layers.staged import StagedProducts
from graphcore.moe.slots.slot_group import SlotGroup
from graphcore.moe.slots.slot_pool import SlotPool
from graphcore.resources.buffer import Buffer
from graphcore.resources.tensors import TensorRef, describe

_MOST_READY = 32
_BANKS = ("gate_up", "down")


class SlotProducts:
    """The experts of one group of a pool, whose banks are ``gate_up`` and ``down``. Not locked.

    A step of more routes than slots goes through the slots in parts, as many rows at once as have
    slots whoever they name. With ``staged`` one of more routes than experts goes through staging
    memory instead, which copies each expert once and leaves the slots alone, and so does one whose
    rows have more experts than there are slots. The bits are the same every way.

    Args:
        pool: Whose slots.
        name: Of the group.
        options: Of the products. The banks are [experts, 2 * inner, hidden] and [experts, hidden,
            inner], in layout "kn" the other way round.
        plans: Shared by the layers of a pool; None makes some.
        staged: Of the same experts and options; None: all goes through the slots.

    Raises:
        CaptureError: Inside a capture.
        ConfigurationError: Banks of other names, or that do not fit each other or the kernels.
        CudaError: Out of memory.
    """

    def __init__(
        self,
        pool: SlotPool,
        name: str,
        *,
        options: ProductOptions | None = None,
        plans: ProductsPlans | None = None,
        staged: StagedProducts | None = None,
    ) -> None:
        if active.current() is not None:
            raise CaptureError("SlotProducts: not while a graph is captured; make it before")
        self.pool, self.name, self.staged = pool, name, staged
        self.leaves_slots_alone = False
        """Whether every step goes through staging memory, whatever would fit."""
        self._plans = plans or ProductsPlans(pool.driver, pool.policy)
        self._sizes = _measure(pool[name], options or ProductOptions())
        self._plans.find(self._sizes)  # refuses here what the kernels refuse
        self._error = Buffer.allocate(1, "int32", driver=pool.driver)
        self._error.write(0)
        self._serial = -1
        self._ready: dict[ProductsSizes, ReadyProducts] = {}
        self._group = pool[name]

    @property
    def driver(self) -> Driver:
        return self.pool.driver

    @property
    def sizes(self) -> ProductsSizes:
        """Of the group; its rows are those of no step."""
        return self._sizes

    def sizes_of(
        self, rows: int, top_k: int, *, ids: str = "int64", weights: str = "float32"
    ) -> ProductsSizes:
        """Those of a step.

        Raises:
            CapacityError: Fewer slots than a single row needs.
        """
        self._follow_pool()
        sizes = replace(self._sizes, rows=rows, top_k=top_k, ids=ids, weights=weights)
        if not sizes.most_rows and not sizes.fits and self.staged is None:
            raise CapacityError(
                f"ids: expected at most {sizes.slots} experts for each row, the slots of group "
                f"{self.name}, got {top_k}"
            )
        return sizes

    def is_staged(self, sizes: ProductsSizes) -> bool:
        """Whether a step of these sizes leaves the slots alone."""
        if self.staged is None:
            return False
        if self.leaves_slots_alone:
            return True
        if sizes.fits:
            return False
        return not sizes.most_rows or sizes.rows * sizes.top_k > sizes.experts

    def scratch_bytes(self, sizes: ProductsSizes) -> int:
        """Scratch memory of a step of these sizes; a staged one has its own."""
        if not sizes.rows or self.is_staged(sizes):
            return 0
        return max(
            ready.plan.scratch_bytes + ready.plan.outputs_bytes for ready in self._parts(sizes)
        )

    def launch(
        self, x: Any, ids: Any, weights: Any, out: Any, scratch: Any, stream: Any = None
    ) -> None:
        """Computes a step on ``stream``, or adds its kernels to the capture there.

        ``out[row]`` is the sum of ``weights[row, j]`` times expert ``ids[row, j]`` of ``x[row]``,
        in the order of j, in F32, rounded once. A step that the tables refuse (see
        :meth:`fault`) is zero.

        Args:
            x: [rows, hidden] of the experts' type, contiguous.
            ids: int32 or int64 [rows, top_k].
            weights: float32, float16 or bfloat16 [rows, top_k].
            out: As ``x``, apart from it.
            scratch: ``scratch_bytes`` bytes, of any type and contents, at a multiple of 16.
            stream: Anything that is a stream. None: torch's or CuPy's current stream where in use,
                else that of the capture under way on this thread, else the legacy one.

        Raises:
            CacheTypeError: An operand is no tensor, or ``stream`` no stream.
            CapacityError: Too little scratch memory, or fewer slots than a row needs and no
                staging memory.
            ConfigurationError: Shapes, element types, strides, alignment or devices do not fit.
            CudaError: The driver refused a launch; slots it was for are settled at the next step.
            LifecycleError: The pool is closed.
        """
        given = {"x": x, "ids": ids, "weights": weights, "out": out, "scratch": scratch}
        refs = {
            name: describe(obj, writable=name in ("out", "scratch"), name=name)
            for name, obj in given.items()
        }
        sizes = self._checked(refs)
        handle = current_stream(self.driver) if stream is None else stream_handle(stream)
        for name, obj in given.items():
            active.keep(obj, f"{self.name} {name}")
        where = ProductsTensors(*(refs[name].address for name in given))
        self.launch_at(sizes, where, handle)

    def launch_at(self, sizes: ProductsSizes, where: ProductsTensors, stream: StreamHandle) -> None:
        """As :meth:`launch`, of tensors that were checked, which a capture does not keep alive."""
        self._follow_pool()
        if not sizes.rows:
            return
        if self.is_staged(sizes):
            assert self.staged is not None
            x, ids, weights, out = where.described(sizes, self.driver)
            self.staged.launch(x, ids, weights, out, stream)
            return
        self._keep()
        start = 0
        for ready in self._parts(sizes):
            self._launch_part(ready, where.behind(sizes, start), stream)
            start += ready.plan.sizes.rows

    def fault(self) -> GemmFault | None:
        """What the products found wrong since they were made, after all work."""
        return read_fault(int(self._error.read()[0]))

    def close(self) -> None:
        """Lets go of the memory but the pool's; graphs that use it keep it."""
        self._error.close()
        if self.staged is not None:
            self.staged.close()

    # ---- inside ---------------------------------------------------------------------------------

    def _launch_part(
        self, ready: ReadyProducts, where: ProductsTensors, stream: StreamHandle
    ) -> None:
        self.pool.settle(self.name)
        try:
            ready.launch(self.driver, stream, where)
        except BaseException:  # a plan of slots may be there without its copies
            self.pool.doubt(self.name)
            if active.current() is None:
                # a graph over these slots may be launched next, which nobody would ask
                with suppress(GraphcoreError):
                    self.pool.settle(self.name)
            raise

    def _parts(self, sizes: ProductsSizes) -> list[ReadyProducts]:
        """The launches of a step, each for some of its rows."""
        if sizes.fits:
            return [self._ready_for(sizes)]
        most = sizes.most_rows
        counts = [most] * (sizes.rows // most) + [sizes.rows % most] * bool(sizes.rows % most)
        capability = self._plans.driver.device_info().capability
        return [self._ready_for(sizes.part(count, capability)) for count in counts]

    def _ready_for(self, sizes: ProductsSizes) -> ReadyProducts:
        ready = self._ready.get(sizes)
        if ready is None:
            plan = self._plans.find(sizes)
            while len(self._ready) >= _MOST_READY:
                del self._ready[next(iter(self._ready))]
            ready = self._ready[sizes] = ReadyProducts.make(
                plan, self._group, self._error, self.driver
            )
        return ready

    def _follow_pool(self) -> None:
        """Takes the slots over that a pool has grown to."""
        if self._serial == self.pool.serial and not self.pool.is_closed:
            return
        group = self.pool[self.name]  # a closed pool says so
        self._sizes = replace(self._sizes, slots=group.slots)
        self._group, self._ready, self._serial = group, {}, self.pool.serial

    def _keep(self) -> None:
        if active.current() is None:
            return
        for name, tensor in (*self._group.named_tensors(), (f"{self.name}.error", self._error)):
            active.keep(tensor, name)
        for bank, source in self._group.sources.items():
            active.keep(source, f"{self.name}.{bank} experts")

    def _checked(self, refs: dict[str, TensorRef]) -> ProductsSizes:
        ids, mine = refs["ids"], self._sizes
        _expect("ids.shape", len(ids.shape) == 2 and min(ids.shape, default=0) > 0,
                "[rows, top_k], not empty", ids.shape)  # fmt: skip
        rows, top_k = ids.shape
        shapes = {"x": (rows, mine.hidden), "ids": ids.shape, "weights": ids.shape,
                  "out": (rows, mine.hidden)}  # fmt: skip
        for name, shape in shapes.items():
            _expect(f"{name}.shape", refs[name].shape == shape, shape, refs[name].shape)
            _expect(f"{name}.strides", refs[name].is_contiguous, "dense memory", refs[name].strides)
        for name in ("x", "out"):
            _expect(f"{name}.dtype", refs[name].dtype == mine.dtype, mine.dtype, refs[name].dtype)
        home = describe(self._error)
        for name, ref in refs.items():
            at, wanted = (ref.device_kind, ref.device), (home.device_kind, home.device)
            _expect(f"{name}.device", at == wanted, "{}:{}".format(*wanted), "{}:{}".format(*at))
        for name in ("x", "scratch"):
            _expect(name, refs[name].address % 16 == 0, "an address that is a multiple of 16",
                    f"{refs[name].address:#x}")  # fmt: skip
        _check_apart(refs)
        sizes = self.sizes_of(rows, top_k, ids=ids.dtype, weights=refs["weights"].dtype)
        needed = self.scratch_bytes(sizes)
        if refs["scratch"].nbytes < needed or not refs["scratch"].is_contiguous:
            raise CapacityError(
                f"scratch: expected {needed} bytes side by side, got {refs['scratch'].nbytes}"
            )
        return sizes


def _measure(group: SlotGroup, options: ProductOptions) -> ProductsSizes:
    if set(group.rows) != set(_BANKS):
        raise ConfigurationError(
            f"group {group.name}: expected banks {' and '.join(_BANKS)}, got "
            f"{', '.join(sorted(group.rows))}"
        )
    both, down, layout = group.rows["gate_up"], group.rows["down"], options.layout
    for bank, rows in group.rows.items():
        _expect(f"{group.name}.{bank}.shape", len(rows.shape) == 3, "3 axes", rows.shape)
    hidden, inner = down.shape[1:] if layout == "nk" else reversed(down.shape[1:])
    wanted = (2 * inner, hidden) if layout == "nk" else (hidden, 2 * inner)
    _expect(f"{group.name}.gate_up.shape", both.shape[1:] == wanted,
            f"[experts, {wanted[0]}, {wanted[1]}] for down {down.shape} in layout {layout!r}",
            both.shape)  # fmt: skip
    _expect(f"{group.name}.gate_up.dtype", both.dtype == down.dtype, down.dtype, both.dtype)
    return ProductsSizes(group.experts, group.slots, hidden, inner, down.dtype, options)


def _check_apart(refs: dict[str, TensorRef]) -> None:
    spans = sorted((ref.address, ref.address + ref.nbytes, name) for name, ref in refs.items())
    for (_, end, name), (start, _, other) in pairwise(spans):
        _expect(other, end <= start, f"memory apart from {name}", f"{start:#x}")


def _expect(field: str, holds: bool, expected: object, got: object) -> None:
    if not holds:
        raise ConfigurationError(f"{field}: expected {expected}, got {got}")
