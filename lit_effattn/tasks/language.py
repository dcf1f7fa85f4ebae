"""Autoregressive models of token sequences: text, and the papers' synthetic tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lit_effattn import sequence
from lit_effattn.datamodules.tokenizers import Tokenizer
from lit_effattn.datamodules.tokens import IGNORE, TokenBatch
from lit_effattn.generation import generate
from lit_effattn.nn.heads import CategoricalHead, HeadFactory
from lit_effattn.nn.sliding import SlidingWindow
from lit_effattn.sequence import SequenceModule, State
from lit_effattn.tasks.base import Objective, Task
from lit_effattn.tasks.metrics import Accuracy, BitsPerByte, BitsPerCharacter, Count, Perplexity

Unit = Literal["byte", "character", "token"]

_METRICS = {
    "byte": ("bits_per_byte", BitsPerByte),
    "character": ("bits_per_character", BitsPerCharacter),
    "token": ("perplexity", Perplexity),
}

_MEMORY = ("mem_len", "clamp_len", "same_length")

EmbeddingFactory = Callable[[int, int], nn.Module]
"""Makes an embedding from the number of tokens and its width."""


class LanguageModel(Task):
    """Models a sequence of tokens as the product of their conditionals.

        p(x) = Π_t p(x_t | x_1 … x_{t−1}),  bits/byte = −Σ_t log2 p(x_t | …) / T,  perplexity = exp(−Σ_t ln p / T)

    A batch is a `TokenBatch`; its targets say which tokens are scored. With the callback `MemoryCarry` the backbone's
    state goes from one batch to the next, so that the context reaches beyond a segment.

    Args:
        backbone: Causal; mixes the sequence.
        vocab_size: Number of tokens. From the command: that of the data.
        unit: What a token is, and so what is reported: bits/byte, bits/character, or perplexity. From the command: as
            the data say.
        tokenizer: How text becomes tokens, as `Tokenizer.spec` says; checkpoints carry it, so that `generate` needs no
            data. From the command: that of the data.
        head: Makes the distribution over the tokens. Default: CategoricalHead.
        embedding: Makes the embedding. Default: torch.nn.Embedding.
        tie: Let head and embedding have one matrix (Press & Wolf 2017).
        optimizer: Makes the optimiser from the parameters. Default: torch.optim.RAdam.
        lr_scheduler: Makes the schedule from the optimiser; it steps once an optimiser step.
        embedding_std: Standard deviation of the initial embedding.
        embedding_scale: What the embedding is multiplied by (√d_model in Vaswani et al. 2017, section 3.4).
        label_smoothing: Of the training loss; what is reported has none.
        accuracy: Report how often the likeliest token is the right one, too.
        auxiliary_weight: Of the auxiliary losses that attention kinds have (Compressive's reconstruction).
        eval_mem_len: Memory in evaluation, for kinds that can change it (`set_memory`). Default: as in training.
        eval_clamp_len: Likewise, the largest distance that is told apart.
        eval_same_length: Likewise, whether all positions see equally far.
        eval_window: Evaluate by sliding a window of this length on by one, without memory (Al-Rfou et al. 2018);
            dear. See `SlidingWindow`.

    Raises:
        ValueError: the backbone is not causal, or a setting is for kinds that it does not have.
    """

    def __init__(
        self,
        backbone: SequenceModule,
        vocab_size: int,
        unit: Unit = "token",
        tokenizer: str | None = None,
        head: HeadFactory | None = None,
        embedding: EmbeddingFactory | None = None,
        tie: bool = False,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        embedding_std: float = 0.02,
        embedding_scale: float = 1.0,
        label_smoothing: float = 0.0,
        accuracy: bool = False,
        auxiliary_weight: float = 1.0,
        eval_mem_len: int | None = None,
        eval_clamp_len: int | None = None,
        eval_same_length: bool | None = None,
        eval_window: int | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        if not backbone.causal:
            raise ValueError("backbone has causal=False; a token must not see those it predicts, so set causal=True")
        if unit not in _METRICS:
            raise ValueError(f"unit={unit!r} is none of {', '.join(_METRICS)}")
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing={label_smoothing} is not a fraction from 0 to below 1")
        self.vocab_size = vocab_size
        self.unit = unit
        self.tokenizer = tokenizer
        self.embedding = (embedding or nn.Embedding)(vocab_size, backbone.d_input)
        if isinstance(self.embedding, nn.Embedding):
            nn.init.normal_(self.embedding.weight, std=embedding_std)
        self.embedding_scale = embedding_scale
        self.backbone = backbone
        # Not as the argument's default: see `Task`.
        self.head = (head or CategoricalHead)(backbone.d_model, vocab_size)
        if tie:
            self.head.tie(self.embedding)
        self.label_smoothing = label_smoothing
        self.auxiliary_weight = auxiliary_weight
        self.metric_name, kind = _METRICS[unit]
        self.monitor = f"val/{self.metric_name}"
        self.scores = nn.ModuleDict({stage: kind() for stage in ("val", "test")})
        self.accuracies = nn.ModuleDict({stage: Accuracy() for stage in ("val", "test")}) if accuracy else None
        self.count = Count()
        wanted = {"mem_len": eval_mem_len, "clamp_len": eval_clamp_len, "same_length": eval_same_length}
        self._eval_memory = {name: value for name, value in wanted.items() if value is not None}
        self._with_memory: list[Any] = [m for m in backbone.modules() if callable(getattr(m, "set_memory", None))]
        self._outside: list[list[dict[str, Any]]] = []  # memories' settings before each evaluation
        for name, value in self._eval_memory.items():
            if not any(hasattr(module, name) for module in self._with_memory):
                raise ValueError(f"eval_{name}={value}, but nothing in the backbone has a `{name}` that can be changed")
        self._sliding = None if eval_window is None else [SlidingWindow(backbone, eval_window)]  # not a submodule again

        self.carries_memory = False
        """Whether a batch goes on where the one before ended; `MemoryCarry` says so."""
        self.memory: State | None = None
        """The state after the last batch, detached."""

    @property
    def active_backbone(self) -> SequenceModule:
        """What reads the sequences now: the backbone, or in evaluation a window that slides over it."""
        return self.backbone if self.training or self._sliding is None else self._sliding[0].eval()

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.embedding_scale * self.embedding(tokens)

    def hidden(self, batch: TokenBatch) -> tuple[Tensor, State]:
        """Return the backbone's output (B, N, d_model), going on from `memory`, and its state.

        Raises:
            ValueError: a token is not of this vocabulary.
        """
        self._check(batch.inputs)
        memory = self.memory if self.carries_memory else None
        hidden, state = self.active_backbone(self._embed(batch.inputs), memory, batch.lengths)
        if self.carries_memory:
            self.memory = sequence.detach(state)
        return hidden, state

    def forward(self, batch: TokenBatch) -> Tensor:
        """Return −log p in nats of every target, 0 where none is scored: (B, N)."""
        hidden, _ = self.hidden(batch)
        return self.head.nll(hidden, batch.targets.clamp(min=0)).masked_fill(batch.targets == IGNORE, 0)

    def objective(self, batch: TokenBatch, memory: State | None = None) -> Objective:
        """Return the mean over the batch's targets, in nats, the auxiliary losses, and the state if it is carried."""
        hidden, state = self.active_backbone(self._embed(batch.inputs), memory, batch.lengths)
        scored = batch.targets != IGNORE
        losses = self.head.loss(hidden, batch.targets.clamp(min=0), self.label_smoothing)
        loss = losses.masked_fill(~scored, 0).sum() / scored.sum().clamp(min=1)
        objective = self.with_auxiliary(loss, {"train/loss": loss.detach()}, state, self.auxiliary_weight)
        return objective._replace(state=sequence.detach(state)) if self.carries_memory else objective

    def training_step(self, batch: TokenBatch) -> Tensor:
        """Return `objective`'s loss, going on from `memory`."""
        self._check(batch.inputs)
        loss, figures, state = self.run_objective(batch, self.memory if self.carries_memory else None)
        if self.carries_memory:
            self.memory = state
        for name, figure in figures.items():
            self.log(name, figure, prog_bar=name == "train/loss")
        return loss

    def validation_step(self, batch: TokenBatch) -> None:
        """Score a batch."""
        self._score("val", batch)

    def test_step(self, batch: TokenBatch) -> None:
        """Score a batch."""
        self._score("test", batch)

    def predict_step(self, batch: TokenBatch) -> dict[str, Tensor]:
        """Return how many targets each row has, and their mean −log2 p, (B,) each."""
        count = (batch.targets != IGNORE).sum(1)
        bits = self(batch).sum(1) / count.clamp(min=1) / torch.log(torch.tensor(2.0))
        return {"targets": count, "bits_per_target": bits}

    def _score(self, stage: str, batch: TokenBatch) -> None:
        hidden, _ = self.hidden(batch)
        scored = batch.targets != IGNORE
        hidden, targets = hidden[scored], batch.targets[scored]
        metrics: dict[str, Any] = {self.metric_name: self.scores[stage]}
        nll = self.head.nll(hidden, targets)
        metrics[self.metric_name](nll)
        if stage == "test":
            metrics[f"{self.unit}s"] = self.count
            metrics[f"{self.unit}s"](nll)
        if self.accuracies is not None:
            metrics["accuracy"] = self.accuracies[stage]
            metrics["accuracy"](self.head.log_probs(hidden).argmax(-1) == targets)
        # The metrics themselves, not their values: Lightning then adds the sums of all processes before it divides.
        for name, metric in metrics.items():
            self.log(f"{stage}/{name}", metric, on_step=False, on_epoch=True, prog_bar=True, batch_size=len(batch[0]))

    # -------------------------------------------------------------------------------------- memory in evaluation

    def on_validation_start(self) -> None:
        """Give the memories the length they have in evaluation."""
        before = [
            {name: getattr(module, name) for name in _MEMORY if hasattr(module, name)} for module in self._with_memory
        ]
        self._outside.append(before)  # a callback may draw samples within a validation
        for module, settings in zip(self._with_memory, before, strict=True):
            module.set_memory(**{**settings, **self._eval_memory})

    def on_validation_end(self) -> None:
        """Give the memories the length they have in training."""
        for module, settings in zip(self._with_memory, self._outside.pop(), strict=True):
            module.set_memory(**settings)

    on_test_start, on_test_end = on_validation_start, on_validation_end
    on_predict_start, on_predict_end = on_validation_start, on_validation_end

    # ------------------------------------------------------------------------------------------------- generation

    @torch.no_grad()
    def sample(
        self,
        prompt: Tensor,
        n_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        compile: bool = False,
        progress: Callable[[Iterable[int]], Iterable[int]] = iter,
        on_tokens: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Continue each row of `prompt` (B, P) by `n_tokens` tokens: see `generation.generate`.

        Returns:
            (B, n_tokens), the tokens drawn.
        """
        self._check(prompt)
        training = [module for module in self.modules() if module.training]  # parts may be frozen
        self.eval()
        self.on_validation_start()
        try:
            return generate(
                self.backbone,
                self._embed,
                self.head,
                prompt.to(self.device),
                n_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed,
                compile=compile,
                progress=progress,
                on_tokens=on_tokens,
            )
        finally:
            self.on_validation_end()
            for module in training:
                module.training = True

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another vocabulary, or else of another model: see `Task.on_load_checkpoint`.

        Raises:
            ValueError: describes both.
        """
        built = checkpoint.get("hyper_parameters", {})
        size, spec = built.get("vocab_size", self.vocab_size), built.get("tokenizer") or self.tokenizer
        if size != self.vocab_size or spec != (self.tokenizer or spec):
            raise ValueError(
                f"the checkpoint's vocabulary ({_described(size, spec)}) is not this model's "
                f"({_described(self.vocab_size, self.tokenizer)}): the same number means another token; use the text "
                "and the settings that the checkpoint was trained with"
            )
        super().on_load_checkpoint(checkpoint)

    @property
    def text(self) -> Tokenizer:
        """How text becomes tokens.

        Raises:
            ValueError: the model was trained on tokens that stand for no text.
        """
        if self.tokenizer is None:
            raise ValueError("the model's tokens stand for no text: it was trained without a tokenizer")
        return Tokenizer.from_spec(self.tokenizer)

    def _check(self, tokens: Tensor) -> None:
        if not sequence.reads_values(tokens) or tokens.numel() == 0:
            return
        for token in (int(tokens.min()), int(tokens.max())):
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"the data hold token {token}, but the model has vocab_size={self.vocab_size}: 0 … "
                    f"{self.vocab_size - 1}; give both the same vocabulary"
                )


def _described(size: int, tokenizer: str | None) -> str:
    return f"{size} tokens" if tokenizer is None else repr(Tokenizer.from_spec(tokenizer))
