"""The GPT model. Needs torch, and of this project only common/errors.py and common/settings.py.

config.py      settings of the architecture, and which attention backend runs
gpt.py         the network, its initialization, and a naive generate
layers.py      linear layers, hashed n-gram embeddings, norms, rotary positions, softcap
loss.py        output head and cross entropy
flops.py       parameters, FLOPs and size of the KV cache
attention/     attention with interchangeable backends, and linear attention
"""

from model.config import AttentionConfig, GPTConfig
