"""SlotExperts: a torch module in the place of a model's experts, which lie in slots.

Called as the experts of transformers are: rows, the experts that the router chose for each, and
their weights. What it needs it takes from torch's allocator, so that inside a capture memory is the
graph's. It has no parameters: a model's own are those that lie on the device.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import replace
from typing import Any, NoReturn, SupportsIndex

import torch

from graphcore.driver import active
from graphcore.errors import CacheTypeError, ConfigurationError, LifecycleError
from graphcore.interop import current_stream
from graphcore.moe.layers.products_launch import ProductsTensors
from graphcore.moe.layers.products_plan import ProductsSizes
from graphcore.moe.layers.route_binding import RouteBinding
from graphcore.moe.layers.slot_products import SlotProducts
from graphcore.moe.slots.group_use import GroupUse

_ALIGNMENT = 16
_names: dict[torch.dtype, str] = {
    torch.int32: "int32",
    torch.int64: "int64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
_numbers = itertools.count(1)
_living: weakref.WeakValueDictionary[int, SlotExperts] = weakref.WeakValueDictionary()
"""What compiled code means by a number: a module cannot be an argument of an operator."""


@torch.library.custom_op("graphcore::slot_experts", mutates_args=())
def slot_experts(
    hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, number: int
) -> torch.Tensor:
    """Experts in slots as one operator, which is how compiled code calls them."""
    return _living[number].run(hidden_states, top_k_index, top_k_weights)


@slot_experts.register_fake
def _(
    hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, number: int
) -> torch.Tensor:
    del top_k_index, top_k_weights, number
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)


class SlotExperts(torch.nn.Module):
    """The experts of one group: rows [rows, hidden] in, their weighted sums out.

    A step whose routes have a slot each is one pass; more routes go through the slots in parts,
    with the same bits. Nothing here waits for the device; a captured step follows experts that
    move. torch.compile takes it for one operator.

    Args:
        products: The group's.
        experts: The module whose place this one takes, if any; it goes on holding the weights.
    """

    def __init__(self, products: SlotProducts, experts: Any = None) -> None:
        super().__init__()
        self.products = products
        self._number = next(_numbers)
        _living[self._number] = self
        self._original = (experts,)  # in a tuple it is no submodule: its weights lie on the host
        sizes = products.sizes
        self.num_experts, self.hidden_dim = sizes.experts, sizes.hidden
        self.intermediate_dim = sizes.inner
        self._known: dict[tuple[Any, ...], tuple[ProductsSizes, int]] = {}
        self._bound: dict[tuple[int, ...], RouteBinding] = {}
        self._serial = products.pool.serial

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """The weighted sum of each row's experts, in F32, rounded once to the rows' type.

        Args:
            hidden_states: [rows, hidden].
            top_k_index: int32 or int64 [rows, top_k].
            top_k_weights: float32, float16 or bfloat16 [rows, top_k].

        Raises:
            CapacityError: A row has more experts than there are slots.
            ConfigurationError: Tensors of another shape, element type or device.
            CudaError: The driver refused a launch.
            LifecycleError: The experts are the model's own again.
        """
        if torch.compiler.is_compiling():
            made: torch.Tensor = slot_experts(
                hidden_states, top_k_index, top_k_weights, self._number
            )
            return made
        if hidden_states.requires_grad and torch.is_grad_enabled():
            apply: Any = _WithoutGradient.apply
            out: torch.Tensor = apply(hidden_states, top_k_index, top_k_weights, self)
            return out
        return self.run(hidden_states, top_k_index, top_k_weights)

    def run(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As :meth:`forward`, whatever gradients are wanted."""
        if self.products.pool.is_closed:
            raise LifecycleError(
                f"experts of {self.products.name}: expected an open pool, got one that was closed"
            )
        bound = self._bound.get(ids.shape)
        if bound is not None and not bound.is_current:  # the pool has grown: whose step it was asks
            del self._bound[ids.shape]
            bound = None
        sizes, scratch_bytes = self._sizes_of(x, ids, weights, is_bound=bound is not None)
        if bound is not None:
            ids = bound.take(ids)
        x, ids, weights = _dense(x), _dense(ids), _dense(weights)
        out = torch.empty_like(x)  # contiguous, as x is by now
        scratch = torch.empty(scratch_bytes, dtype=torch.uint8, device=x.device)
        outputs = 0 if bound is None else bound.outputs
        x_at, ids_at, weights_at, out_at, scratch_at = (
            each.data_ptr() for each in (x, ids, weights, out, scratch)
        )
        where = ProductsTensors(x_at, ids_at, weights_at, out_at, scratch_at, outputs)
        self._keep_alive(x, ids, weights, out, scratch)
        self.products.launch_at(sizes, where, current_stream(self.products.driver))
        return out

    def bind(self, rows: int, top_k: int) -> GroupUse:
        """Gives the routes of steps of ``rows`` rows a place for life, as GraphReuse asks for.

        From then on such steps copy their ids there first, until the pool grows: then the step has
        to be made again.

        Raises:
            CaptureError: Inside a capture.
            CudaError: Out of memory.
        """
        found = self._bound.get((rows, top_k))
        if found is None or not found.is_current:
            found = self._bound[rows, top_k] = RouteBinding(
                self.products.pool, self.products.name, rows, top_k
            )
        return found.use

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise CacheTypeError(
            "SlotExperts: cannot be copied or pickled, its slots are one model's; restore() the "
            "model first, or save its state_dict()"
        )

    def extra_repr(self) -> str:
        sizes = self.products.sizes
        return f"{self.products.name}: {sizes.slots} slots for {sizes.experts} experts"

    # ---- weights, which are the original module's ------------------------------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """What the model's own experts would save, so that a saved model is whole."""
        (experts,) = self._original
        if experts is not None:
            experts._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        if any(name.startswith(prefix) for name in state_dict):
            raise LifecycleError(
                f"load_state_dict: expected a model with experts of its own, got experts in slots "
                f"({prefix.rstrip('.')}), which would not follow; restore() first"
            )

    # ---- inside ---------------------------------------------------------------------------------

    def _sizes_of(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, is_bound: bool
    ) -> tuple[ProductsSizes, int]:
        if self._serial != self.products.pool.serial:
            self._known, self._serial = {}, self.products.pool.serial
        key = (x.shape, ids.shape, weights.shape, x.dtype, ids.dtype, weights.dtype, x.device,
               ids.device, weights.device, self.products.leaves_slots_alone, is_bound)  # fmt: skip
        found = self._known.get(key)
        if found is None:
            self._check(x, ids, weights)
            sizes = self.products.sizes_of(
                *ids.shape, ids=_names[ids.dtype], weights=_names[weights.dtype]
            )
            if len(self._known) > 1000:
                self._known.clear()
            if is_bound:
                sizes = replace(sizes, ids="int64")  # as they lie in their place
            found = self._known[key] = (sizes, self.products.scratch_bytes(sizes))
        return found

    def _check(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        sizes, driver = self.products.sizes, self.products.driver
        device = "cpu" if driver.is_emulated else f"cuda:{driver.device}"
        rows = x.shape[:1]
        for name, tensor, dtypes in (
            ("hidden_states", x, (sizes.dtype,)),
            ("top_k_index", ids, ("int64", "int32")),
            ("top_k_weights", weights, ("float32", "float16", "bfloat16")),
        ):
            _expect(f"{name}.dtype", _names.get(tensor.dtype) in dtypes, " or ".join(dtypes),
                    tensor.dtype)  # fmt: skip
            _expect(f"{name}.device", str(tensor.device) == device, device, tensor.device)
            _expect(f"{name}.shape", tensor.dim() == 2 and tensor.shape[:1] == rows,
                    "[rows, ...] of as many rows", tuple(tensor.shape))  # fmt: skip
        _expect("top_k_index.shape", ids.shape[1] > 0, "[rows, top_k] of an expert or more",
                tuple(ids.shape))  # fmt: skip
        _expect("hidden_states.shape", x.shape[1] == sizes.hidden, f"[rows, {sizes.hidden}]",
                tuple(x.shape))  # fmt: skip
        _expect("top_k_weights.shape", weights.shape == ids.shape, tuple(ids.shape),
                tuple(weights.shape))  # fmt: skip

    def _keep_alive(self, *tensors: torch.Tensor) -> None:
        # on a device what torch allocates in a capture lies in the graph's pool; a recording holds
        # only what torch's own operations use
        if self.products.driver.is_emulated:
            for tensor in tensors:
                active.keep(tensor, f"{self.products.name} step")


class _WithoutGradient(torch.autograd.Function):
    """Runs experts in slots where gradients are recorded; going back through it is refused."""

    @staticmethod
    def forward(
        context: Any,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        experts: SlotExperts,
    ) -> torch.Tensor:
        del context
        return experts.run(x, ids, weights)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        del context, gradients
        raise LifecycleError(
            "backward: expected a model with experts of its own, got experts in slots, which have "
            "no gradients; restore() first, or call the model under torch.no_grad()"
        )


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor side by side in memory, where the kernels can read it."""
    dense = tensor.detach().contiguous()
    return dense if dense.data_ptr() % _ALIGNMENT == 0 else dense.clone()


def _expect(field: str, holds: bool, expected: object, got: object) -> None:
    if not holds:
        raise ConfigurationError(f"{field}: expected {expected}, got {got}")
