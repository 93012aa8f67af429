"""compile=True: one compiled region for the whole step, refused where it cannot work."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.decode_models import VOCABULARY, make_model, make_prompt
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

from graphcore.decode import (
    CUDAGraphAR,
    Guidance,
    Sampling,
    StaticKVCache,
    compiled_step,
    generate,
)
from graphcore.decode.compiled_step import CompiledStep
from graphcore.driver import Driver, open_driver
from graphcore.errors import CaptureError, ConfigurationError

TOKENS = 12


@pytest.fixture(autouse=True)
def one_compiler() -> Iterator[None]:
    """A step has few kernels: they are compiled before a pool of compilers has started."""
    with torch._inductor.config.patch(compile_threads=1):
        yield


@pytest.fixture(scope="module")
def small() -> Any:
    """One layer: compiling it takes a few seconds."""
    torch.manual_seed(1234)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = LlamaConfig(
        num_hidden_layers=1,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        eos_token_id=None,
        initializer_range=0.2,
        **sizes,
    )
    return LlamaForCausalLM(config).eval()


def steps(runner: CUDAGraphAR, compiled: CompiledStep, prompt: torch.Tensor) -> list[int]:
    """Ids that the compiled step decodes behind ``prompt``, as a graph of it would."""
    runner.cache.reset()
    runner.capture(prompt)
    found = []
    for _ in range(TOKENS):
        with torch.no_grad(), runner._state.written_by(runner):
            compiled.run()
        found.append(int(runner.token))
    return found


def eager(model: Any, prompt: torch.Tensor) -> list[int]:
    with CUDAGraphAR(model, max_seq_len=40, capture=False) as runner:
        ids = runner.generate(prompt, TOKENS, ())
    found: list[int] = ids[0, prompt.shape[1] :].tolist()
    return found


def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces as ever, and runs what was traced as it is."""
    monkeypatch.setattr(compiled_step, "_fusing_inductor", lambda graph, inputs: graph.forward)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        pytest.param(True, "expected the cuda driver", id="emulated driver"),
        pytest.param({}, "expected the cuda driver", id="options on the emulated driver"),
        pytest.param("inductor", "expected a bool or a mapping", id="a word"),
        pytest.param(None, "expected a bool or a mapping", id="None"),
    ],
)
def test_a_step_that_cannot_be_compiled_is_refused_at_construction(how: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"compile: {message}"):
        CUDAGraphAR(make_model(), max_seq_len=16, driver=open_driver("emulated"), compile=how)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"triton.cudagraphs": True}, "cudagraphs to be off", id="inductor's graphs"),
        pytest.param({"no_such_option": 1}, "no_such_option", id="unknown"),
        pytest.param({"coordinate_descent_tuning": "yes"}, "Unexpected type", id="wrong type"),
    ],
)
def test_options_that_inductor_cannot_take_are_refused_before_anything_is_compiled(
    options: Any, message: str
) -> None:
    class Device:
        is_emulated = False

    driver: Any = Device()
    with pytest.raises(ConfigurationError, match=message):
        compiled_step.check_compile(options, driver)
    compiled_step.check_compile({"coordinate_descent_tuning": True}, driver)
    with pytest.raises(ConfigurationError, match="compile: expected capture=True"):
        compiled_step.check_compile(True, driver, capture=False)


@pytest.mark.slow
def test_a_compiled_step_decodes_the_eager_tokens_in_one_region_without_a_library_product(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import graph as inductor_graph

    written: list[str] = []
    lowering = inductor_graph.GraphLowering.compile_to_module

    def noted(self: Any) -> Any:
        module = lowering(self)
        written.append(open(module.__file__, encoding="utf-8").read())  # noqa: SIM115
        return module

    monkeypatch.setattr(inductor_graph.GraphLowering, "compile_to_module", noted)
    prompts = make_prompt(5), make_prompt(9, seed=3)
    with (
        CUDAGraphAR(small, max_seq_len=40, capture=False) as runner,
        torch._inductor.config.patch(force_disable_caches=True),
    ):
        compiled = CompiledStep(runner._step)
        counters.clear()
        found = [steps(runner, compiled, prompt) for prompt in prompts]
    assert found == [eager(small, prompt) for prompt in prompts]
    assert counters["stats"]["unique_graphs"] == 1  # neither prompt nor position compiles again
    assert len(written) == 1
    assert "extern_kernels.mm" not in written[0]
    assert "extern_kernels.addmm" not in written[0]


RAGGED = torch.ones(2, 6, dtype=torch.int64)
RAGGED[0, :3] = 0
FILTERS = Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=3)


@pytest.mark.parametrize(
    ("prompt", "inputs", "options"),
    [
        pytest.param(make_prompt(5), {}, {"sampling": FILTERS}, id="sampling"),
        pytest.param(
            make_prompt(6, batch=2), {"attention_mask": RAGGED}, {"batch_size": 2}, id="ragged rows"
        ),
        pytest.param(
            make_prompt(5),
            {"negative_input_ids": make_prompt(3, seed=9)},
            {"guidance": Guidance(3.0)},
            id="guidance",
        ),
    ],
)
def test_every_kind_of_step_is_one_region_that_decodes_as_the_step_itself(
    small: Any, monkeypatch: pytest.MonkeyPatch, prompt: torch.Tensor, inputs: Any, options: Any
) -> None:
    without_inductor(monkeypatch)
    decoded = []
    for is_compiled in (False, True):
        with CUDAGraphAR(small, max_seq_len=40, capture=False, **options) as runner:
            runner.capture(prompt, **inputs)
            run = CompiledStep(runner._step).run if is_compiled else runner._step.run
            tokens = []
            for _ in range(TOKENS):
                with torch.no_grad(), runner._state.written_by(runner):
                    run()
                tokens.append(runner.token.tolist())
            decoded.append(tokens)
    assert decoded[0] == decoded[1]


def test_more_runners_than_torch_compiles_one_code_for_can_compile_their_steps(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_inductor(monkeypatch)
    prompt = make_prompt(4)
    expected = eager(small, prompt)
    for _ in range(3):
        with (
            CUDAGraphAR(small, max_seq_len=40, capture=False) as runner,
            torch._dynamo.config.patch(recompile_limit=1),
        ):
            assert steps(runner, CompiledStep(runner._step), prompt) == expected


def test_a_failed_compilation_says_why_and_leaves_the_step_usable(
    small: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise ValueError("no such machine")

    prompt = make_prompt(4)
    monkeypatch.setattr(compiled_step, "_fusing_inductor", broken)
    with CUDAGraphAR(small, max_seq_len=40, capture=False) as runner:
        with pytest.raises(CaptureError, match=r"could not be compiled: .*no such machine") as info:
            steps(runner, CompiledStep(runner._step), prompt)
        assert info.value.__cause__ is not None
        without_inductor(monkeypatch)
        with caplog.at_level(logging.INFO, "graphcore"):
            assert steps(runner, CompiledStep(runner._step), prompt) == eager(small, prompt)
    assert sum("compiled the decode step" in line for line in caplog.messages) == 1


ROWS, INNER, COLUMNS = 3, 7, 5


@pytest.mark.parametrize(
    ("product", "operation", "shapes"),
    [
        pytest.param("_mm", torch.mm, [(1, INNER), (INNER, COLUMNS)], id="mm, one row"),
        pytest.param("_mm", torch.mm, [(ROWS, INNER), (INNER, 1)], id="mm, one column"),
        pytest.param("_addmm", torch.addmm, [(COLUMNS,), (1, INNER), (INNER, COLUMNS)], id="addmm"),
        pytest.param("_bmm", torch.bmm, [(2, 1, INNER), (2, INNER, COLUMNS)], id="bmm, one row"),
        pytest.param("_bmm", torch.bmm, [(2, ROWS, INNER), (2, INNER, 1)], id="bmm, one column"),
    ],
)
def test_a_product_of_one_row_is_the_reduction_that_it_is_replaced_by(
    product: str, operation: Any, shapes: list[tuple[int, ...]]
) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    found = getattr(compiled_step, product)(*tensors)
    torch.testing.assert_close(found, operation(*tensors), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("product", "shapes"),
    [
        pytest.param("_mm", [(ROWS, INNER), (INNER, COLUMNS)], id="mm"),
        pytest.param("_addmm", [(COLUMNS,), (ROWS, INNER), (INNER, COLUMNS)], id="addmm"),
        pytest.param("_bmm", [(2, ROWS, INNER), (2, INNER, COLUMNS)], id="bmm"),
    ],
)
def test_products_of_several_rows_stay_products(
    product: str, shapes: list[tuple[int, ...]]
) -> None:
    tensors = [torch.ones(shape) for shape in shapes]
    assert getattr(compiled_step, product)(*tensors) is NotImplemented


# ---- on a device ---------------------------------------------------------------------------------

gpu = pytest.mark.gpu


@pytest.fixture
def cuda() -> Driver:
    return open_driver("cuda")


@pytest.fixture
def model(small: Any, cuda: Driver) -> Any:
    """The small one on the device: what is proved of it does not depend on the number of layers."""
    return copy.deepcopy(small).to(f"cuda:{cuda.device}")


def on_device(architecture: str, driver: Driver, dtype: torch.dtype = torch.float32) -> Any:
    return make_model(architecture, device=f"cuda:{driver.device}", dtype=dtype)


def nodes_of(runner: CUDAGraphAR) -> int:
    assert runner.graph is not None
    return len(runner.graph.snapshot().nodes)


@pytest.mark.lengthy
@gpu
@pytest.mark.parametrize(
    ("architecture", "share"),
    [
        pytest.param("llama", 1 / 2, id="llama"),
        pytest.param("qwen3", 1 / 2, id="qwen3"),
        # its norms and its products with a bias are single kernels already: what fuses is mostly
        # the activation, eight of a layer's nineteen nodes
        pytest.param("gpt2", 3 / 4, id="gpt2"),
    ],
)
def test_a_captured_compiled_step_gives_the_eager_tokens_with_fewer_nodes(
    cuda: Driver, architecture: str, share: float
) -> None:
    model = on_device(architecture, cuda)
    prompt = make_prompt(6, device=str(model.device))
    with (
        CUDAGraphAR(model, max_seq_len=48) as plain,
        CUDAGraphAR(model, max_seq_len=48, compile=True) as compiled,
    ):
        expected = plain.generate(prompt, 30, ())
        addresses = {
            name: tensor.data_ptr() for name, tensor in compiled.cache.named_tensors().items()
        }
        found = compiled.generate(prompt, 30, ())
        assert found.tolist() == expected.tolist()
        nodes, of_plain = nodes_of(compiled), nodes_of(plain)
        assert nodes < share * of_plain
        assert addresses == {
            name: tensor.data_ptr() for name, tensor in compiled.cache.named_tensors().items()
        }


@pytest.mark.lengthy
@gpu
def test_a_second_prompt_and_later_positions_compile_and_capture_nothing_anew(model: Any) -> None:
    prompts = [make_prompt(n, device=str(model.device), seed=n) for n in (3, 11)]
    with CUDAGraphAR(model, max_seq_len=48) as plain:
        expected = [plain.generate(prompt, 20, ()).tolist() for prompt in prompts]
    counters.clear()
    with CUDAGraphAR(model, max_seq_len=48, compile=True) as runner:
        found = [runner.generate(prompt, 20, ()).tolist() for prompt in prompts]
        assert found == expected
        assert runner.captures == 1
        assert int(runner.position) == runner.cache.seen_tokens == 11 + 20
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.lengthy
@gpu
def test_a_compilation_that_fails_leaves_cache_and_context_as_they_were(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise ValueError("no such machine")

    prompt = make_prompt(6, device=str(model.device))
    with CUDAGraphAR(model, max_seq_len=48, compile=True) as runner:
        with monkeypatch.context() as patch:
            patch.setattr(compiled_step, "_fusing_inductor", broken)
            with pytest.raises(CaptureError, match="could not be compiled"):
                runner.generate(prompt, 8, ())
        assert runner.cache.seen_tokens == int(runner.position) == 0
        assert runner.captures == 0
        found = runner.generate(prompt, 8, ())
    assert found.tolist() == generate(model, prompt, 8, eos_token_id=(), capture=False).ids.tolist()


@pytest.mark.lengthy
@gpu
def test_a_compiled_step_in_bfloat16_is_as_near_to_float32_as_the_eager_one(cuda: Driver) -> None:
    exact, rounded = on_device("llama", cuda), on_device("llama", cuda, torch.bfloat16)
    prompt = make_prompt(6, device=str(exact.device))

    def logits(model: Any, **options: Any) -> torch.Tensor:
        with CUDAGraphAR(model, max_seq_len=48, **options) as runner:
            runner.capture(prompt)
            rows = []
            for token in range(3, 19):
                runner.replay(token)
                rows.append(runner.logits.float().clone())
            return torch.cat(rows)

    reference = logits(exact)
    scale = reference.abs().max()
    compiled = ((logits(rounded, compile=True) - reference).abs().max() / scale).item()
    eager_error = ((logits(rounded, capture=False) - reference).abs().max() / scale).item()
    assert compiled <= 2 * eager_error
    assert compiled < 0.1


@pytest.mark.lengthy
@gpu
def test_a_compiled_step_follows_its_runner_to_another_cache_and_keeps_nothing_of_the_old(
    model: Any,
) -> None:
    prompt = make_prompt(6, device=str(model.device))
    with CUDAGraphAR(model, max_seq_len=48, compile=True) as runner:
        expected = runner.generate(prompt, 20, ()).tolist()
        old = weakref.ref(runner.cache)
        other = StaticKVCache.for_model(model, 48)
        assert runner.generate(prompt, 20, (), cache=other).tolist() == expected
        assert runner.cache is other
        gc.collect()
        assert old() is None


@pytest.mark.lengthy
@gpu
def test_a_compiled_step_decodes_a_generation_in_one_launch(model: Any) -> None:
    prompt = make_prompt(6, device=str(model.device))
    with CUDAGraphAR(model, max_seq_len=48, compile=True) as runner:
        expected = runner.generate(prompt, 20, ()).tolist()
        assert runner.generate_in_one_launch(prompt, 20, ()).tolist() == expected


@pytest.mark.lengthy
@gpu
def test_generate_compiles_where_asked_and_decodes_eagerly_where_that_fails(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise ValueError("no such machine")

    prompt = make_prompt(6, device=str(model.device))
    compiled = generate(model, prompt, 8, eos_token_id=(), compile=True)
    assert (compiled.execution, compiled.captures) == ("graph", 1)
    monkeypatch.setattr(compiled_step, "_fusing_inductor", broken)
    found = generate(model, prompt, 8, eos_token_id=(), compile=True)
    assert found.execution == "eager"
    assert "could not be compiled" in found.reason
    assert found.ids.tolist() == compiled.ids.tolist()
