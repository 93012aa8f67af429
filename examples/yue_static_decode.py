"""Static KV cache and captured decode, as the YuE example has it, on a transformers Llama.

The lines are those of the published example; only the imports and the model class differ.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from graphcore.decode import StaticKVCache

# 1. Build the model with caching enabled

config = LlamaConfig(
    vocab_size=50257,
    hidden_size=1024,
    num_hidden_layers=12,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=1024,
    use_cache=True,  # Required for GraphAR
)
model = LlamaForCausalLM(config).cuda()

# 2. Create static KV cache matching model dimensions

cache = StaticKVCache(
    num_layers=config.num_hidden_layers,
    batch_size=1,
    num_kv_heads=config.num_key_value_heads,
    max_seq_len=config.max_position_embeddings,
    head_dim=config.head_dim,
    dtype=torch.float16,
    device="cuda",
)

# 3. Capture the CUDA graph once

from graphcore.decode import CUDAGraphAR  # noqa: E402

graph_ar = CUDAGraphAR(model, cache)

input_ids = torch.tensor([[config.bos_token_id]], device="cuda")
graph_ar.capture(input_ids)  # Records the forward pass including cache updates

# 4. Replay for zero-overhead generation

generated = [config.bos_token_id]
for _ in range(20):
    next_id = graph_ar.replay()  # Fast GPU-only execution

    generated.append(next_id.item())

print("Generated token IDs:", generated)
