"""The sizes a static cache is made from: checked, and spread over the layers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from graphcore.errors import ConfigurationError
from graphcore.executable.memory_report import in_words

PerLayer = int | Sequence[int]
LayerShapes = tuple[tuple[int, ...], tuple[int, ...]]
"""Shapes of a layer's K and V buffers: ``[batch, heads, slots, head_dim]``."""
Windows = int | Sequence[int | None] | None


def check_positive(field: str, value: object) -> None:
    """Raises ConfigurationError unless ``value`` is an int above 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigurationError(f"{field}: expected a positive int, got {value!r}")


def check_positives(**sizes: object) -> None:
    """Raises ConfigurationError unless all are ints above 0; names the first that is not."""
    for field, value in sizes.items():
        check_positive(field, value)


def check_position(position: object, capacity: int) -> None:
    """Raises ConfigurationError unless ``position`` is an int from 0 to ``capacity``."""
    is_int = isinstance(position, int) and not isinstance(position, bool)
    if not is_int or not 0 <= position <= capacity:  # type: ignore[operator]
        raise ConfigurationError(
            f"position: expected 0 to {capacity} (max_seq_len), got {position!r}"
        )


def check_dtype(field: str, dtype: object) -> None:
    """Raises ConfigurationError unless ``dtype`` is a floating torch dtype."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigurationError(f"{field}: expected a floating torch dtype, got {dtype!r}")


def per_layer(field: str, value: PerLayer, num_layers: int) -> list[int]:
    """``value`` for each layer: itself, or the list it is."""
    if not isinstance(value, int):
        if not isinstance(value, (list, tuple)):
            raise ConfigurationError(
                f"{field}: expected a positive int, or a list of one for each layer, got {value!r}"
            )
        if len(value) != num_layers:
            raise ConfigurationError(
                f"{field}: expected one value for each of {num_layers} layers, got {len(value)}"
            )
        for index, size in enumerate(value):
            check_positive(f"{field} of layer {index}", size)
        return list(value)
    check_positive(field, value)
    return [value] * num_layers


def layer_shapes(
    batch_size: int,
    heads: list[int],
    slots: list[int],
    key_dims: list[int],
    value_dims: list[int] | None,
) -> list[LayerShapes]:
    """The buffers of each layer; ``value_dims`` None: as wide as K."""
    return [
        ((batch_size, count, held, key), (batch_size, count, held, value))
        for count, held, key, value in zip(
            heads, slots, key_dims, value_dims or key_dims, strict=True
        )
    ]


def need_of_cache(shapes: list[LayerShapes], owners: tuple[int, ...], dtype: torch.dtype) -> str:
    """What K and V of the layers that store some take, in words."""
    count = sum(math.prod(buffer) for index in owners for buffer in shapes[index])
    batch = shapes[0][0][0]
    slots = max(shapes[index][0][2] for index in owners)
    return (
        f"K and V of {len(owners)} layers for {batch} rows of {slots} tokens in {dtype} take "
        f"{in_words(count * dtype.itemsize)} in all; fewer tokens or rows, or a narrower dtype, "
        "take less"
    )


def checked_windows(value: object, num_layers: int, capacity: int) -> tuple[int | None, ...]:
    """The window of each layer; None where it holds all of ``capacity`` tokens anyway."""
    listed = [value] * num_layers if value is None or isinstance(value, int) else value
    if not isinstance(listed, (list, tuple)):
        raise ConfigurationError(
            "windows: expected None, a positive int, or a list of one or None for each layer, got "
            f"{value!r}"
        )
    if len(listed) != num_layers:
        raise ConfigurationError(
            f"windows: expected one value for each of {num_layers} layers, got {len(listed)}"
        )
    for index, window in enumerate(listed):
        if window is not None:
            check_positive(f"windows of layer {index}", window)
    return tuple(None if window is None or window >= capacity else window for window in listed)


def checked_owners(owning_layers: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    """The layers that store K/V, ascending; all where None."""
    if owning_layers is None:
        return tuple(range(num_layers))
    if not isinstance(owning_layers, (list, tuple, range)) or not all(
        isinstance(index, int) for index in owning_layers
    ):
        raise ConfigurationError(f"owning_layers: expected layer indices, got {owning_layers!r}")
    owners = tuple(sorted(set(owning_layers)))
    if not owners or len(owners) != len(owning_layers) or not 0 <= owners[0] <= owners[-1]:
        raise ConfigurationError(f"owning_layers: expected layer indices, got {owning_layers!r}")
    if owners[-1] >= num_layers:
        raise ConfigurationError(
            f"owning_layers: expected indices below {num_layers}, got {owners[-1]}"
        )
    return owners


def checked_device(device: object) -> torch.device:
    """``device``, if torch can make tensors there."""
    try:
        found = torch.empty(0, device=device).device  # type: ignore[call-overload]
    except (RuntimeError, AssertionError, TypeError) as error:  # all three, by what is wrong
        reason = str(error).strip().partition("\n")[0]
        raise ConfigurationError(
            f"device: expected a device torch can use, got {device!r}: {reason}"
        ) from error
    made: torch.device = found
    return made
