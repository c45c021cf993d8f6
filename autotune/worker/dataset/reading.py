"""Prepare the user's dataset once: load it, check its columns, tokenize it, and save it for the trials to map."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as arrow
import transformers
from datasets import DatasetDict, Image, load_dataset, load_from_disk
from datasets.utils.logging import disable_progress_bar
from huggingface_hub import constants

from autotune.core.dataset_spec import FACTS_FILE, DataFacts, DataSpec, Lengths, Packed
from autotune.core.errors import AutotuneError, InvalidRequestError
from autotune.core.lengths import SampleLengths
from autotune.core.messages import Problem
from autotune.core.schema import encode
from autotune.core.units import in_one_line
from autotune.core.workload import Workload
from autotune.models.dataset_files import commit_of, data_files, under_plain_names
from autotune.training.rows import best_fit
from autotune.worker.dataset.columns import (
    check_holds_tokens,
    check_in_vocabulary,
    find_column,
    find_text_columns,
    is_string,
    read_labels,
    real_counts,
    token_counts,
    wrong_data,
)
from autotune.worker.dataset.prepared import (
    IMAGE,
    LENGTHS_FILE,
    ROWS_FILE,
    SAMPLES_FOLDER,
    TARGET_LENGTHS_FILE,
    TOKENIZER_FOLDER,
)
from autotune.worker.dataset.reading_image_text import check_has_pillow, read_images_with_text
from autotune.worker.dataset.tokenizer import load_tokenizer
from autotune.worker.failures import first_line
from autotune.worker.private.datasets import in_stored_order, without_features
from autotune.worker.private.transformers import length_grouped_order

_TARGET_NAMES = ("target", "summary", "labels", "label")
_IMAGE_NAMES = ("image", "img", "pixel_values")
_TOKENS = "input_ids"
_MASK = "attention_mask"
_BINS = 16
# Batch size for which the share of padding is reported.
_SHOWN_BATCH = 8
# Samples from which the share of padding is computed.
_SHOWN_SAMPLES = 20_000


def read_data(workload: Workload, into: str) -> DataFacts | Problem:
    """Prepare the workload's dataset in the empty folder ``into``. Return its facts, or the problem."""
    folder = Path(into)
    disable_progress_bar()
    transformers.logging.set_verbosity_error()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        facts = _Reading(workload, folder).run()
        (folder / FACTS_FILE).write_text(json.dumps(encode(facts)))
        shutil.rmtree(folder / "cache", ignore_errors=True)
        return facts
    except AutotuneError as error:
        return Problem(error.message, error.hint)


class _Reading:
    """Reads the dataset of one workload, and writes what the trials load into a folder."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        assert workload.data is not None
        self._workload = workload
        self._spec: DataSpec = workload.data
        self._folder = folder
        self._without_text = 0

    def run(self) -> DataFacts:
        """Load, check, tokenize and save the dataset; return its facts."""
        dataset = load(self._spec, self._folder)
        if self._workload.task == "image-classification":
            return self._read_images(dataset)
        if self._workload.task == "image-text-to-text":
            lengths = read_images_with_text(dataset, self._workload, self._folder)
            return DataFacts(len(lengths), None, self._length_statistics(lengths, lengths, None))
        return self._read_text(dataset)

    # Text

    def _read_text(self, dataset: Any) -> DataFacts:
        """Tokenize and save a dataset of text, packed in rows if asked for; return its facts."""
        spec, name = self._spec, self._spec.tokenizer
        tokenizer = load_tokenizer(name)
        if self._workload.task == "masked-lm" and tokenizer.mask_token is None:
            raise InvalidRequestError(f"the tokenizer in {name} has no mask token", "use --task causal-lm, or another")
        is_seq2seq = self._workload.task == "seq2seq-lm"
        num_labels: int | None = None
        target: str | None = None
        if is_seq2seq:
            target = find_column(dataset, spec, spec.label_column, "--label-column", _TARGET_NAMES, "target text")
        made_before = _TOKENS in dataset.column_names and spec.text_columns is None
        if made_before:
            tokenized, raw = self._tokenized_before(dataset, target)
        else:
            tokenized, raw = self._tokenize(dataset, tokenizer, find_text_columns(dataset, spec, target), target)
        if self._workload.task == "sequence-classification":
            labels, num_labels = read_labels(dataset, spec)
            tokenized = tokenized.add_column("labels", labels)
        self._check_vocabulary(tokenized, made_before=made_before)
        # With and without the padding that the dataset itself holds.
        lengths = token_counts(tokenized.data.column(_TOKENS))
        real = real_counts(tokenized.data.column(_MASK)) if _MASK in tokenized.column_names else lengths
        targets = token_counts(tokenized.data.column("labels")) if is_seq2seq else None
        tokenized.save_to_disk(str(self._folder / SAMPLES_FOLDER))
        tokenizer.save_pretrained(str(self._folder / TOKENIZER_FOLDER))
        if targets is not None:
            np.save(self._folder / TARGET_LENGTHS_FILE, targets)
        statistics = self._length_statistics(real, raw, targets, stored=lengths if real is not lengths else None)
        if not spec.packing:
            np.save(self._folder / LENGTHS_FILE, lengths)
            return DataFacts(len(lengths), num_labels, statistics, without_text=self._without_text)
        return self._pack(lengths, statistics)

    def _pack(self, lengths: Any, statistics: Lengths) -> DataFacts:
        """Pack samples in rows; save each sample's row and each row's tokens; return facts of the rows and samples."""
        row_of_sample = np.empty(len(lengths), dtype=np.int64)
        rows = best_fit(lengths.tolist(), self._workload.seq_len)
        for number, samples in enumerate(rows):
            row_of_sample[samples] = number
        tokens = np.array([int(lengths[samples].sum()) for samples in rows], dtype=np.int64)
        np.save(self._folder / ROWS_FILE, row_of_sample)
        np.save(self._folder / LENGTHS_FILE, tokens)
        return DataFacts(
            len(rows),
            None,
            self._length_statistics(tokens, tokens, None),
            Packed(len(lengths), statistics),
            self._without_text,
        )

    def _tokenize(self, dataset: Any, tokenizer: Any, texts: tuple[str, ...], target: str | None) -> tuple[Any, Any]:
        """Tokenize the text columns, and the target as labels; return the dataset and its lengths before truncation."""
        for name in (*texts, *((target,) if target else ())):
            if not is_string(dataset.features[name]):
                raise wrong_data(
                    self._spec,
                    f": the column {name!r} holds no text",
                    "name another with --text-column" if name != target else "name another with --label-column",
                )
        raw: list[int] = []
        limit = self._workload.seq_len

        def tokens(batch: dict[str, list[str | None]]) -> dict[str, Any]:
            """Tokenize a batch of samples, and note their lengths before truncation in ``raw``."""
            given = [[text or "" for text in batch[name]] for name in texts]
            every = [*given, [text or "" for text in batch[target]]] if target else given
            self._without_text += sum(not all(map(str.strip, sample)) for sample in zip(*every, strict=True))
            encoded = dict(tokenizer(*given))
            lengths = [len(ids) for ids in encoded[_TOKENS]]
            raw.extend(lengths)
            # Only long samples are tokenized again with truncation, which keeps their special tokens.
            long = [index for index, length in enumerate(lengths) if length > limit]
            if long:
                some = [[column[index] for index in long] for column in given]
                truncated = tokenizer(*some, truncation=True, max_length=limit)
                for name, values in truncated.items():
                    for index, value in zip(long, values, strict=True):
                        encoded[name][index] = value
            encoded.pop(_MASK, None)
            if target is not None:
                encoded["labels"] = tokenizer(text_target=every[-1], truncation=True, max_length=limit)[_TOKENS]
            return encoded

        try:
            tokenized = dataset.map(
                tokens, batched=True, remove_columns=dataset.column_names, load_from_cache_file=False,
                cache_file_name=str(self._cache("tokens.arrow")),
            )  # fmt: skip
        except (TypeError, ValueError) as error:
            raise wrong_data(
                self._spec, f" cannot be tokenized: {first_line(error)}", "check --text-column and --tokenizer"
            ) from error
        return tokenized, np.array(raw, dtype=np.int64)

    def _tokenized_before(self, dataset: Any, target: str | None) -> tuple[Any, Any]:
        """Truncate samples that the user tokenized to the sequence length; return them and the lengths before that.

        Where the dataset holds padding, its mask is kept, and the lengths count tokens without padding. Samples to be
        packed lose their padding. ``target`` is the column of a target's tokens. Raises ``InvalidRequestError`` for
        columns that do not hold tokens, or not one value for each.
        """
        limit, names = self._workload.seq_len, dataset.column_names
        # The dataset's own labels of each token, -100 where a token is not predicted.
        own = "labels" if self._workload.task == "causal-lm" and _is_of_lists(dataset, "labels") else None
        kept = [_TOKENS, *(name for name in ("token_type_ids", target, own) if name and name in names)]
        check_holds_tokens(dataset, self._spec, _TOKENS, "name a column of text with --text-column")
        if target is not None:
            check_holds_tokens(dataset, self._spec, target, "name another with --label-column")
        raw = token_counts(dataset.data.column(_TOKENS))
        each_token = [name for name in (_MASK, own) if name is not None and _is_of_lists(dataset, name)]
        for name in each_token:
            check_holds_tokens(dataset, self._spec, name, "remove the column")
            if (token_counts(dataset.data.column(name)) != raw).any():
                raise wrong_data(
                    self._spec,
                    f": {name!r} has not one value for each token of {_TOKENS!r}",
                    "make both with the same truncation and padding, or remove the column",
                )
        is_padded = _MASK in each_token and bool((real_counts(dataset.data.column(_MASK)) < raw).any())
        loses_padding = is_padded and self._spec.packing
        if is_padded:
            kept = [*kept, _MASK]
            raw = real_counts(dataset.data.column(_MASK))
        if (raw == 0).any():
            raise wrong_data(self._spec, " holds samples without tokens", "remove them from the dataset")

        def cut(batch: dict[str, Any]) -> dict[str, Any]:
            """Truncate a batch of samples, after removing padding where necessary."""
            columns = dict(batch.items())
            starts = [0] * len(columns[_TOKENS])
            if loses_padding:
                masks = columns.pop(_MASK)
                for name, values in columns.items():
                    pairs = zip(values, masks, strict=True)
                    columns[name] = [[each for each, real in zip(*pair, strict=True) if real] for pair in pairs]
            elif is_padded:
                # Padding comes off first, also where it is on the left.
                starts = [0 if mask[0] else max(0, len(mask) - limit) for mask in columns[_MASK]]
            return {
                name: [tokens[start : start + limit] for tokens, start in zip(values, starts, strict=True)]
                for name, values in columns.items()
            }

        made = dataset.select_columns(kept).map(
            cut, batched=True, load_from_cache_file=False, cache_file_name=str(self._cache("cut.arrow")),
            remove_columns=[_MASK] if loses_padding else None,
        )  # fmt: skip
        if target is not None and target != "labels":
            made = made.rename_column(target, "labels")
        return made, raw

    def _cache(self, name: str) -> Path:
        (self._folder / "cache").mkdir(exist_ok=True)
        return self._folder / "cache" / name

    def _check_vocabulary(self, tokenized: Any, *, made_before: bool) -> None:
        """Raise ``InvalidRequestError`` for tokens that the model lacks. ``made_before``: the dataset has tokens."""
        extremes = arrow.min_max(arrow.list_flatten(tokenized.data.column(_TOKENS))).as_py()
        smallest, largest = extremes["min"] or 0, extremes["max"] or 0
        vocabulary, model = self._workload.config.get("vocab_size"), self._workload.model
        if not made_before:
            check_in_vocabulary(largest, vocabulary, self._spec, model, "tokenizer")
        elif smallest < 0 or (isinstance(vocabulary, int) and largest >= vocabulary):
            has = f"; it has tokens 0 to {vocabulary - 1}" if isinstance(vocabulary, int) else ""
            raise wrong_data(
                self._spec,
                f": the column {_TOKENS!r} holds {smallest if smallest < 0 else largest}, "
                f"which is not a token of {model}{has}",
                "make the tokens with the model's own tokenizer, or name a column of text with --text-column",
            )

    def _length_statistics(self, lengths: Any, raw: Any, targets: Any, stored: Any = None) -> Lengths:
        """Return statistics of samples' ``lengths`` without padding; all arguments are arrays (samples,) or ``None``.

        ``raw`` are the lengths before truncation, ``targets`` the lengths of targets, and ``stored`` the lengths with
        padding that the dataset itself holds.
        """
        limit, spec = self._workload.seq_len, self._spec
        sizes = lengths if stored is None else stored
        # Padding is reported as its share of the tokens in batches of some of the samples.
        some = np.random.default_rng(0).permutation(len(lengths))[:_SHOWN_SAMPLES]
        if spec.group_by_length:
            some = some[length_grouped_order(sizes[some].tolist(), _SHOWN_BATCH, 0)]
        batches = [sizes[some[start : start + _SHOWN_BATCH]] for start in range(0, len(some), _SHOWN_BATCH)]
        padded = sum(len(batch) * spec.padded(int(batch.max()), limit) for batch in batches)
        counts, _ = np.histogram(lengths, bins=_BINS, range=(0, int(lengths.max())))
        return Lengths(
            shortest=int(lengths.min()),
            median=int(np.median(lengths)),
            percentile_95=int(np.percentile(lengths, 95)),
            longest=int(lengths.max()),
            mean=float(lengths.mean()),
            truncated=float((raw > limit).mean()),
            padding=float(1 - lengths[some].sum() / padded),
            histogram=tuple(int(count) for count in counts),
            longest_target=int(targets.max()) if targets is not None else None,
            counts=SampleLengths.of(sizes).counts,
            stored=(int(stored.min()), int(stored.max())) if stored is not None else None,
        )

    # Images

    def _read_images(self, dataset: Any) -> DataFacts:
        """Save a dataset of images, undecoded; return its facts."""
        check_has_pillow()
        name = find_column(dataset, self._spec, self._spec.image_column, "--image-column", _IMAGE_NAMES, "image")
        if not isinstance(dataset.features[name], Image):
            raise wrong_data(self._spec, f": the column {name!r} holds no images", "name another with --image-column")
        labels, num_labels = read_labels(dataset, self._spec)
        plain = dataset.select_columns([name]).cast_column(name, Image(decode=False))
        if name != IMAGE:
            plain = plain.rename_column(name, IMAGE)
        # As plain bytes or paths, so that saving does not copy the image files into the dataset.
        plain = without_features(plain).add_column("labels", labels)
        plain.save_to_disk(str(self._folder / SAMPLES_FOLDER))
        return DataFacts(len(labels), num_labels)


def _is_of_lists(dataset: Any, column: str) -> bool:
    return column in dataset.column_names and hasattr(dataset.data.column(column).type, "value_type")


# The dataset itself: from a file, a folder or the hub


# Part of the message of the library datasets for files without rows.
_NO_DATA = "corresponds to no data"
# Most files that are compared to find one with other columns.
_MOST_COMPARED = 200
_MOST_COLUMNS = 8
_NOTHING = "nothing"


def load(spec: DataSpec, folder: Path) -> Any:
    """Return the ``Dataset`` of a split; temporary files go to ``folder``.

    Raises ``InvalidRequestError`` where it cannot be read, has no such split, or is empty.
    """
    try:
        loaded = load_from_disk(spec.source) if spec.kind == "saved" else _load_by_kind(spec, folder / "cache")
    except InvalidRequestError:
        raise
    except Exception as error:
        if _NO_DATA in str(error):
            raise _empty_dataset_error(spec) from error
        hint = f"check {'the dataset on the hub' if spec.kind == 'hub' else 'the files'}, and --split {spec.split}"
        if spec.kind == "hub":
            hint += "; no file or folder has this name"
        # The message of the library datasets only says that something failed; the exception's cause says what.
        why = first_line(error.__cause__ or error)
        raise wrong_data(spec, f" cannot be read: {why}", hint) from error
    if isinstance(loaded, DatasetDict):
        if spec.split not in loaded:
            raise wrong_data(spec, f" has no split {spec.split!r}", f"it has {', '.join(sorted(loaded))}")
        loaded = loaded[spec.split]
    if len(loaded) == 0:
        raise _empty_dataset_error(spec)
    return in_stored_order(loaded)


def _empty_dataset_error(spec: DataSpec) -> InvalidRequestError:
    return wrong_data(spec, f" has no samples (split {spec.split})", "give a dataset or split with samples")


def _load_by_kind(spec: DataSpec, cache: Path) -> Any:
    """Return a dataset from the hub, an image folder or files; ``load`` reads the kind ``saved``."""
    if spec.kind == "hub":
        name, _, config = spec.source.partition(":")
        # Read the revision that was looked up. Offline, only a revision that was downloaded earlier is there.
        revision = None if constants.HF_HUB_OFFLINE else commit_of(spec.content)
        return load_dataset(name, config or None, split=spec.split, revision=revision)
    if spec.kind == "imagefolder":
        return load_dataset("imagefolder", data_dir=spec.source, cache_dir=str(cache))
    files = data_files(spec.source, spec.kind, spec.split)
    links = under_plain_names(files, cache / "links")
    options = {"sep": "\t"} if spec.kind == "csv" and ".tsv" in links[0] else {}
    try:
        # ``files`` are those of the split alone, and datasets calls them ``train``.
        return load_dataset(spec.kind, data_files=links, split="train", cache_dir=str(cache), **options)
    except Exception as error:
        if len(files) > 1 and _NO_DATA not in str(error):
            # The library's message about files that differ names neither the files nor their columns.
            _check_same_columns(spec, files, links, options)
        raise


def _check_same_columns(spec: DataSpec, files: list[str], links: list[str], options: dict[str, str]) -> None:
    """Raise ``InvalidRequestError`` where the first samples of two files, read by ``links``, have different columns."""
    some = zip(files[:_MOST_COMPARED], links, strict=False)
    readable = [(file, kinds) for file, link in some if (kinds := _column_types(spec, link, options))]
    for file, kinds in readable[1:]:
        first, kinds_of_first = readable[0]
        # A missing value fits any type.
        is_like = kinds.keys() == kinds_of_first.keys() and all(
            kind == kinds_of_first[name] or _NOTHING in (kind, kinds_of_first[name]) for name, kind in kinds.items()
        )
        if not is_like:
            names = [in_one_line(str(Path(path).relative_to(spec.source))) for path in (file, first)]
            raise wrong_data(
                spec,
                f": {names[0]} has the columns {_columns_in_words(kinds)}, but {names[1]} has "
                f"{_columns_in_words(kinds_of_first)}",
                "give files with the same columns, or name one of the files with --dataset",
            )


def _column_types(spec: DataSpec, link: str, options: dict[str, str]) -> dict[str, str]:
    """Return the type of each column in a file's first sample; empty for an unreadable or empty file."""
    try:
        rows = load_dataset(spec.kind, data_files=[link], split="train", streaming=True, **options)
        row: dict[str, Any] = next(iter(rows), {})
    except Exception:
        return {}
    names = {type(None): _NOTHING, str: "text", int: "number", float: "number", bool: "number"}
    return {name: names.get(type(value), type(value).__name__) for name, value in row.items()}


def _columns_in_words(kinds: dict[str, str]) -> str:
    """Return the first columns with their types in words: ``text (text), label (number) …``."""
    some = [f"{name} ({kind})" for name, kind in kinds.items()]
    return in_one_line(", ".join(some[:_MOST_COLUMNS]) + (" …" if len(some) > _MOST_COLUMNS else ""))
