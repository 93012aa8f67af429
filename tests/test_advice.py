"""What is said to who tries the names and objects of torch, CuPy, cuda.core or transformers."""

import copy
import inspect
import pickle
import pydoc
import re
import sys

import pytest
import torch
from helpers.decode_models import make_model

import graphcore
from graphcore import advice, decode
from graphcore.errors import CacheTypeError, ConfigurationError

WRONG = [
    (kind, name)
    for kind, names in advice.WRONG_NAMES.items()
    for name in names
    if kind != "graphcore"
]


@pytest.fixture(scope="module")
def driver():
    return graphcore.open_driver("emulated")


@pytest.fixture(scope="module")
def objects(driver):
    """One object of every class that gives advice."""
    x, y = torch.ones(4), torch.full((4,), torch.nan)
    with graphcore.capture(driver=driver) as capture:
        torch.add(x, x, out=y)
    graph = capture.graph
    executable = graph.instantiate()
    plan = graphcore.GraphPlan()
    plan.memset(plan.buffer("b", (4,)), 0.0)
    stream = driver.stream()
    kv, own, cross = (
        decode.StaticKVCache(1, 1, 1, 8, 4, dtype=torch.float32, device="cpu") for _ in range(3)
    )
    made = [
        capture,
        driver,
        executable,
        graph,
        plan,
        stream,
        stream.record(),
        graphcore.GraphCache(),
        graphcore.Buffer.allocate(4, driver=driver),
        graphcore.OutputGuard(executable, y),
        executable.update(graph.clone()),
        plan.compile({"b": y}),
        kv,
        decode.EncoderDecoderKVCache(own, cross),
        decode.CUDAGraphAR(make_model("llama"), max_seq_len=16),
    ]
    return {**{type(one).__name__: one for one in made}, "Driver": driver}


@pytest.mark.parametrize(("kind", "name"), WRONG, ids=[f"{k}.{n}" for k, n in WRONG])
def test_a_wrong_name_says_what_to_use_and_counts_as_absent(kind, name, objects):
    obj = objects[kind]
    with pytest.raises(AttributeError) as raised:
        getattr(obj, name)
    assert str(raised.value) == (
        f"{kind!r} object has no attribute {name!r}: {advice.WRONG_NAMES[kind][name]}"
    )
    assert not hasattr(obj, name)
    assert not hasattr(type(obj), name)
    assert getattr(obj, name, "absent") == "absent"
    assert name not in dir(obj)


@pytest.mark.parametrize(("kind", "name"), [("Graph", "reset"), ("GraphExec", "nodes")])
def test_python_adds_no_guess_of_its_own(kind, name, objects, capsys):
    def shown(obj, name):  # as for an error that nobody catches
        with pytest.raises(AttributeError) as raised:
            getattr(obj, name)
        sys.__excepthook__(raised.type, raised.value, None)
        return capsys.readouterr().err

    assert shown(objects[kind], name).endswith(f"{advice.WRONG_NAMES[kind][name]}\n")
    assert "Did you mean: 'snapshot'" in shown(objects["Graph"], "snapshott")


def test_every_class_of_the_list_gives_advice(objects):
    assert set(objects) - {"EmulatedDriver"} == set(advice.WRONG_NAMES) - {"graphcore"}


def test_a_name_that_nobody_foresaw_is_absent_as_ever(objects):
    for obj in objects.values():
        with pytest.raises(AttributeError, match=r"has no attribute 'frobnicate'$"):
            obj.frobnicate  # noqa: B018
        assert not hasattr(obj, "_repr_latex_")
        assert not hasattr(obj, "__fspath__")


# what an advice calls an object -> its class
CALLED = {
    "capture": "Capture",
    "driver": "Driver",
    "end": "Event",
    "executable": "GraphExec",
    "graph": "Graph",
    "other": "Stream",
    "plan": "GraphPlan",
    "stream": "Stream",
}
# a name that is called, or one with dots in it
NAMES = re.compile(r"(?<![\w.)\]])([A-Za-z_]+(?:\.[A-Za-z_]+)+|[A-Za-z_]+(?=\())")


def is_there(path, kind, objects):
    first, *rest = path.split(".")
    if first == "graphcore":
        obj = graphcore
    elif rest and first in CALLED:
        obj = objects[CALLED[first]]
    elif hasattr(objects[kind], first):
        obj, rest = objects[kind], [first, *rest]
    elif first in ("Buffer", "Graph"):
        obj = getattr(graphcore, first)
    else:  # of the drawing that the advice speaks of
        obj, rest = objects["Graph"].drawing(), [first, *rest]
    for name in rest:
        if not hasattr(obj, name):
            return False
        obj = getattr(obj, name)
    return True


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in WRONG}))
def test_what_a_wrong_name_advises_is_there(kind, objects):
    paths = NAMES.findall("; ".join(advice.WRONG_NAMES[kind].values()))
    assert paths or kind in ("StaticKVCache", "UpdateOutcome")
    missing = [path for path in paths if not is_there(path, kind, objects)]
    assert missing == []


def test_advice_that_names_something_else_would_be_found(objects):
    paths = NAMES.findall("graph.instanciate() first, then executable.launch(stream)")
    assert [is_there(path, "Graph", objects) for path in paths] == [False, True]
    assert not is_there("launched", "Graph", objects)
    assert not is_there("graphcore.capture_everything", "Graph", objects)


@pytest.mark.parametrize("name", advice.WRONG_NAMES["graphcore"])
def test_a_wrong_name_of_the_package_says_what_to_write(name):
    said = advice.WRONG_NAMES["graphcore"][name]
    with pytest.raises(AttributeError, match=re.escape(f"has no attribute {name!r}: {said}")):
        getattr(graphcore, name)
    assert not hasattr(graphcore, name)
    if said.startswith("write: "):
        exec(said.removeprefix("write: "), {})


def test_advice_changes_nothing_of_how_objects_are_copied_shown_and_completed(objects):
    with pytest.raises(CacheTypeError, match="cannot be copied"):
        copy.copy(objects["Graph"])
    outcome = objects["UpdateOutcome"]
    assert pickle.loads(pickle.dumps(outcome)) == copy.deepcopy(outcome) == outcome
    for obj in objects.values():
        names = dir(obj)
        assert set(names) >= {name for name in vars(type(obj)) if name.startswith("__")}
        assert names == sorted(names)
    assert "launch" in dir(objects["GraphExec"])
    assert "<svg" in objects["Graph"]._repr_html_()
    for name in ("Graph", "Event", "Stream"):  # what users see in front of an open bracket
        parameters = inspect.signature(getattr(graphcore, name)).parameters
        assert list(parameters)[:2] == ["driver", "handle"]
    page = pydoc.plain(pydoc.render_doc(graphcore.Graph))
    assert "launch_attributes" in page
    assert "replay\n |      Not there: executable = graph.instantiate() first" in page


def test_a_subclass_may_have_the_name():
    class Launched(graphcore.Graph):
        def launch(self):
            return "launched"

    made = object.__new__(Launched)
    made.reset = "set by a user"  # as any attribute that a class does not have
    assert made.launch() == "launched"
    assert made.reset == "set by a user"
    assert {"launch", "reset"} <= set(dir(made))
    assert "replay" not in dir(made)


def test_what_a_base_has_already_stays():
    class Base:
        def clear(self):
            return "cleared by transformers"

    cache = advice.advises(type("StaticKVCache", (Base,), {}))()
    assert cache.clear() == "cleared by transformers"
    assert "clear" in dir(cache)
    assert not hasattr(cache, "empty")


def test_what_is_there_is_read_through_no_function_of_ours(objects):
    for obj in objects.values():
        for base in type(obj).__mro__:
            if base.__module__.startswith("graphcore"):
                assert not {"__getattr__", "__getattribute__"} & set(vars(base)), base


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda o: o["GraphExec"].update(o["GraphExec"]), "executable.graph is one"),
        (lambda o: o["GraphExec"].update(o["Capture"]), "capture.graph is one, after the block"),
        (lambda o: graphcore.Graph.adopt(o["GraphExec"]), "executable.graph is one"),
        (lambda o: graphcore.diff(o["Capture"], o["Graph"]), "capture.graph is one, after the"),
        (lambda o: graphcore.fingerprint(o["GraphPlan"]), "plan.build(buffers) makes one"),
        (lambda o: o["GraphPlan"].embed(o["GraphExec"]), "executable.graph is one"),
        (lambda o: graphcore.trace_replays(o["Graph"]), "graph.instantiate() makes one"),
        (lambda o: graphcore.OutputGuard(o["Graph"], None), "graph.instantiate() makes one"),
        (
            lambda o: graphcore.OutputGuard(o["GraphPlan"], None),
            "plan.build(buffers).instantiate() makes one",
        ),
        (
            lambda o: o["GraphCache"].get_or_capture("key", o["Graph"]),
            "get_or_build(key, lambda: graph)",
        ),
        (
            lambda o: o["GraphCache"].get_or_build("key", o["Graph"]),
            "get_or_build(key, lambda: graph)",
        ),
        (
            lambda o: o["GraphCache"].get_or_build("key", lambda: o["GraphExec"]),
            "executable.graph is one",
        ),
        (
            lambda o: o["GraphCache"].capture_all([1], o["GraphExec"]),
            "give the function that launches the work",
        ),
        (lambda _: graphcore.capture_function(None), "give the function itself, without calling"),
        (lambda o: o["GraphPlan"].call(None), "give the function itself, without calling it"),
        (
            lambda o: o["GraphExec"].launch(o["Graph"]),
            "a graph is launched as graph.instantiate().launch(stream)",
        ),
        (lambda o: o["GraphExec"].launch(o["Driver"]), "driver.stream() makes one"),
        (lambda o: o["Stream"].wait(o["Stream"]), "stream.record() gives one"),
        (lambda o: o["Stream"].record(o["Stream"]), "stream.record() gives one"),
        (lambda _: graphcore.Graph(), "graphcore.capture(), graphcore.capture_function and"),
        (lambda o: graphcore.GraphExec(o["Graph"]), "graph.instantiate() makes executables"),
        (lambda o: graphcore.Stream(o["Driver"]), "driver.stream() makes streams"),
        (lambda _: graphcore.Event(), "driver.event() and stream.record() make events"),
        (lambda _: graphcore.Buffer(torch.ones(4)), "Buffer.view shows that of a tensor"),
    ],
)
def test_a_wrong_object_says_what_to_give(call, expected, objects):
    with pytest.raises((CacheTypeError, ConfigurationError), match=re.escape(expected)):
        call(objects)


def test_a_stream_waits_for_what_another_one_recorded(driver):
    one, other = driver.stream(), driver.stream()
    event = driver.event()
    assert one.record(event) is event
    other.wait(event)
    other.wait(one.record())
    other.synchronize()
