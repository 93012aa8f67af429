"""Whole transformers models, recorded on the CPU and replayed: the bits of eager, step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.torch_capture import TorchCapture, bits, capture, memory_of

from graphcore.driver.emulated import EmulatedDriver

transformers = pytest.importorskip("transformers")

PROMPT = 6
CACHE = 24
SIZES = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "tie_word_embeddings": False,
    "initializer_range": 1.0,  # wide enough that random models do not repeat one token
}

MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_key_value_heads=2, **SIZES)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=101, n_embd=32, n_layer=2, n_head=4)
    ),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(num_key_value_heads=2, head_dim=8, **SIZES)
    ),
    # its experts multiply by groups, which torch's shape functions know for bfloat16 only
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, **SIZES
        )
    ),
}


@pytest.fixture
def driver() -> EmulatedDriver:
    return EmulatedDriver()


def make(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().eval()


class Decoder:
    """One decode step of a model over a static cache, on tensors that stay where they are."""

    def __init__(self, model: Any, prompt: torch.Tensor) -> None:
        self.model = model
        self.cache = transformers.StaticCache(config=model.config, max_cache_len=CACHE)
        self.token = self.forward(prompt).argmax(-1, keepdim=True)
        self.position = torch.tensor([[PROMPT]])

    def forward(self, ids: torch.Tensor, **keywords: Any) -> torch.Tensor:
        output = self.model(ids, past_key_values=self.cache, use_cache=True, **keywords)
        return output.logits[:, -1]

    def step(self) -> torch.Tensor:
        """Logits of the next token; writes the cache at the position and moves on by one."""
        logits = self.forward(self.token, position_ids=self.position)
        self.token.copy_(logits.argmax(-1, keepdim=True))
        self.position.add_(1)
        return logits


def tensors_of(decoder: Decoder) -> list[torch.Tensor]:
    caches = [each for layer in decoder.cache.layers for each in (layer.keys, layer.values)]
    return [decoder.token, decoder.position, *caches, *decoder.model.parameters()]


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral"])
@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_a_decode_step_replays_to_the_tokens_and_logits_of_eager(
    driver: EmulatedDriver, name: str, guard: Callable[[], Any]
) -> None:
    model = make(name)
    prompt = torch.randint(0, 101, (1, PROMPT))
    with guard():
        eager, captured = Decoder(model, prompt), Decoder(model, prompt)
        before = memory_of(tensors_of(captured))
        taken = capture(driver, captured.step)
        assert memory_of(tensors_of(captured)) == before
        tokens = []
        for _ in range(10):
            expected = eager.step()
            assert bits(taken.replay()) == bits(expected)
            assert torch.equal(captured.token, eager.token)
            tokens.append(captured.token.item())
        assert len(set(tokens)) > 3
        pairs = zip(tensors_of(eager), tensors_of(captured), strict=True)
        assert all(bits(left) == bits(right) for left, right in pairs)

        # controls: a wrong token and a frozen position do not give eager's logits
        expected = eager.step()
        captured.token.fill_((captured.token.item() + 1) % 101)
        assert bits(taken.replay()) != bits(expected)
        expected = eager.step()
        captured.token.copy_(eager.token)
        captured.position.fill_(PROMPT)
        assert bits(taken.replay()) != bits(expected)


@pytest.mark.parametrize("name", MODELS)
def test_a_forward_without_cache_replays_on_new_ids(driver: EmulatedDriver, name: str) -> None:
    model = make(name)
    ids = torch.randint(0, 101, (2, PROMPT))
    with torch.no_grad():
        taken = capture(driver, lambda: model(ids, use_cache=False).logits)
        assert taken.result.isnan().all()
        old = model(ids, use_cache=False).logits
        assert bits(taken.replay()) == bits(old)
        ids.copy_(ids.roll(1, 1))
        new = model(ids, use_cache=False).logits
        assert bits(taken.replay()) == bits(new)
        assert bits(old) != bits(new)


def test_a_padding_mask_is_not_looked_at_from_the_host(driver: EmulatedDriver) -> None:
    model = make("llama")
    ids = torch.randint(0, 101, (2, PROMPT))
    mask = torch.ones_like(ids)
    with torch.no_grad():
        taken = capture(driver, lambda: model(ids, attention_mask=mask, use_cache=False).logits)
        full = taken.replay().clone()
        mask[0, :2] = 0
        padded = model(ids, attention_mask=mask, use_cache=False).logits
        replayed = taken.replay()
    torch.testing.assert_close(replayed[0, 2:], padded[0, 2:])
    assert not torch.equal(replayed[0, 2:], full[0, 2:])
    assert torch.equal(replayed[1], full[1])


def test_a_model_in_training_mode_with_dropout_is_refused(driver: EmulatedDriver) -> None:
    from graphcore.errors import CaptureError

    torch.manual_seed(0)
    model = MODELS["gpt2"]().train()
    with pytest.raises(CaptureError, match=r"generator.*model\.eval\(\)"):
        capture(driver, lambda: model(torch.tensor([[1, 2]]), use_cache=False).logits)


def test_a_mixture_of_experts_without_host_reads_replays(driver: EmulatedDriver) -> None:
    torch.manual_seed(0)
    router = torch.nn.Linear(8, 4)
    experts = torch.nn.Parameter(torch.randn(4, 8, 8))

    def layer(x: torch.Tensor) -> torch.Tensor:
        weights, chosen = router(x).softmax(-1).topk(2)
        mask = torch.nn.functional.one_hot(chosen, 4).to(x.dtype)
        shares = torch.einsum("tk,tke->te", weights, mask)
        return torch.einsum("te,th,ehd->td", shares, x, experts)

    x = torch.randn(5, 8)
    with torch.no_grad():
        taken = capture(driver, lambda: layer(x))
        x.normal_()
        assert bits(taken.replay()) == bits(layer(x))


def test_a_training_step_replays(driver: EmulatedDriver) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    twin = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    twin.load_state_dict(model.state_dict())
    x, y = torch.randn(16, 4), torch.randn(16, 1)

    def step(net: Any) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(net(x), y)
        grads = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for parameter, grad in zip(net.parameters(), grads, strict=True):
                parameter.sub_(grad, alpha=0.1)
        return loss.detach()

    taken: TorchCapture = capture(driver, lambda: step(model))
    losses = []
    for _ in range(5):
        losses.append(taken.replay().item())
        assert losses[-1] == step(twin).item()
    assert losses[-1] < losses[0]
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(bits(left) == bits(right) for left, right in pairs)
