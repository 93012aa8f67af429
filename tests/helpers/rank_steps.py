"""What ranks do in the tests of agreement, captured collectives and teardown."""

from __future__ import annotations

import contextlib
import time

import torch
import torch.distributed as dist
from helpers.ranks import die

import graphcore
from graphcore.errors import ConfigurationError, RankError
from graphcore.executable.communicating import close_graphs
from graphcore.parallel import Ranks, warm_up

LIMIT = 2.0


def told(function, *args):
    """(type, text, seconds) of what a call raises."""
    begun = time.monotonic()
    try:
        function(*args)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    return "nothing", "", time.monotonic() - begun


# ---- agreeing -----------------------------------------------------------------------------------


def choose():
    with Ranks.join(timeout_seconds=30) as ranks:
        choice = "capture" if ranks.rank == ranks.size - 1 else "replay"
        agreed = ranks.agree("step", choice, among=("replay", "capture"), detail="moved")
        same = ranks.agree("step", "replay", among=("replay", "capture"), value=ranks.rank)
        return str(agreed), str(same), same.values, ranks.cost.rounds, ranks.cost.mean_us > 0


def differ():
    with Ranks.join(timeout_seconds=30) as ranks:
        first = told(lambda: ranks.agree("options", facts={"max_seq_len": 8 + ranks.rank // 3}))
        return first, ranks.agree("options", value=1).values


def fail_on_one():
    with Ranks.join(timeout_seconds=30) as ranks:

        def step():
            with ranks.together("step"):
                if ranks.rank == 1:
                    raise ConfigurationError("max_seq_len: expected 8, got 9")
            ranks.agree("after the step")

        first = told(step)
        return first, ranks.agree("next", value=ranks.rank).values


def out_of_order():
    with Ranks.join(timeout_seconds=30) as ranks:
        return told(ranks.agree, f"step {ranks.rank % 2}")


def leave_early():
    with Ranks.join(timeout_seconds=30) as ranks:
        if ranks.rank == 0:
            with contextlib.suppress(KeyError), ranks:
                raise KeyError("gone")
            return told(ranks.agree, "step")
        return told(ranks.agree, "step")


def die_before_agreeing():
    ranks = Ranks.join(timeout_seconds=LIMIT)
    if ranks.rank == 1:
        die()
    first, second = told(ranks.agree, "step"), told(ranks.agree, "step")
    lost = ranks.lost.missing
    ranks.close()
    return first, second, lost


def die_in_a_replay():
    ranks = Ranks.join(timeout_seconds=LIMIT)
    x = torch.ones(4)
    graph = graphcore.capture_function(lambda: dist.all_reduce(x), warmup=1)
    executable = graph.instantiate()

    def replay():
        with ranks.together("replay"):
            executable.launch()

    replay()
    if ranks.rank == 1:
        die()
    first, second = told(replay), told(ranks.agree, "step")
    ranks.close()
    return first, second, executable.is_closed


def come_late():
    ranks = Ranks.join(timeout_seconds=0.6)
    if ranks.rank == 1:
        time.sleep(1.2)
    found = told(ranks.agree, "step")
    ranks.close()
    return found


def do_not_come():
    """Rank 1 never joins."""
    if dist.get_rank() == 1:
        time.sleep(LIMIT + 0.5)
        return None
    return told(lambda: Ranks.join(timeout_seconds=LIMIT))


# ---- collectives in captures --------------------------------------------------------------------


def capture_every_collective():
    ranks = Ranks.join(timeout_seconds=30)
    size = ranks.size
    x = torch.full((size,), float(ranks.rank + 1))
    gathered, swapped, reduced = torch.zeros(size * size), torch.zeros(size), torch.zeros(1)
    listed = [torch.zeros(size) for _ in range(size)]
    results = {}

    def step():
        total = x * 1
        dist.all_reduce(total)
        dist.all_gather_into_tensor(gathered, x)
        dist.all_gather(listed, x)
        dist.reduce_scatter_tensor(reduced, x)
        work = dist.all_to_all_single(swapped, x, async_op=True)
        work.wait()
        first = total + 1
        dist.broadcast(first, src=size - 1)
        results.update(total=total, first=first)

    with graphcore.capture() as capture:
        step()
    before = gathered.tolist()
    executable = capture.graph.instantiate()
    x.mul_(10)
    executable.launch()
    replayed = _values(results, gathered, swapped, reduced, listed)
    step()
    eager = _values(results, gathered, swapped, reduced, listed)
    ranks.close()
    return before, replayed, eager


def _values(results, *tensors):
    flat = [each.tolist() for each in (*results.values(), *tensors[:-1])]
    return flat + [each.tolist() for each in tensors[-1]]


def capture_functional_collectives():
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.tensor import DTensor, Partial, Replicate, init_device_mesh

    ranks = Ranks.join(timeout_seconds=30)
    mesh = init_device_mesh("cpu", (ranks.size,))
    x = torch.full((2,), float(ranks.rank + 1))
    results = {}

    def step():
        total = functional.all_reduce(x, "sum", dist.group.WORLD) + 1
        partial = DTensor.from_local(x, mesh, [Partial()], run_check=False)
        whole = partial.redistribute(placements=[Replicate()]).to_local() * 2
        results.update(total=total, whole=whole)

    graph = graphcore.capture_function(step, warmup=1)
    executable = graph.instantiate()
    x.mul_(10)
    executable.launch()
    found = {name: each.tolist() for name, each in results.items()}
    kept = [each for each in graph.owners.labels() if "communicator" in each]
    ranks.close()
    return found, kept


def repoint_a_collective():
    ranks = Ranks.join(timeout_seconds=30)
    x, y = torch.ones(2), torch.full((2,), 5.0)
    graph = graphcore.capture_function(lambda: dist.all_reduce(x), warmup=0)
    executable = graph.instantiate()
    executable.rebind([(x, y)])
    executable.launch()
    node = repr(graph.snapshot().nodes[0])
    ranks.close()
    return x.tolist(), y.tolist(), node


def capture_with_a_new_group():
    ranks = Ranks.join(timeout_seconds=30)
    x = torch.ones(2)
    group = dist.new_group()
    inside = told(_capture_once, lambda: dist.all_reduce(x, group=dist.new_group()))
    cold = told(_capture_once, lambda: dist.all_reduce(x, group=group))
    warm_up(group)
    warm = told(_capture_once, lambda: dist.all_reduce(x, group=group))
    ranks.close()
    return cold, inside, warm


def _capture_once(step):
    with graphcore.capture():
        step()


def refuse_in_a_capture():
    ranks = Ranks.join(timeout_seconds=30)
    calls = {
        "barrier": dist.barrier,
        "agree": lambda: ranks.agree("step"),
        "warm_up": warm_up,
        "join": Ranks.join,
    }
    found = {name: told(_capture_once, call)[:2] for name, call in calls.items()}
    ranks.close()
    return found


# ---- the end ------------------------------------------------------------------------------------


def close_graphs_first():
    ranks = Ranks.join(timeout_seconds=30)
    x = torch.ones(2)
    plain = graphcore.capture_function(lambda: x.add_(1)).instantiate()
    graph = graphcore.capture_function(lambda: dist.all_reduce(x), warmup=1)
    clone = graph.clone()
    executable = graph.instantiate()
    executable.launch()
    other = dist.new_group()
    warm_up(other)
    stays = graphcore.capture_function(lambda: dist.all_reduce(x, group=other), warmup=0)
    ranks.close()
    ranks.close()
    closed = executable.is_closed, graph.is_closed, clone.is_closed
    left = plain.is_closed, stays.is_closed
    return closed, left, close_graphs(), stays.is_closed


def refuse_after_the_end():
    ranks = Ranks.join(timeout_seconds=30)
    ranks.close()
    return told(ranks.agree, "step")[:2], repr(ranks)


def raise_rank_error():
    """The error travels as others do."""
    raise RankError("told", failed=[1], missing=[2])


# ---- what cannot be joined ----------------------------------------------------------------------


class OnDevice:
    """Of a driver only what a capture's watch asks for."""

    is_emulated = False


def watch_on_a_device():
    """What a capture on a device does about collectives, without one."""
    from graphcore.driver import active
    from graphcore.interop.torch_collectives import watching_collectives

    ranks = Ranks.join(timeout_seconds=30)
    x = torch.ones(2)
    cold = dist.new_group()
    capture = active.ActiveCapture(OnDevice(), 0, "relaxed")
    active.push(capture)
    try:

        def within(group):
            with watching_collectives(OnDevice()):
                x.add_(1)
                dist.all_reduce(x, group=group)

        refused = told(within, cold)[:2]
        within(ranks.group)
        with watching_collectives(OnDevice()):
            x.add_(1)
    finally:
        active.drop(capture)
    labels = [label for _, label in capture.owners]
    ranks.close()
    return refused, labels


def join_badly():
    """Each a way in which joining cannot work, on one rank of one."""
    import os

    from graphcore.parallel import communicators
    from graphcore.parallel.places import place_of

    found = {
        "timeout": told(lambda: Ranks.join(timeout_seconds=0)),
        "timeout kind": told(lambda: Ranks.join(timeout_seconds=True)),
        "group": told(lambda: Ranks.join(3)),
        "device": told(lambda: Ranks.join(device="cuda")),
        "meta": told(lambda: communicators.check_fits(dist.group.WORLD, torch.device("meta"))),
        "backend": told(lambda: communicators.check_backend(dist, "mpi")),
    }
    dist.destroy_process_group()
    dist.is_nccl_available = lambda: (
        False
    )  # some builds of torch for a machine without a GPU have it
    found["nccl"] = told(lambda: Ranks.join(backend="nccl"))
    torch.cuda.is_available, available = (lambda: True), torch.cuda.is_available
    torch.cuda.device_count, count = (lambda: 1), torch.cuda.device_count
    os.environ["LOCAL_RANK"] = "1"
    found["local rank"] = told(Ranks.join)
    torch.cuda.is_available, torch.cuda.device_count = available, count
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", WORLD_SIZE="2", RANK="1")
    found["no store"] = told(lambda: Ranks.join(backend="gloo", timeout_seconds=0.3))
    dist.is_available = lambda: False
    found["not built"] = told(Ranks.join)
    properties = type("Properties", (), {"uuid": "GPU-7"})
    torch.cuda.get_device_properties = lambda ordinal: properties
    place = place_of(torch.device("cuda", 3)).device
    return {name: each[:2] for name, each in found.items()}, place


def share_a_device():
    """Each rank's device is called what the other's is, as by a wrong LOCAL_RANK."""
    import os

    from graphcore.parallel import ranks as module
    from graphcore.parallel.places import Place

    module.place_of = lambda device: Place("a machine", "GPU-1")
    shared = told(lambda: Ranks.join(timeout_seconds=30))
    module.place_of = lambda device: Place("a machine", f"GPU-{dist.get_rank()}")
    with Ranks.join(timeout_seconds=30) as ranks:  # they go on, with a device each
        values = ranks.agree("step", value=ranks.rank).values
    dist.destroy_process_group()
    dist.is_nccl_available = lambda: False
    absent = told(lambda: Ranks.join(backend="nccl", timeout_seconds=30))
    del os.environ["WORLD_SIZE"]
    alone = told(lambda: Ranks.join(backend="gloo", timeout_seconds=30))
    return shared, values, absent, alone


def lose_the_store():
    """The process that keeps the store goes; the ranks are told so."""
    ranks = Ranks.join(timeout_seconds=1.0)
    ranks._store._store = Gone()
    found = told(ranks.agree, "step")
    ranks.close()
    return found[:2]


class Gone:
    """A store whose process is gone."""

    def _refuse(self, *_):
        raise RuntimeError("Connection reset by peer")

    set = wait = check = get = multi_get = delete_key = _refuse


def be_stuck():
    """What a rank on a GPU does when another has failed and it waits still."""
    ranks = Ranks.join(timeout_seconds=30)
    ranks._note_stuck([1])
    assert ranks.lost is None
    ranks.device = torch.device("cuda")
    ranks._note_stuck([1])
    lost = ranks.lost.failed
    ranks.device = torch.device("cpu")
    found = told(ranks.agree, "step")[:2]
    shown = repr(ranks)
    ranks.close()
    return lost, found, shown
