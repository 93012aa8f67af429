"""Which errors each call of the driver can give, by what CUDA documents of the calls behind it.

Beside those of a call itself: what any call may bring that a launch before it left behind, and
what every call answers in a process whose driver or context is gone.
"""

from __future__ import annotations

from graphcore.driver import Driver

ANY = ("INVALID_VALUE", "INVALID_CONTEXT", "DEINITIALIZED")
LEFT_BEHIND = ("ILLEGAL_ADDRESS", "LAUNCH_FAILED", "ECC_UNCORRECTABLE")
CAPTURING = ("STREAM_CAPTURE_UNSUPPORTED", "STREAM_CAPTURE_IMPLICIT")
MEMORY = ("OUT_OF_MEMORY",)
HANDLE = ("INVALID_HANDLE",)
LAUNCH = (
    "LAUNCH_OUT_OF_RESOURCES",
    "LAUNCH_TIMEOUT",
    "COOPERATIVE_LAUNCH_TOO_LARGE",
    "INVALID_IMAGE",
    "NOT_SUPPORTED",
)
LOADING = ("INVALID_PTX", "NO_BINARY_FOR_GPU", "NOT_FOUND", "JIT_COMPILER_NOT_FOUND")
NODES = ("NOT_SUPPORTED",)
UPDATE = ("GRAPH_EXEC_UPDATE_FAILURE", "NOT_PERMITTED")

OF_ITSELF: dict[str, tuple[str, ...]] = {
    "device_info": (),
    "context_id": (),
    "memory_info": (),
    "create_stream": MEMORY,
    "destroy_stream": HANDLE,
    "synchronize_stream": (*HANDLE, *CAPTURING, "NOT_PERMITTED"),
    "query_stream": (*HANDLE, *CAPTURING),
    "stream_is_blocking": (*HANDLE, "STREAM_CAPTURE_UNSUPPORTED"),
    "stream_device": HANDLE,
    "wait_event": (*HANDLE, "STREAM_CAPTURE_ISOLATION", "STREAM_CAPTURE_MERGE"),
    "create_event": MEMORY,
    "destroy_event": HANDLE,
    "record_event": (*HANDLE, "STREAM_CAPTURE_INVALIDATED"),
    "synchronize_event": (*HANDLE, "CAPTURED_EVENT", *CAPTURING),
    "query_event": (*HANDLE, "CAPTURED_EVENT", *CAPTURING),
    "elapsed_ms": (*HANDLE, "NOT_READY"),
    "alloc": (*MEMORY, *CAPTURING, "EXTERNAL_DEVICE"),
    "free": CAPTURING,
    "alloc_pinned": (*MEMORY, *CAPTURING),
    "free_pinned": CAPTURING,
    "copy": (*HANDLE, *CAPTURING, "STREAM_CAPTURE_INVALIDATED"),
    "fill": (*HANDLE, *CAPTURING, "STREAM_CAPTURE_INVALIDATED"),
    "read": CAPTURING,
    "write": CAPTURING,
    "allocation_of": (),
    "function": (*LOADING, *MEMORY),
    "function_info": HANDLE,
    "encode_tensor_map": ("NOT_SUPPORTED",),
    "launch": (*LAUNCH, "STREAM_CAPTURE_INVALIDATED", "STREAM_CAPTURE_IMPLICIT"),
    "launch_host": (*HANDLE, "STREAM_CAPTURE_INVALIDATED", "NOT_SUPPORTED"),
    "begin_capture": ("ILLEGAL_STATE", *CAPTURING),
    "end_capture": (
        "STREAM_CAPTURE_INVALIDATED",
        "STREAM_CAPTURE_UNJOINED",
        "STREAM_CAPTURE_UNMATCHED",
        "STREAM_CAPTURE_WRONG_THREAD",
        *MEMORY,
    ),
    "capture_status": ("STREAM_CAPTURE_IMPLICIT",),
    "set_capture_frontier": ("ILLEGAL_STATE",),
    "exchange_capture_mode": (),
    "create_graph": MEMORY,
    "destroy_graph": (),
    "clone_graph": (*MEMORY, *NODES),
    "add_node": (*MEMORY, *NODES),
    "destroy_node": (),
    "add_edges": NODES,
    "remove_edges": ("LOSSY_QUERY",),
    "nodes": (),
    "edges": ("LOSSY_QUERY",),
    "node_kind": (),
    "node_params": HANDLE,
    "set_node_params": NODES,
    "create_conditional": (*MEMORY, *NODES),
    "instantiate": (*MEMORY, *NODES),
    "destroy_exec": CAPTURING,
    "launch_graph": LAUNCH,
    "upload": MEMORY,
    "update_exec": (*UPDATE, *MEMORY),
    "set_exec_node_params": (*UPDATE, *NODES),
    "set_node_enabled": UPDATE,
    "node_enabled": (),
}

_LOOKS = {"device_info", "context_id", "capture_status", "exchange_capture_mode", "node_kind"}


def codes_of(call: str) -> tuple[str, ...]:
    """Names of all errors that ``call`` can give."""
    behind = () if call in _LOOKS else LEFT_BEHIND
    names = dict.fromkeys((*OF_ITSELF.get(call, ()), *ANY, *behind))
    return tuple(f"CUDA_ERROR_{name}" for name in names)


def unlisted() -> set[str]:
    """Calls of the driver of which this page says nothing: those that other calls are made of."""
    return set(Driver.__abstractmethods__) - OF_ITSELF.keys()
