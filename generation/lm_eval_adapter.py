"""Adapter for lm-eval (github.com/EleutherAI/lm-evaluation-harness).

lm-eval's tasks call any object of its class LM.
"""

from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from common.errors import UserError
from data.tokenizer import Tokenizer, encode
from generation.perplexity import Text, score_texts
from model.gpt import GPT


class ModelAdapter(LM):
    """A model as lm-eval calls it. It scores texts, but does not generate them.

    The token from which samples start precedes each context, as with add_bos_token=True.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer, batch_size: int):
        super().__init__()
        self.model = model
        self.encoding = tokenizer
        self.batch_size = batch_size

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text, after the start token."""
        return np.append(self.encoding.start_token, encode(self.encoding, text, "a task"))

    def loglikelihood(self, requests: list) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation after its context, and whether it is greedy.

        A token can contain the end of the context and the beginning of the continuation. All
        tokens from the first one that the continuation changes are scored, so that every
        continuation has a log-likelihood.
        """
        block_size = self.model.config.block_size
        texts = []
        for request in requests:
            context, continuation = request.args
            tokens = self.encode(context + continuation)
            # Spaces belong to the continuation, as in lm-eval's models.
            context_tokens = self.encode(context.rstrip())
            first_target = 0
            for token, context_token in zip(tokens, context_tokens, strict=False):
                if token != context_token:
                    break
                first_target += 1
            # Leave out the beginning of a context that does not fit with the continuation.
            num_targets = len(tokens) - first_target
            num_skipped = max(0, len(tokens) - max(block_size, num_targets) - 1)
            texts.append(Text(tokens[num_skipped:], first_target - num_skipped))
        score_texts(self.model, texts, self.batch_size)
        return [(-text.nats, text.is_greedy) for text in texts]

    def loglikelihood_rolling(self, requests: list) -> list[float]:
        """Log-likelihood of each text, in windows of block_size tokens."""
        texts = [Text(self.encode(request.args[0]), first_target=1) for request in requests]
        score_texts(self.model, texts, self.batch_size)
        return [-text.nats for text in texts]

    def generate_until(self, requests: list) -> list[str]:
        raise UserError("tasks that generate text are not supported; set tasks that score choices")


def run_tasks(
    model: GPT, tokenizer: Tokenizer, tasks: list[str], batch_size: int, limit: int | None
) -> list[dict[str, Any]]:
    """Run tasks of lm-eval, or YAML files.

    Returns {"task", "metric", "value", "stderr"} for each metric of a task.
    limit: questions per task; None: all.
    Raises UserError for an unknown task.
    """
    # Reading lm-eval's own tasks takes 10 s.
    has_only_files = all(task.endswith(".yaml") for task in tasks)
    manager = TaskManager(include_defaults=not has_only_files)
    for task in tasks:
        if task not in manager.all_tasks and not Path(task).is_file():
            raise UserError(
                f"tasks={task} is neither a task of lm-eval nor a YAML file; see: lm-eval ls tasks"
            )
    adapter = ModelAdapter(model, tokenizer, batch_size)
    results = lm_eval.simple_evaluate(
        adapter, tasks=tasks, limit=limit, task_manager=manager, log_samples=False
    )
    rows = []
    for task, metrics in results["results"].items():
        for key, value in metrics.items():
            metric, comma, metric_filter = key.partition(",")  # as in "acc,none"
            if comma and not metric.endswith("_stderr"):
                stderr = metrics.get(f"{metric}_stderr,{metric_filter}")
                name = key.removesuffix(",none")
                rows.append({"task": task, "metric": name, "value": value, "stderr": stderr})
    return rows
