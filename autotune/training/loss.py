"""Compute the loss of a causal language model without all of its logits; divide a loss where nobody else would.

Logits have a number for each token and each word of the vocabulary, so that they and their gradients are the largest
tensors of a small model. Here they are made for some tokens at a time. Their gradients are known as soon as the loss
is, and are reduced at once to those of the hidden states and of the output layer.

The ``Trainer`` leaves the division to every model whose ``forward`` takes any keyword, since it may divide by
``num_items_in_batch``. BERT, T5 and others take it and ignore it: with transformers 5.23 accumulating 8 micro-batches
has 8 times the loss and gradients of one batch of as many samples.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from transformers import Trainer
from transformers.loss.loss_utils import ForCausalLMLoss

from autotune.training.batches import (
    IGNORED,
    SettingUnavailableError,
    check_loss_is_models,
    during_training,
    in_evaluation_mode,
    undone_on_error,
    without_adapters,
    wrap_forward,
)

# Number of logits that exist at once: 1 GiB in float32. Smaller pieces take more launches; with larger ones nothing
# more is gained.
_LOGITS_AT_ONCE = 2**28
# Number of parts in which the logits of a piece are converted to float32, and its gradient of the weights is computed:
# these then take little memory beside the 16-bit logits. Logits below 64 MiB in float32 are converted at once.
_PARTS = 8
_PARTED_FROM = 2**24
# Logits at which a loss is tried: beyond the caps of transformers' models (15 to 50). A choice.
_LARGE = 100.0
# Largest relative difference of the stock and the fused loss, and of their gradients by a few parameters, in 16 bits.
# Caps at these logits change them by more than a half. A choice.
_ALIKE = 0.05


_Piece = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Computes the loss of a piece of a batch's tokens, and its gradient by their logits."""


def _of_logits(
    logits: torch.Tensor, labels: torch.Tensor, divisor: torch.Tensor, into: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed cross entropy of logits (tokens, vocabulary), and its gradient divided by ``divisor``.

    The gradient has the logits' dtype. It is written to ``into`` if given. Logits in float32 are overwritten.
    """
    is_counted = labels != IGNORED
    labels = labels.where(is_counted, 0).unsqueeze(1)
    gradient = logits.float()
    largest = gradient.amax(1, keepdim=True)
    of_labels = gradient.gather(1, labels) - largest
    # In place: their softmax, minus one at the label.
    gradient = gradient.sub_(largest).exp_()
    total = gradient.sum(1, keepdim=True)
    loss = ((total.log() - of_labels).squeeze(1) * is_counted).sum()
    # Divided before the cast, so that it rounds as without this function: 0.999 alone is 1 in bfloat16.
    # Zero also where no label counts at all: the loss is 0 / 0 then, and torch's cross entropy has gradients of zero.
    share = torch.where(is_counted.unsqueeze(1), 1 / divisor, 0.0)
    gradient.mul_(share / total).scatter_add_(1, labels, -share)
    return loss, gradient.to(logits.dtype) if into is None else into.copy_(gradient)


def _piece(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor, divisor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed cross entropy of some tokens, and its gradient by the logits, divided by ``divisor``.

    Large logits are overwritten with their gradient, a part in float32 at a time. Compiled code never holds logits in
    float32, and needs no parts.
    """
    logits = functional.linear(hidden, weight, bias)
    if torch.compiler.is_compiling() or logits.dtype == torch.float32 or logits.numel() < _PARTED_FROM:
        return _of_logits(logits, labels, divisor)
    losses = [
        _of_logits(part, labels_of_part, divisor, into=part)[0]
        for part, labels_of_part in zip(logits.chunk(_PARTS), labels.chunk(_PARTS), strict=True)
    ]
    return torch.stack(losses).sum(), logits


def _compiled_piece(backend: str) -> _Piece:
    """Return ``_piece`` compiled once, for any number of tokens."""
    compiled = torch.compile(_piece, backend=backend)

    def piece(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        divisor: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for each in (hidden, labels):
            torch._dynamo.maybe_mark_dynamic(each, 0)
        # In the first micro-step the divisor may require a gradient, and be no integer as it then is before
        # transformers 5.23: other code would be compiled for either.
        return compiled(hidden, weight, bias, labels, divisor.detach().float())

    return piece


def pieces_of(tokens: int, words: int) -> int:
    """Return in how many pieces to divide ``tokens`` with ``words`` logits each: up to ``_LOGITS_AT_ONCE`` in a piece.

    A power of two: compiled code is for one size, and most batches can be halved into equal pieces.
    """
    pieces = 1
    while tokens * words > pieces * _LOGITS_AT_ONCE:
        pieces *= 2
    return pieces


@dataclass
class Sums:
    """The loss of a linear layer's output, and its gradients that are asked for, summed over the pieces so far."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    loss: torch.Tensor
    # Gradients of the loss by the layer's input and parameters.
    of_hidden: torch.Tensor | None
    of_weight: torch.Tensor | None
    of_bias: torch.Tensor | None

    def add(self, piece: _Piece, start: int, hidden: torch.Tensor, labels: torch.Tensor, divisor: torch.Tensor) -> None:
        """Add the loss and gradients of the tokens from ``start`` on whose hidden states are given, by ``piece``."""
        hidden = hidden.to(self.weight.dtype)
        entropy, gradient = piece(hidden, self.weight, self.bias, labels, divisor)
        self.loss += entropy
        if self.of_hidden is not None:
            self.of_hidden[start : start + len(hidden)] = gradient @ self.weight
        if self.of_weight is not None:
            for of_rows, rows in zip(self.of_weight.chunk(_PARTS), gradient.chunk(_PARTS, dim=1), strict=True):
                if of_rows.dtype == rows.dtype:
                    of_rows.addmm_(rows.T, hidden)
                else:
                    of_rows += rows.T @ hidden
        if self.of_bias is not None:
            self.of_bias += gradient.float().sum(0)


class _LinearCrossEntropy(torch.autograd.Function):
    """The cross entropies of ``hidden @ weight.T + bias``, summed and divided; see ``linear_cross_entropy``."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        count: torch.Tensor,
        piece: _Piece,
        loss_scale: torch.Tensor | None,
    ) -> torch.Tensor:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # Autocast is off inside of a Function: the same casts by hand.
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        tokens = max(1, -(-hidden.shape[0] // pieces_of(hidden.shape[0], weight.shape[0])))
        sums = Sums(
            weight.to(dtype),
            bias.to(dtype) if bias is not None else None,
            torch.zeros((), dtype=torch.float32, device=hidden.device),
            torch.empty_like(hidden) if needs_hidden else None,
            torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None,
            torch.zeros_like(bias, dtype=torch.float32) if needs_bias and bias is not None else None,
        )
        divisor = count if loss_scale is None else count / loss_scale
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, hidden.shape[0], tokens):
                end = start + tokens
                sums.add(piece, start, hidden[start:end], labels[start:end], divisor)
        ctx.save_for_backward(sums.of_hidden, sums.of_weight, sums.of_bias, loss_scale)
        ctx.dtypes = weight.dtype, bias.dtype if bias is not None else None
        return sums.loss / count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Scale the gradients that ``forward`` computed, in place; they have ``loss_scale`` as a factor already."""
        of_hidden, of_weight, of_bias, loss_scale = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        scale = grad_output if loss_scale is None else grad_output / loss_scale
        return (
            of_hidden.mul_(scale) if of_hidden is not None else None,
            of_weight.mul_(scale).to(weight_dtype) if of_weight is not None else None,
            of_bias.mul_(scale).to(bias_dtype) if of_bias is not None else None,
            None,
            None,
            None,
            None,
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    count: torch.Tensor | int | None = None,
    piece: _Piece = _piece,
    loss_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the cross entropy of a linear layer's output; tokens with label -100 are ignored.

    ``hidden``: (tokens, size); ``weight``: (vocabulary, size); ``labels``: (tokens). The sum over the tokens is divided
    by ``count``, by default the number of tokens with a label. The result is float32. Gradients are computed in the
    forward pass, so that it can be differentiated once. ``piece`` may be compiled. ``loss_scale`` is the factor of a
    gradient scaler: in float16 the gradients of logits are too small without it.
    """
    if not torch.is_grad_enabled():
        hidden, weight, bias = hidden.detach(), weight.detach(), bias.detach() if bias is not None else None
    divisor = (labels != IGNORED).sum() if count is None else torch.as_tensor(count, device=hidden.device)
    return _LinearCrossEntropy.apply(hidden, weight, bias, labels, divisor, piece, loss_scale)  # type: ignore[no-untyped-call, no-any-return]


class _FusedLoss:
    """Takes the place of a model's output layer and of its loss, where nothing but the loss is asked for."""

    def __init__(self, layer: torch.nn.Linear, piece: _Piece, scaler: torch.amp.GradScaler | None) -> None:
        self._layer = layer
        self._piece = piece
        self._scaler = scaler
        self.logits_of_layer = layer.forward
        self.trains_for_loss = True
        """Whether a training needs the loss alone: during it, and in the comparison before it."""
        self.is_evaluated_for_loss = False
        """Whether an evaluation runs that asks for no logits."""
        self.has_labels = False
        """Whether the model was called with labels, without which it has no loss."""

    @property
    def _is_for_loss(self) -> bool:
        """Whether the current call needs no logits but only the loss."""
        is_trained = self.trains_for_loss and self._layer.training and torch.is_grad_enabled()
        return self.has_labels and (self.is_evaluated_for_loss or is_trained)

    def undo(self, model: Any) -> None:
        """Restore the model's own output layer and loss."""
        layer, model = self._layer, without_adapters(model)
        layer.forward, model.loss_function = self.logits_of_layer, ForCausalLMLoss  # type: ignore[method-assign]
        vars(model).pop("_fused_loss", None)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the output layer's logits, or where only the loss is needed, its input, the hidden states."""
        return hidden if self._is_for_loss else self.logits_of_layer(hidden)

    def loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = IGNORED,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the loss of ``ForCausalLMLoss``, where possible from hidden states."""
        if logits.shape[-1] != self._layer.in_features or not self._is_for_loss:
            return ForCausalLMLoss(  # type: ignore[no-any-return]
                logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
            )
        if shift_labels is None:
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        flat = shift_labels.reshape(-1).to(logits.device)
        flat = flat.where(flat != ignore_index, IGNORED)
        hidden = logits.reshape(-1, logits.shape[-1])
        one = torch.ones((), device=hidden.device)
        return linear_cross_entropy(  # type: ignore[no-any-return]
            hidden, self._layer.weight, self._layer.bias, flat, num_items_in_batch, self._piece,
            self._scaler.scale(one) if self._scaler is not None else None,
        )  # fmt: skip


def _of_few_tokens(trainer: Any, model: Any) -> list[torch.Tensor]:
    """Return a training's loss of a few tokens and some of its gradients, to compare the stock and the fused loss.

    The tokens' logits are so large that a model that limits logits changes them. The gradients are those by the two
    smallest parameters, since those of all would be as large as the model. Raises ``SettingUnavailableError`` where the
    loss cannot be computed from tokens alone.
    """
    layer: torch.nn.Linear = without_adapters(model).get_output_embeddings()
    trained = [each for each in model.parameters() if each.requires_grad and each.is_floating_point()]

    def enlarge(_: Any, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Scale hidden states so that their logits reach ``_LARGE``."""
        with torch.no_grad():
            largest = float(functional.linear(given[0], layer.weight.to(given[0].dtype)).abs().max())
        return given[0] * (_LARGE / largest if largest else 1.0), *given[1:]

    hook = layer.register_forward_pre_hook(enlarge)
    with undone_on_error(hook.remove, "its loss cannot be tried on a few tokens"):
        tokens = torch.arange(8, device=next(model.parameters()).device).reshape(2, 4) % layer.weight.shape[0]
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
        with in_evaluation_mode(model), trainer.compute_loss_context_manager():
            # _FusedLoss computes the loss without logits only if this is set.
            layer.training = True
            loss = trainer.compute_loss(model, inputs)
        gradients = torch.autograd.grad(loss, sorted(trained, key=torch.Tensor.numel)[:2], allow_unused=True)
    hook.remove()
    return [loss.detach(), *(gradient for gradient in gradients if gradient is not None)]


def _are_alike(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Return whether two losses, and their gradients, differ by no more than ``_ALIKE`` relatively."""
    return len(some) == len(others) and all(
        bool((one - other).norm() <= _ALIKE * one.norm()) for one, other in zip(some, others, strict=True)
    )


def _layer_of(model: Any) -> Any:
    """Return the output layer of a causal language model, after undoing an earlier fused loss of the model.

    Raises ``SettingUnavailableError`` for another loss, or for an output layer that is not ``torch.nn.Linear``.
    """
    name, layer = type(model).__name__, model.get_output_embeddings()
    if (earlier := vars(model).get("_fused_loss")) is not None:
        # This fused loss is another Trainer's, and has that one's scaler.
        earlier.undo(model)
    # FSDP2 makes a class of its own of the layer's; it keeps the weights whole from this layer's forward pass on.
    if type(layer) is not torch.nn.Linear and type(layer).__bases__ != (FSDPModule, torch.nn.Linear):
        raise SettingUnavailableError(f"the output layer of {name} is {type(layer).__name__}, not torch.nn.Linear")
    if model.loss_function is not ForCausalLMLoss:
        raise SettingUnavailableError(f"the loss of {name} is not that of a causal language model")
    return layer


def fuse_loss_of(model: Any, piece: _Piece = _piece, scaler: torch.amp.GradScaler | None = None) -> _FusedLoss:
    """Make a model compute its loss without all logits, and return the object that controls this.

    ``piece`` may be compiled; ``scaler`` is the training's gradient scaler, if it has one. Raises
    ``SettingUnavailableError`` for a model with another loss or another kind of output layer.
    """
    model = without_adapters(model)
    layer = _layer_of(model)
    fused = _FusedLoss(layer, piece, scaler)
    layer.forward, model.loss_function = fused.logits, fused.loss
    model._fused_loss = fused

    def forward(model: Any, whole: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # A copy of the model has a fused loss of its own.
        if (own := vars(model).get("_fused_loss")) is not None:
            own.has_labels = kwargs.get("labels") is not None
        return whole(model, *args, **kwargs)

    # An earlier wrapper serves the new fused loss as well.
    if not getattr(model.forward, "_tells_labels", False):
        wrap_forward(model, forward)
        model.forward.__func__._tells_labels = True
    return fused


def fuse_loss(trainer: Trainer) -> None:
    """Make a causal language model compute its loss without all logits while it trains.

    It then returns no logits, nor in evaluations for the loss alone: logits would take more memory there. Raises
    ``SettingUnavailableError`` for a model with another loss or another kind of output layer, and where the loss or
    gradients of a few tokens change: for a model that changes its logits after that layer (a cap, a scale, a smaller
    vocabulary), or computes its loss by itself; and for label smoothing or the user's own loss, which may read logits.
    """
    if type(trainer).compute_loss is not Trainer.compute_loss or "compute_loss" in vars(trainer):
        raise SettingUnavailableError(
            f"{type(trainer).__name__}.compute_loss is your own, and may read logits, which it would not be given"
        )
    check_loss_is_models(trainer)
    # Element-wise kernels on the logits are most of the loss's time; compiled, they are two.
    args = trainer.args
    piece = _compiled_piece(args.torch_compile_backend or "inductor") if args.torch_compile else _piece
    model = trainer.accelerator.unwrap_model(trainer.model)
    # Undoes the fused loss of another Trainer, since the comparison is with the stock loss.
    _layer_of(without_adapters(model))
    is_meta = next(model.parameters()).is_meta
    stock = _of_few_tokens(trainer, model) if not is_meta else []
    fused = fuse_loss_of(model, piece, trainer.accelerator.scaler)
    if not is_meta:
        undo = functools.partial(fused.undo, model)
        # Compiled, the few tokens would take seconds.
        with undone_on_error(undo, "it does not compute its loss alone"), torch.compiler.set_stance("force_eager"):
            if not _are_alike(stock, _of_few_tokens(trainer, model)):
                raise SettingUnavailableError(
                    f"the loss of {type(without_adapters(model)).__name__} is another one where it is computed without "
                    "logits: they are changed or read after the output layer"
                )
    fused.trains_for_loss = False
    during_training(trainer, functools.partial(_flag_set, fused, "trains_for_loss"))
    step = trainer.prediction_step

    def prediction_step(model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        with _flag_set(fused, "is_evaluated_for_loss") if prediction_loss_only else contextlib.nullcontext():
            return step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)

    trainer.prediction_step = prediction_step


@contextlib.contextmanager
def _flag_set(fused: _FusedLoss, name: str) -> Iterator[None]:
    """Set a flag of a fused loss for the duration of the block."""
    setattr(fused, name, True)
    try:
        yield
    finally:
        setattr(fused, name, False)


def divide_by_accumulation(trainer: Trainer) -> None:
    """Have a ``Trainer`` divide the loss by the accumulation where the model ignores ``num_items_in_batch``.

    The first micro-step shows it. ``model_accepts_loss_kwargs`` then becomes ``False`` in time for this micro-step, so
    that the Trainer divides; its ``divides_by_accumulation`` says whether it does. A model that is compiled as a whole
    runs this micro-step without the compiler.
    """
    accepts_items = vars(trainer).get("model_accepts_loss_kwargs")
    if accepts_items and trainer.args.gradient_accumulation_steps > 1:
        trainer.compute_loss = _FirstLoss(trainer)


def withdraw_division(trainer: Trainer) -> None:
    """Undo ``divide_by_accumulation`` on a ``Trainer`` that has not trained since."""
    if isinstance(trainer.compute_loss, _FirstLoss):
        trainer.compute_loss.withdraw()


class _FirstLoss:
    """Takes the place of a Trainer's ``compute_loss`` in its first micro-step, for ``divide_by_accumulation``."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._compute = trainer.compute_loss
        # An attribute of the Trainer, if somebody has set one; else the method of its class.
        self._earlier = vars(trainer).get("compute_loss")

    def withdraw(self) -> None:
        """Restore the Trainer's own ``compute_loss``."""
        if self._earlier is None:
            del self._trainer.compute_loss
        else:
            self._trainer.compute_loss = self._earlier

    def __call__(self, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        """Return the loss; in training, check by its autograd graph whether it depends on the number of items."""
        trainer = self._trainer
        if num_items_in_batch is None or not torch.is_grad_enabled():
            return self._compute(*args, num_items_in_batch=num_items_in_batch, **kwargs)
        self.withdraw()
        items = torch.as_tensor(num_items_in_batch, dtype=torch.float32, device=trainer.args.device).detach().clone()
        items.requires_grad_()
        # The autograd graph of a model that is compiled as a whole does not show what its loss depends on. Compiled
        # layers stay compiled: what a checkpoint recomputes must be what was computed.
        layers = set(trainer.model.modules()) - {trainer.model}
        is_by_layer = any(layer._compiled_call_impl is not None for layer in layers)
        with contextlib.nullcontext() if is_by_layer else torch.compiler.set_stance("force_eager"):
            computed = self._compute(*args, num_items_in_batch=items, **kwargs)
        loss = computed[0] if isinstance(computed, tuple) else computed
        trainer.divides_by_accumulation = trainer.compute_loss_func is None and not _depends_on(loss, items)
        if trainer.divides_by_accumulation:
            trainer.model_accepts_loss_kwargs = False
            if not trainer.is_deepspeed_enabled:
                # Before transformers 5.6, Accelerate divides too: the gradient, not the loss that is logged.
                trainer.accelerator.gradient_accumulation_steps = 1
        return computed


def _depends_on(loss: torch.Tensor, leaf: torch.Tensor) -> bool:
    """Return whether the autograd graph of a loss contains a leaf tensor, so that the loss was computed from it."""
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop(0)
        if node is None or node in seen:
            continue
        if getattr(node, "variable", None) is leaf:
            return True
        seen.add(node)
        nodes += [before for before, _ in node.next_functions]
    return False
