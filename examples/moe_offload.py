"""A mixture of experts with a quarter of its experts on the device, decoded through one graph.

The experts lie in pinned host memory; every layer has slots for some of them. Which are resident is
decided on the device at every step, so that one captured step serves them all: nothing is captured
again and no node is changed when experts move. Runs on a GPU, or on the emulated driver without.
"""

import time

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import graphcore
from graphcore.decode import CUDAGraphAR
from graphcore.moe import accelerate

driver = graphcore.open_driver()
is_small = driver.is_emulated
device = "cpu" if is_small else f"cuda:{driver.device}"
new_tokens = 12 if is_small else 64

# 1. A model of Qwen3-MoE's architecture, with random weights

sizes = (
    {"hidden_size": 64, "num_hidden_layers": 2, "num_experts": 16, "num_experts_per_tok": 2}
    if is_small
    else {"hidden_size": 2048, "num_hidden_layers": 8, "num_experts": 128, "num_experts_per_tok": 8}
)
config = Qwen3MoeConfig(
    **sizes,
    head_dim=16 if is_small else 128,
    num_attention_heads=4 if is_small else 32,
    num_key_value_heads=2 if is_small else 4,
    moe_intermediate_size=32 if is_small else 768,
    vocab_size=97 if is_small else 32000,
    norm_topk_prob=True,
    initializer_range=0.2 if is_small else 0.04,  # random models like to repeat one token
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=None,
)
torch.manual_seed(7)
with torch.device(device):
    dtype = torch.float32 if is_small else torch.bfloat16
    model = Qwen3MoeForCausalLM._from_config(config, dtype=dtype).eval()
prompt = torch.randint(3, config.vocab_size, (1, 16), device=device)


def decode(*, capture: bool) -> tuple[list[int], float, int]:
    """New tokens, tokens a second and graphs captured."""
    with CUDAGraphAR(model, max_seq_len=128, driver=driver, capture=capture) as runner:
        runner.generate(prompt, 2, ())  # what is paid once is paid here
        driver.synchronize()
        start = time.perf_counter()
        ids = runner.generate(prompt, new_tokens, ())
        driver.synchronize()
        seconds = time.perf_counter() - start
        return ids[0, prompt.shape[1] :].tolist(), new_tokens / seconds, runner.captures


# 2. All experts in slots, then a quarter of them: the same tokens, a quarter of the memory

results = {}
for share in (1.0, 0.25):
    slots = int(share * config.num_experts)
    with accelerate(model, slots, driver=driver) as handle:
        eager, eager_speed, _ = decode(capture=False)
        tokens, speed, captures = decode(capture=True)
        hits, moved = handle.hit_rate, sum(each.misses for each in handle.totals().values())
        pool_mib = handle.pool.nbytes / 2**20
        assert not handle.faults()
    assert tokens == eager, "a captured step decodes what the eager one does"
    results[share] = tokens
    print(
        f"{share:4.0%} of the experts resident: {pool_mib:8.1f} MiB of slots, "
        f"{speed:7.1f} tokens/s ({eager_speed:.1f} eager), {captures} capture, "
        f"{hits:.0%} hits, {moved} experts copied"
    )

# 3. Where an expert lies is no part of the result

assert results[1.0] == results[0.25]
print("The same tokens:", results[0.25])
