"""Stands in for vLLM where TRL has it in the training's own process: holds memory there, and says one word."""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

__version__ = "0.22.0"
HELD_BYTES = 2**28
"""Of the weights and the cache, which lie in the memory of the process."""


class SamplingParams:
    """How completions are made."""

    def __init__(self, **given: Any) -> None:
        self.given = given


class RequestOutput:
    """The completions of a prompt, which TRL's annotations name."""


class LLM:
    """The engine, into which TRL loads the weights that are trained."""

    def __init__(self, **_: Any) -> None:
        self._held = torch.ones(HELD_BYTES, dtype=torch.uint8)
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=SimpleNamespace(load_weights=list)))
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))

    def reset_prefix_cache(self) -> None:
        """Forget the prompts that were seen."""

    def generate(self, prompts: Any, *, sampling_params: SamplingParams, use_tqdm: bool) -> list[Any]:
        """Return a completion of each prompt: one word, again and again."""
        words = [7] * sampling_params.given["max_tokens"]
        scores = [{7: SimpleNamespace(rank=1, logprob=-1.0)} for _ in words]
        completion = SimpleNamespace(token_ids=words, logprobs=scores)
        return [SimpleNamespace(prompt_token_ids=each["prompt_token_ids"], outputs=[completion]) for each in prompts]


class _Parts(MetaPathFinder, Loader):
    """Makes every part of vLLM that TRL imports for other ways to run it; its names are empty classes."""

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(f"{__name__}.") else None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = lambda name: type(name, (), {})  # type: ignore[method-assign]


__path__: list[str] = []
sys.meta_path.append(_Parts())
