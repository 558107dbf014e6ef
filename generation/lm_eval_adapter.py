"""Adapter for lm-eval (github.com/EleutherAI/lm-evaluation-harness).

lm-eval's tasks call any object of its class LM.
"""

from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.model import LM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from common.errors import UserError
from data.tokenizer import Tokenizer, encode
from generation.config import SamplingConfig
from generation.engine import Prompt, generate
from generation.perplexity import Score, Text, score_texts
from model.gpt import GPT


class ModelAdapter(LM):
    """A model as lm-eval calls it. The token before a document precedes each context."""

    def __init__(self, model: GPT, tokenizer: Tokenizer, batch_size: int):
        super().__init__()
        self.model = model
        self.encoding = tokenizer
        self.batch_size = batch_size

    def encode(self, text: str) -> list[int]:
        return [self.encoding.start_token, *encode(self.encoding, text, "a task").tolist()]

    def score(self, texts: list[Text]) -> list[Score]:
        scores, _ = score_texts(self.model, self.encoding, texts, self.batch_size)
        return scores

    def loglikelihood(self, requests: list) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether greedy decoding generates it.

        A token can contain the end of the context and the beginning of the continuation. All tokens
        from the first one that the continuation changes are scored, so that every continuation has
        a log-likelihood.
        """
        texts = []
        for context, continuation in (request.args for request in requests):
            tokens = self.encode(context + continuation)
            # spaces belong to the continuation, as in lm-eval's models
            pairs = zip(tokens, self.encode(context.rstrip()), strict=False)
            is_changed = [token != other for token, other in pairs]
            num_targets = len(tokens) - [*is_changed, True].index(True)
            length = max(self.model.config.block_size, num_targets) + 1
            texts.append((tokens[-length:], num_targets))
        return [(-score.nats, score.is_greedy) for score in self.score(texts)]

    def loglikelihood_rolling(self, requests: list) -> list[float]:
        """Log-likelihood of each text, in windows of block_size tokens."""
        texts = [self.encode(request.args[0]) for request in requests]
        scores = self.score([(tokens, len(tokens) - 1) for tokens in texts])
        return [-score.nats for score in scores]

    def generate_until(self, requests: list) -> list[str]:
        """Text after each context, up to one of the strings `until`."""
        texts = []
        for context, arguments in (request.args for request in requests):
            settings = normalize_gen_kwargs(arguments)
            sampling = SamplingConfig(
                max_new_tokens=settings["max_gen_toks"],
                temperature=settings.get("temperature", 1.0) if settings["do_sample"] else 0.0,
                stop=[string for string in settings["until"] if string] or None,
                **{key: settings.get(key) or None for key in ("top_k", "top_p", "min_p")},
            )
            prompt = Prompt(self.encode(context), seed=len(texts))
            chunks = generate(self.model, self.encoding, [prompt], sampling, batch_size=1)
            texts.append("".join(chunk.text for chunk in chunks))
        return texts


def run_tasks(
    model: GPT, tokenizer: Tokenizer, tasks: list[str], batch_size: int, limit: int | None
) -> list[dict[str, Any]]:
    """Run tasks of lm-eval, or YAML files. Raises UserError for unknown tasks.

    Returns {"task", "metric", "value", "stderr"} of each metric.
    """
    needs_defaults = not all(task.endswith(".yaml") for task in tasks)  # reading them takes 10 s
    manager = TaskManager(include_defaults=needs_defaults)
    for task in tasks:
        if task not in manager.all_tasks and not Path(task).is_file():
            raise UserError(
                f"tasks={task} is neither a task of lm-eval nor a YAML file; see: lm-eval ls tasks"
            )
    adapter = ModelAdapter(model, tokenizer, batch_size)
    evaluation = lm_eval.simple_evaluate(
        adapter, tasks=tasks, limit=limit, task_manager=manager, log_samples=False
    )
    rows = []
    for task, metrics in evaluation["results"].items():
        for key, value in metrics.items():
            metric, comma, filter_name = key.partition(",")  # acc,none
            if comma and not metric.endswith("_stderr"):
                stderr = metrics.get(f"{metric}_stderr,{filter_name}")
                name = key.removesuffix(",none")
                rows.append({"task": task, "metric": name, "value": value, "stderr": stderr})
    return rows
