"""Train a causal language model on rows of whole samples: without padding, and packed.

Samples of different lengths are padded to the longest of a batch, and the padding is computed like any token. Here the
samples of a batch come one after the other in a single row. Positions begin at 0 in each, and each attends to itself
alone, so that the loss of every token is what it was. Whether that holds is tried on the model before it trains.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import Dataset
from transformers import AttentionInterface, Trainer
from transformers.integrations.sdpa_attention import repeat_kv

from autotune.training.batches import (
    IGNORED,
    SettingUnavailableError,
    change_batches,
    change_loader,
    check_undivided,
    during_training,
    in_evaluation_mode,
    longest_position,
    padding_value,
    undone_on_error,
    without_adapters,
    wrap_forward,
)

# Torch's kernel of flash attention for samples of several lengths in one row, as one operator that compilers and CUDA
# graphs take as it is. ``torch.nn.attention.varlen`` calls the same kernel without dropout, and in some versions
# without a window.


@torch.library.custom_op("autotune::attend", mutates_args=())
def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    longest: int,
    window: int,
    dropout: float,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return causal attention within samples, the log-sum-exp of its scores, and its random state.

    ``query``: (tokens, heads, size); ``key``, ``value``: (tokens, as many heads or fewer, size); all in 16 bits.
    ``ends``: (samples + 1), the start of each sample, and the end, as int32. ``longest``: the tokens of the longest
    sample, or more. ``window``: how many tokens a token attends to, or 0 for all before it.
    """
    left, right = (window - 1, 0) if window else (None, None)
    attended, sums, state, _, _ = torch.ops.aten._flash_attention_forward(
        query, key, value, ends, ends, longest, longest, dropout, not window, False,
        scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return attended, sums, state.clone()


@attend.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    sums = query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)
    return torch.empty_like(query), sums, query.new_empty(2, dtype=torch.uint64)


@torch.library.custom_op("autotune::attend_backward", mutates_args=())
def _attend_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attended: torch.Tensor,
    sums: torch.Tensor,
    state: torch.Tensor,
    ends: torch.Tensor,
    longest: int,
    window: int,
    dropout: float,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of ``attend`` by query, key and value; ``gradient`` is that by its first result."""
    left, right = (window - 1, 0) if window else (None, None)
    of_query, of_key, of_value = torch.ops.aten._flash_attention_backward(
        gradient.contiguous(), query, key, value, attended, sums, ends, ends, longest, longest, dropout, not window,
        state, query.new_empty(0), scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return of_query, of_key, of_value


@_attend_backward.register_fake
def _(gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> Any:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    query, key, value, ends, *ctx.rest = inputs
    ctx.save_for_backward(query, key, value, *output, ends)


def _backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    return (*_attend_backward(gradient, *ctx.saved_tensors, *ctx.rest), *[None] * 5)


attend.register_autograd(_backward, setup_context=_save)


ATTENTION = "autotune_varlen"
"""The name by which transformers finds the attention of samples in one row."""

_BORDERS_OF = "cu_seq_lens_q"
"""The field of a batch that says where its samples begin: transformers' name for their borders."""
# Largest size of a head that the kernel takes (torch 2.11: flash_api.cpp).
_LARGEST_HEAD = 256
# Most tokens of a sample that only fills a row, so that its attention costs little. A choice.
_FILLER = 512
# If a row has an unknown number of samples, the number of its borders is a multiple of this. A choice.
_BORDERS = 32
# Attentions that derive the mask of several samples in a row from their positions, or take ``cu_seq_lens``.
_TELLING_APART = ("eager", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
# Logits of a sample differ by this much of their largest value at most when another sample of the row changes. Kernels
# give the same bits; LLM.int8 chooses its columns among all tokens. A choice.
_APART = 1e-3
# The same for a sample in a row of its own, where other kernels round in 16 bits. A choice.
_ALIKE = 0.05


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _each_by_itself(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    window: int | None,
    dropout: float,
    scale: float | None,
) -> torch.Tensor:
    """Return causal attention as ``attend`` does, but sample by sample; tensors are (1, heads, tokens, size)."""
    # The last border may be repeated, without a sample.
    parts, lengths = [], [length for length in ends.diff().tolist() if length]
    groups = query.shape[1] // key.shape[1]
    key, value = (repeat_kv(tensor, groups) if groups > 1 else tensor for tensor in (key, value))
    for q, k, v in zip(*(torch.split(tensor, lengths, dim=2) for tensor in (query, key, value)), strict=True):
        tokens = q.shape[2]
        mask = None
        if window is not None and tokens > window:
            ones = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device)
            mask = ones.tril().triu(1 - window)
        parts.append(
            functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scale
            )
        )
    return torch.cat(parts, dim=2)


def attend_within_samples(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within each sample of a row, with the interface of transformers' attentions.

    ``query``: (1, heads, tokens, size); ``key``, ``value``: (1, as many heads or fewer, tokens, size);
    ``cu_seq_lens_q``: (samples + 1,), the start of each sample, and the end. Returns (1, tokens, heads, size). Raises
    ``SettingUnavailableError`` for unsupported arguments.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        raise SettingUnavailableError("attention within samples was not told where they begin")
    odd = [name for name in ("softcap", "position_bias", "s_aux") if kwargs.get(name) is not None]
    if odd:
        raise SettingUnavailableError(f"attention with {odd[0]} is not computed within samples")
    if not getattr(module, "is_causal", True):
        raise SettingUnavailableError("attention is not causal")
    device, size = query.device.type, query.shape[-1]
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    is_half = dtype in (torch.bfloat16, torch.float16)
    if device == "cuda" and is_half and size == value.shape[-1] and size % 8 == 0 and size <= _LARGEST_HEAD:
        flat = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
        return attend(*flat, cu_seq_lens_q, max_length_q, sliding_window or 0, dropout, scaling)[0][None], None
    attended = _each_by_itself(query, key, value, cu_seq_lens_q, sliding_window, dropout, scaling)
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, attend_within_samples)


@dataclass(frozen=True, kw_only=True)
class InOneRow:
    """Puts the samples of a batch one after the other in a single row.

    The first token of a sample follows from nothing before it. Its label becomes -100, unless ``keeps_first``. With a
    ``multiple``, samples that do not count fill the row to a multiple of so many tokens, and the last border is
    repeated up to a fixed number of borders: rows then have few shapes. Fillers consist of the padding token ``pad``,
    and are no longer than ``longest``, the number of positions of the model.
    """

    keeps_first: bool = False
    multiple: int | None = None
    pad: int = 0
    longest: int | None = None

    def __call__(self, batch: Any) -> dict[str, Any]:
        """Return a batch as one row with tensors (1, tokens), and the borders of its samples.

        ``cu_seq_lens_q`` and ``cu_seq_lens_k`` are (samples + 1,), or longer for filled rows; ``max_length_q`` and
        ``max_length_k`` the tokens of the longest sample, or of a filled row. In a batch with ``position_ids`` a sample
        begins wherever these are 0. Raises ``SettingUnavailableError`` for a batch that cannot be joined in one row.
        """
        if not isinstance(batch, Mapping) or not {"input_ids", "labels"} <= set(batch):
            raise SettingUnavailableError("a batch has no input_ids and labels; train without padding_free")
        shape = batch["input_ids"].shape
        odd = [name for name, value in batch.items() if getattr(value, "shape", None) != shape]
        if odd or len(shape) != 2:
            raise SettingUnavailableError(f"a batch has {(odd or ['input_ids'])[0]}, which has not one value a token")
        tensors = dict(batch)
        mask = tensors.pop("attention_mask", torch.ones(shape)).bool()
        positions = tensors.setdefault("position_ids", mask.cumsum(1) - 1)
        if (mask[:, 1:] & ~mask[:, :-1]).any():
            # The first token is predicted from padding then, and models without a mask count positions from there.
            raise SettingUnavailableError("a batch is padded on the left; pad it on the right for padding_free")
        if mask.any() and (tensors["labels"][~mask] != IGNORED).any():
            raise SettingUnavailableError("a batch has labels for its padding; make them -100 for padding_free")
        row = {name: value[mask] for name, value in tensors.items()}
        if not mask.any() or positions[mask & (mask.cumsum(1) == 1)].any():
            raise SettingUnavailableError(
                "a batch has no token that counts, or position_ids that do not begin at 0; train without padding_free"
            )
        ends = torch.cat(((row["position_ids"] == 0).nonzero().flatten(), torch.tensor([len(row["position_ids"])])))
        longest = int(ends.diff().max())
        if self.multiple is not None:
            row, ends = self._filled(row, ends, shape[0] if "position_ids" not in batch else None)
            longest = len(row["position_ids"])
        row, ends = {name: value[None] for name, value in row.items()}, ends.int()
        if not self.keeps_first:
            row = without_first_labels(row)
        return {**row, _BORDERS_OF: ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}

    def _filled(
        self, row: dict[str, torch.Tensor], ends: torch.Tensor, samples: int | None
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return a row with fillers up to a multiple of tokens, and its borders, filled up to have few shapes.

        ``samples`` is the number of samples in the batch; ``None`` if it is unknown, since rows may be packed.
        """
        assert self.multiple is not None
        tokens, filler = len(row["position_ids"]), min(_FILLER, self.longest or _FILLER)
        fill = -tokens % self.multiple
        positions = torch.arange(fill) % filler
        values = {"input_ids": self.pad, "labels": IGNORED}
        filled = {}
        for name, value in row.items():
            added = positions if name == "position_ids" else torch.full((fill,), values.get(name, 0))
            filled[name] = torch.cat((value, added.to(value)))
        fillers = torch.arange(tokens, tokens + fill, filler)
        ends = torch.cat((ends[:-1], fillers, torch.tensor([tokens + fill])))
        if samples is None:
            # Else there is room for as many fillers as a batch of so many samples can need.
            borders = -(-len(ends) // _BORDERS) * _BORDERS
        else:
            borders = samples + -(-(self.multiple - 1) // filler) + 1
        return filled, torch.cat((ends, ends[-1:].expand(borders - len(ends))))


def without_first_labels(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose samples have no label for their first token."""
    return {**row, "labels": row["labels"].where(row["position_ids"] != 0, IGNORED)}


class PackedRows(Dataset[dict[str, list[int]]]):
    """A dataset of packed rows, each of whole samples. The samples are not copied."""

    def __init__(self, samples: Any, rows: Sequence[Sequence[int]]) -> None:
        self._samples = samples
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        """Return a row: tokens, labels, and positions, which begin at 0 in each sample."""
        row: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": []}
        for sample in map(self._samples.__getitem__, self.rows[index]):
            mask = sample.get("attention_mask", itertools.repeat(1))
            for name, tokens in (
                ("input_ids", sample["input_ids"]),
                ("labels", sample.get("labels", sample["input_ids"])),
            ):
                row[name] += [int(token) for token, counts in zip(tokens, mask, strict=False) if counts]
            row["position_ids"] += range(len(row["input_ids"]) - len(row["position_ids"]))
        return row

    def select(self, indices: Iterable[int]) -> PackedRows:
        """Return some of the rows."""
        return PackedRows(self._samples, [self.rows[index] for index in indices])

    @staticmethod
    def collate(rows: Sequence[Mapping[str, list[int]]]) -> dict[str, torch.Tensor]:
        """Return rows joined to one row, with tensors (1, tokens)."""
        return {name: torch.tensor([[value for row in rows for value in row[name]]]) for name in rows[0]}


def best_fit(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Assign samples with these ``lengths`` to rows of at most ``tokens`` tokens; return the samples' indices by row.

    The longest sample comes first, and each goes where it leaves the least space free (best fit decreasing). Raises
    ``ValueError`` where a sample is longer than a row.
    """
    rows: list[list[int]] = []
    # The numbers of tokens that are left in some row, sorted; and the rows with each number.
    spaces: list[int] = []
    with_space: dict[int, list[int]] = {}

    def leave(row: int, space: int) -> None:
        """Record the free space of a row."""
        if space not in with_space:
            bisect.insort(spaces, space)
        with_space.setdefault(space, []).append(row)

    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = int(lengths[index])
        if length > tokens:
            raise ValueError(f"a sample has {length} tokens, more than a row of {tokens}; truncate it first")
        place = bisect.bisect_left(spaces, length)
        if place == len(spaces):
            rows.append([index])
            leave(len(rows) - 1, tokens - length)
            continue
        space = spaces[place]
        row = with_space[space].pop()
        if not with_space[space]:
            del with_space[space], spaces[place]
        rows[row].append(index)
        leave(row, space - length)
    return rows


def pack(samples: Any, tokens: int) -> PackedRows:
    """Pack tokenized samples in rows of at most ``tokens`` tokens, as a dataset for a ``Trainer``.

        rows = pack(dataset, 2048)
        trainer = Trainer(…, train_dataset=rows, data_collator=rows.collate)
        apply(trainer, padding_free=True)

    ``samples`` is a sequence of ``input_ids`` and, where not every token counts, ``labels``; what an ``attention_mask``
    leaves out is padding. A batch then has so many rows, not samples. Raises ``ValueError`` where a sample is longer
    than a row.
    """
    lengths = [int(sum(sample.get("attention_mask", [1] * len(sample["input_ids"])))) for sample in samples]
    return PackedRows(samples, best_fit(lengths, tokens))


def join_samples(trainer: Trainer, multiple: int | None = None) -> None:
    """Make a ``Trainer`` put the samples of a training batch in one row, with attention within each sample.

    With a ``multiple``, rows are filled to multiples of so many tokens. Evaluations stay as they are, but for rows of
    ``pack``. Raises ``SettingUnavailableError`` for a model whose samples would mix, and where they cannot be joined.
    """
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    base = without_adapters(model)
    name, config = type(base).__name__, base.config.get_text_config()
    if getattr(trainer, "_is_in_one_row", False):
        raise SettingUnavailableError("the samples of a batch are put in one row already")
    if multiple is not None and multiple < 1:
        raise SettingUnavailableError(f"length_multiple={multiple} is not a number of tokens; use 1 or more")
    if getattr(config, "attention_chunk_size", None):
        raise SettingUnavailableError(f"{name} attends within chunks, which would not begin with the samples")
    if getattr(trainer.args, "use_cache", False):
        raise SettingUnavailableError("with use_cache=True a model does not look where samples begin; leave it out")
    check_undivided(trainer)
    attention = config._attn_implementation
    undo = _attend_by_borders(base) if attention in ("sdpa", ATTENTION) else lambda: None
    if attention not in ("sdpa", ATTENTION, *_TELLING_APART):
        raise SettingUnavailableError(
            f"it is not known whether {attention} keeps the samples of a row apart; use sdpa, eager, flex_attention or "
            "flash_attention_2"
        )
    with undone_on_error(undo, f"{name} does not take samples in one row"):
        if _mixes(trainer, base):
            raise SettingUnavailableError(
                f"{name} mixes the samples of a row with {attention} attention; train without padding_free and packing"
            )
    trainer._is_in_one_row = True
    # The loss is divided by the labels that the Trainer counts in a step. Where it counts those of first tokens, it
    # does so in rows, too, and they are left out afterwards.
    counts_first = not getattr(trainer, "_loss_shifts_labels", False)
    pad, longest = padding_value(trainer), longest_position(base)
    change_batches(trainer, InOneRow(keeps_first=counts_first, multiple=multiple, pad=pad, longest=longest))
    if counts_first:
        prepare = trainer._prepare_inputs

        def prepare_inputs(inputs: Any) -> Any:
            prepared = prepare(inputs)
            return without_first_labels(prepared) if _BORDERS_OF in prepared else prepared

        trainer._prepare_inputs = prepare_inputs
    load, joined = trainer.get_eval_dataloader, InOneRow()

    @functools.wraps(load)
    def load_rows(*args: Any, **kwargs: Any) -> Any:
        loader = load(*args, **kwargs)
        return change_loader(loader, joined) if isinstance(loader.dataset, PackedRows) else loader

    trainer.get_eval_dataloader = load_rows
    during_training(trainer, functools.partial(_restore_sdpa, base))


def _attend_by_borders(model: Any) -> Callable[[], None]:
    """Make a model attend within samples where a batch says where they begin, else with sdpa; return the undo function.

    The attention stays until the next call, since checkpointed layers run again in the backward pass.
    """
    if getattr(model.forward, "_attends_by_borders", False):
        return lambda: None

    def forward(model: Any, whole: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        _set_attention(model, ATTENTION if kwargs.get(_BORDERS_OF) is not None else "sdpa")
        return whole(model, *args, **kwargs)

    unwrap = wrap_forward(model, forward)
    model.forward.__func__._attends_by_borders = True

    def undo() -> None:
        unwrap()
        _set_attention(model, "sdpa")

    return undo


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _set_attention(model: Any, implementation: str) -> None:
    """Set the attention in a model's configs to sdpa or ``ATTENTION``, where it is the other one of these."""
    for config in (model.config, model.config.get_text_config()):
        if config._attn_implementation in ("sdpa", ATTENTION) and config._attn_implementation != implementation:
            config._attn_implementation = implementation


@contextlib.contextmanager
def _restore_sdpa(model: Any) -> Iterator[None]:
    """Restore sdpa attention after the block."""
    try:
        yield
    finally:
        _set_attention(model, "sdpa")


@torch.no_grad()
def _mixes(trainer: Trainer, model: Any) -> bool:
    """Return whether a sample's logits depend on the sample before it or on its place in the row."""
    words = model.get_input_embeddings().num_embeddings
    # Tokens that differ everywhere between ``first`` and ``changed``, and a sample to follow either.
    first, changed, second = ([(7 * i + at) % words for i in range(count)] for at, count in ((1, 5), (3, 5), (2, 6)))
    device = next(model.parameters()).device

    def logits(*samples: list[int]) -> torch.Tensor:
        """Return the logits of the second sample's tokens in a row of some samples."""
        rows = PackedRows([{"input_ids": tokens} for tokens in samples], [range(len(samples))])
        batch = InOneRow()(PackedRows.collate([rows[0]]))
        moved = {key: value.to(device) if torch.is_tensor(value) else value for key, value in batch.items()}
        moved.pop("labels")
        with trainer.compute_loss_context_manager():
            of_row: torch.Tensor = model(**moved, use_cache=False).logits
        return of_row[0, -len(second) :].float()

    with in_evaluation_mode(model):
        after_first, after_changed, alone = logits(first, second), logits(changed, second), logits(second)
    largest = after_first.abs().max()
    depends_on_before = (after_first - after_changed).abs().max() > _APART * largest
    return bool(depends_on_before or (after_first - alone).abs().max() > _ALIKE * largest)
