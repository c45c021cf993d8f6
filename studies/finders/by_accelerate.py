"""accelerate's ``find_executable_batch_size`` around a short training loop, as its documentation shows it."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size
from shared import CLIP_NORM, Task
from torch.utils.data import DataLoader


def main() -> None:
    """Find a batch and tell it."""
    task = Task()
    settings = task.settings
    accelerator = Accelerator(mixed_precision="bf16" if settings.bf16 else "no", cpu=settings.device == "cpu")

    @find_executable_batch_size(starting_batch_size=settings.start)  # type: ignore[untyped-decorator]
    def train(batch_size: int) -> int:
        accelerator.free_memory()
        model = task.model()
        loader = DataLoader(task.dataset, batch_size, shuffle=True, collate_fn=task.collate)
        model, optimizer, loader = accelerator.prepare(model, task.optimizer(model), loader)
        for _, batch in zip(range(settings.steps), loader, strict=False):
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
        return batch_size

    task.answer(train())


if __name__ == "__main__":
    main()
