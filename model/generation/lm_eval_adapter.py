"""Adapter for lm-eval (github.com/EleutherAI/lm-evaluation-harness), whose tasks call any object of its class LM."""

from pathlib import Path

import lm_eval
import tiktoken
import torch
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from common.errors import UserError
from data.tokenizer import encode, end_of_text, initial_tokens
from model.generation.config import SamplingConfig
from model.generation.engine import Prompt, generate
from model.generation.perplexity import score_texts
from model.gpt import GPT


class ModelAdapter(LM):
    """A model as lm-eval calls it. An end-of-text token precedes each context, as with lm-eval's add_bos_token=True."""

    def __init__(self, model: GPT, tokenizer: tiktoken.Encoding, batch_size: int):
        super().__init__()
        self.model, self.encoding, self.batch_size = model, tokenizer, batch_size

    def encode(self, text: str, needs_start: bool) -> list[int]:
        has_start = needs_start or end_of_text(self.encoding) is not None
        return [*initial_tokens(self.encoding) * has_start, *encode(self.encoding, text, "a task").tolist()]

    def loglikelihood(self, requests: list) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation after its context, and whether greedy decoding generates it."""
        texts = []
        for context, continuation in (request.args for request in requests):
            start = context.rstrip()  # spaces belong to the continuation, as in all models of lm-eval
            tokens = self.encode(context + continuation, needs_start=not start)
            n = len(tokens) - len(self.encode(start, needs_start=not start))
            texts.append((torch.tensor(tokens[-max(self.model.config.block_size, n) - 1 :]), n))
        return [(-nats, is_greedy) for nats, is_greedy in score_texts(self.model, texts, self.batch_size)]

    def loglikelihood_rolling(self, requests: list) -> list[float]:
        """Log-likelihood of each text, in windows of block_size tokens."""
        texts = [torch.tensor(self.encode(request.args[0], needs_start=True)) for request in requests]
        return [-nats for nats, _ in score_texts(self.model, [(t, len(t) - 1) for t in texts], self.batch_size)]

    def generate_until(self, requests: list) -> list[str]:
        """Text after each context, up to one of the strings `until`."""
        texts = []
        for context, settings in (request.args for request in requests):
            temperature = settings.get("temperature", 1.0) if settings.get("do_sample") else 0.0
            length, stop = settings.get("max_gen_toks", 256), settings.get("until")
            sampling = SamplingConfig(length, temperature, stop=stop or None)
            prompt = Prompt(self.encode(context, needs_start=not context), seed=len(texts))
            texts.append("".join(chunk.text for chunk in generate(self.model, self.encoding, [prompt], sampling, 1)))
        return texts


def run_tasks(model: GPT, tokenizer: tiktoken.Encoding, tasks: list[str], batch_size: int, limit: int | None) -> list:
    """Run tasks of lm-eval, or YAML files -> {"task", "metric", "value", "stderr"} of each metric. Raises UserError."""
    manager = TaskManager(include_defaults=not all(task.endswith(".yaml") for task in tasks))  # reading all takes 10 s
    for task in tasks:
        if task not in manager.all_tasks and not Path(task).is_file():
            raise UserError(f"tasks={task} is neither a task of lm-eval nor a YAML file; see: lm-eval ls tasks")
    adapter = ModelAdapter(model, tokenizer, batch_size)
    evaluation = lm_eval.simple_evaluate(adapter, tasks=tasks, limit=limit, task_manager=manager, log_samples=False)
    rows = []
    for task, metrics in evaluation["results"].items():
        for key in [key for key in metrics if "," in key and "_stderr," not in key]:  # acc,none: metric and filter
            stderr = metrics.get(key.replace(",", "_stderr,"))
            rows.append({"task": task, "metric": key.removesuffix(",none"), "value": metrics[key], "stderr": stderr})
    return rows
