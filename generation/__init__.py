"""Text from a trained model, and scores of text.

config.py            settings of loading and sampling
load.py              a run or a transformers model, for use in Python or for fast inference
prompts.py           prompts: from the command line, from files, and typed
engine.py            samples of many prompts in a batch; kv_cache.py stores keys and values
sampling.py          from logits to tokens, and from tokens to text
cpu_linear.py        faster linear layers for inference, also in int8
perplexity.py        loss of texts
attention_maps.py    attention weights: plots, score variance and entropy
"""
