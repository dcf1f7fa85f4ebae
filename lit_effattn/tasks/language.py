"""Autoregressive models of token sequences: text, and the papers' synthetic tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lit_effattn import sequence
from lit_effattn.checkpoints.printable import printable
from lit_effattn.checkpoints.runs import short
from lit_effattn.datamodules.common.files import regular
from lit_effattn.datamodules.common.tokens import IGNORE, Response, TokenBatch
from lit_effattn.datamodules.text.tokenizers import NumberTokenizer, Tokenizer
from lit_effattn.generation.beam import LENGTH_PENALTY, Hypotheses, LengthNorm, beam_search
from lit_effattn.generation.sampling import AS_TRAINED, Sampling, SamplingOptions, generate
from lit_effattn.nn.heads import CategoricalHead, HeadFactory
from lit_effattn.nn.sliding import SlidingWindow
from lit_effattn.sequence import SequenceModule, State
from lit_effattn.tasks.auxiliary import FurtherPredictions, mean_of_scored
from lit_effattn.tasks.base import Objective, Task, carried, check_backbone, check_fields
from lit_effattn.tasks.metrics import Accuracy, BitsPerByte, BitsPerCharacter, BitsPerTextByte, Count, Perplexity
from lit_effattn.tasks.responses import ResponseMetric, Responses, score_texts, write_file

if TYPE_CHECKING:
    from typing_extensions import Unpack

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
        unit: What a token is, and so what is reported: bits/byte, bits/character, or perplexity; of byte pairs, whose
            number of bytes is known, bits/byte too. From the command: as the data say.
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
            dear. See `SlidingWindow`. Only with the callback `MemoryCarry` does it slide from segment to segment.
        test_lengths: Lengths of sequences, for each of which `test` reports the accuracy as `accuracy_64` and so on,
            with `accuracy`. From the command: those of the data.
        intermediate_losses: In training every layer predicts, from its output and with a head of its own, too. Layer l
            of n stops after l / (2 n) of the run: see `FurtherPredictions`. Needs a `Transformer`.
        n_targets: How many of the next tokens each position predicts in training, each with a head of its own. What is
            reported is the next one.
        target_weight: Weight of the loss of each target but the first.
        response_metrics: Write the responses that the data mark, such as the turns of a dialogue, and score them with
            these: "f1" and "rouge_l", from 0 to 100, by torchmetrics; "exact_match", the fraction of responses whose
            words are right. `test` reports them, `predict` writes the responses to a file. A response is written after
            the right tokens before it.
        beam: Hypotheses of the search for a response; 1 is greedy.
        max_response_len: Most tokens of a response, the end token included.

    Raises:
        ValueError: the backbone is not causal, or a setting is for kinds that it does not have.
    """

    fixed_by_data = ("vocab_size", "unit", "tokenizer", "test_lengths")

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
        test_lengths: tuple[int, ...] | None = None,
        intermediate_losses: bool = False,
        n_targets: int = 1,
        target_weight: float = 0.5,
        response_metrics: Sequence[ResponseMetric] = (),
        beam: int = 1,
        max_response_len: int = 64,
    ) -> None:
        check_backbone(backbone)
        responses = Responses(response_metrics, beam=beam, max_len=max_response_len)
        super().__init__(optimizer, lr_scheduler)
        if not backbone.causal:
            raise ValueError("backbone has causal=False; a token must not see those it predicts, so set causal=True")
        if unit not in _METRICS:
            raise ValueError(f"unit={unit!r} is not one of {', '.join(_METRICS)}")
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
        self.further: FurtherPredictions | None = None
        self.intermediate_losses = intermediate_losses
        self._n_steps = math.inf
        if intermediate_losses and not hasattr(backbone, "layer_outputs"):
            raise ValueError(
                f"intermediate_losses=True, but {type(backbone).__name__} does not give its layers' outputs; use a "
                "Transformer, or leave it out"
            )
        if intermediate_losses or n_targets != 1:
            self.further = FurtherPredictions(
                lambda: (head or CategoricalHead)(backbone.d_model, vocab_size),
                n_layers=len(backbone.blocks) if intermediate_losses else 1,  # type: ignore[arg-type]
                n_targets=n_targets,
                target_weight=target_weight,
            )
        self.label_smoothing = label_smoothing
        self.auxiliary_weight = auxiliary_weight
        self.metric_name, kind = _METRICS[unit]
        self.monitor = f"val/{self.metric_name}"
        self.scores = nn.ModuleDict({stage: kind() for stage in ("val", "test")})
        self.byte_scores = nn.ModuleDict({stage: BitsPerTextByte() for stage in ("val", "test")})
        self._token_bytes: Tensor | None = None  # see `token_bytes`
        self.accuracies = nn.ModuleDict({stage: Accuracy() for stage in ("val", "test")}) if accuracy else None
        lengths = test_lengths if accuracy else None
        self.accuracy_by_length = nn.ModuleDict({str(n): Accuracy() for n in lengths or ()})
        self.count = Count()
        if response_metrics and eval_window is not None:
            raise ValueError(
                f"response_metrics={list(response_metrics)} and eval_window={eval_window}: responses are written from "
                "a memory, which a sliding window does not have; leave out one of them"
            )
        self._responses = responses
        self.response_scores = responses.scores()
        wanted = {"mem_len": eval_mem_len, "clamp_len": eval_clamp_len, "same_length": eval_same_length}
        self._eval_memory = {name: value for name, value in wanted.items() if value is not None}
        self._with_memory: list[Any] = [m for m in backbone.modules() if callable(getattr(m, "set_memory", None))]
        self._outside: list[list[dict[str, Any]]] = []  # memories' settings before each evaluation
        for name, value in self._eval_memory.items():
            if not any(hasattr(module, name) for module in self._with_memory):
                raise ValueError(
                    f"eval_{name}={value}, but no module in the backbone has a `{name}` that can be changed"
                )
        self._sliding = None if eval_window is None else [SlidingWindow(backbone, eval_window)]  # not a submodule again

    @property
    def active_backbone(self) -> SequenceModule:
        """What reads the sequences now: the backbone, or in evaluation a window that slides over it."""
        return self.backbone if self.training or self._sliding is None else self._sliding[0].eval()

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.embedding_scale * self.embedding(tokens)

    def hidden(self, batch: TokenBatch, memory: State | None = None) -> tuple[Tensor, State]:
        """Return the backbone's output (B, N, d_model), going on from `memory`, and its state after the batch."""
        return self.active_backbone(self._embed(batch.inputs), memory, batch.lengths)

    def forward(self, batch: TokenBatch, memory: State | None = None) -> Tensor:
        """Return −log p in nats of every target, going on from `memory`, 0 where none is scored: (B, N).

        Raises:
            ValueError: a token is not of this vocabulary.
        """
        self.check_batch(batch)
        return self._nll(self.hidden(batch, memory)[0], batch.targets)

    def _nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return self.head.nll(hidden, targets.clamp(min=0)).masked_fill(targets == IGNORE, 0)

    def objective(self, batch: TokenBatch, memory: State | None = None) -> Objective:
        """Return the mean over the batch's targets, in nats, the auxiliary losses, and the state after `memory`."""
        outputs, state = self._outputs(batch, memory)
        losses = self.head.loss(outputs[-1], batch.targets.clamp(min=0), self.label_smoothing)
        loss = mean_of_scored(losses, batch.targets)
        figures = {"train/loss": loss.detach()}
        if self.further is not None:
            further = self.further(outputs, batch.targets, self.label_smoothing)
            loss, figures["train/auxiliary_loss/FurtherPredictions"] = loss + further, further.detach()
        objective = self.with_auxiliary(loss, figures, state, self.auxiliary_weight)
        return objective._replace(state=carried(memory, state))

    def _outputs(self, batch: TokenBatch, memory: State | None) -> tuple[list[Tensor], State]:
        """Return the outputs, (B, N, d_model) each, from which tokens are predicted in training, and the state."""
        if self.intermediate_losses:
            return self.backbone.layer_outputs(self._embed(batch.inputs), memory, batch.lengths)  # type: ignore[operator]
        hidden, state = self.hidden(batch, memory)
        return [hidden], state

    def on_train_start(self) -> None:
        """Look up the number of steps of the run, of which a share has intermediate losses."""
        if self.further is not None:
            known = self.trainer.estimated_stepping_batches  # -1: not known
            self._n_steps = known if known > 0 else math.inf

    def on_train_batch_start(self, batch: TokenBatch, batch_idx: int) -> None:
        """Stop intermediate losses when their share of the run is done."""
        if self.further is not None:
            self.further.follow(self.trainer.global_step, self._n_steps)

    def training_step(self, batch: TokenBatch) -> Tensor:
        """Return the loss of `objective`. Compiled code is not compiled again for other responses."""
        return super().training_step(batch._replace(responses=None) if getattr(batch, "responses", None) else batch)

    def part_of(self, batch: TokenBatch, rank: int, size: int) -> TokenBatch:
        """Return the positions of `batch` that process `rank` of `size` computes: see `strategies.SequenceParallel`.

        Raises:
            ValueError: an option needs whole sequences, or there are fewer positions than processes.
        """
        for name, needs_whole in (
            ("n_targets", self.further is not None and self.further.n_targets > 1),
            ("eval_window", self._sliding is not None),
            ("test_lengths", bool(self.accuracy_by_length)),
            ("response_metrics", bool(self._responses.metrics)),
            ("the callback Compile", self._objective is not type(self).objective),
        ):
            if needs_whole:
                raise ValueError(f"SequenceParallel: {name} needs whole sequences; leave it out")
        self.check_batch(batch)
        n = batch.inputs.size(1)
        if n < size:
            raise ValueError(f"SequenceParallel: size={size}, but sequences have {n} positions; use fewer processes")
        begin, end = rank * n // size, (rank + 1) * n // size
        lengths = None if batch.lengths is None else (batch.lengths - begin).clamp(0, end - begin)
        return TokenBatch(batch.inputs[:, begin:end], batch.targets[:, begin:end], lengths, batch.fresh)

    def predict_step(self, batch: TokenBatch) -> dict[str, Tensor] | list[tuple[Response, str]]:
        """Return how many targets each row has, and their mean −log2 p, (B,) each.

        With `response_metrics`, return the responses that begin in the batch, with what the model writes.
        """
        self.check_batch(batch)
        before = self.memory
        hidden, state = self.hidden(batch, before)
        self.memory = carried(before, state)
        if self._responses.metrics:
            return self._written(batch, before)
        count = (batch.targets != IGNORE).sum(1)
        bits = self._nll(hidden, batch.targets).sum(1) / count.clamp(min=1) / torch.log(torch.tensor(2.0))
        return {"targets": count, "bits_per_target": bits}

    def evaluate(
        self, stage: str, batch: TokenBatch, memory: State | None = None
    ) -> tuple[dict[str, Any], State | None]:
        """Score a batch, going on from `memory`: see `Task.evaluate`. In test, write and score the wanted responses."""
        self._check_window(batch, memory)
        hidden, state = self.hidden(batch, memory)
        if stage == "test" and self._responses.metrics:
            score_texts(self.response_scores, self._written(batch, memory))
        return self.score(stage, batch, hidden), carried(memory, state)

    def score(self, stage: str, batch: TokenBatch, hidden: Tensor | None = None) -> dict[str, Any]:
        """Update bits or perplexity, and the accuracy if it is wanted; in test the count of what is scored, too.

        Args:
            stage: "val" or "test".
            batch: What is scored.
            hidden: The backbone's output (B, N, d_model). Default: that without a memory.
        """
        hidden = self.hidden(batch)[0] if hidden is None else hidden
        scored = batch.targets != IGNORE
        hidden, targets = hidden[scored], batch.targets[scored]
        metrics: dict[str, Any] = {self.metric_name: self.scores[stage]}
        nll = self.head.nll(hidden, targets)
        metrics[self.metric_name](nll)
        if (sizes := self.token_bytes) is not None:
            metrics["bits_per_byte"] = self.byte_scores[stage]
            metrics["bits_per_byte"](nll, sizes.to(targets.device)[targets])
        if stage == "test":
            metrics[f"{self.unit}s"] = self.count
            metrics[f"{self.unit}s"](nll)
            metrics |= dict(self.response_scores.items())
        if self.accuracies is not None:
            metrics["accuracy"] = self.accuracies[stage]
            right = self.head.log_probs(hidden).argmax(-1) == targets
            metrics["accuracy"](right)
            if stage == "test":
                metrics |= self._by_length(batch, scored, right)
        return metrics

    def _check_window(self, batch: TokenBatch, memory: State | None) -> None:
        """Warn if the window never slides beyond a segment, so that scores are those without it."""
        n = batch.inputs.size(1)
        if self._sliding is not None and memory is None and n <= self._sliding[0].window:
            rank_zero_warn(
                f"eval_window={self._sliding[0].window} changes nothing: a segment has {n} positions, and none is seen "
                "from the next segment; add the callback, --trainer.callbacks MemoryCarry"
            )

    def _by_length(self, batch: TokenBatch, scored: Tensor, right: Tensor) -> dict[str, Any]:
        """Update the accuracy of each length, and return all: a process may have no sequence of some length."""
        full = torch.full_like(batch.inputs[:, 0], batch.inputs.size(1))
        lengths = full if batch.lengths is None else batch.lengths
        of_target = lengths[:, None].expand_as(scored)[scored]  # (B, N) -> (T,)
        metrics: dict[str, Any] = dict(self.accuracy_by_length.items())
        for n, metric in metrics.items():
            metric.update(right[of_target == int(n)])
        return {f"accuracy_{n}": metric for n, metric in metrics.items()}

    def _written(self, batch: TokenBatch, memory: State | None) -> list[tuple[Response, str]]:
        text = NumberTokenizer(self.vocab_size) if self.tokenizer is None else self.text
        return self._responses.write(
            batch, memory, backbone=self.backbone, embed=self._embed, head=self.head, text=text
        )

    def write_predictions(self, predictions: list[Any], folder: Path) -> str:
        """Write what `predict_step` returned: the responses if they are wanted; see `Task.write_predictions`."""
        wanted = bool(self._responses.metrics)
        return write_file(predictions, folder) if wanted else super().write_predictions(predictions, folder)

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
        sampling: Sampling = AS_TRAINED,
        progress: Callable[[Iterable[int]], Iterable[int]] = iter,
        on_tokens: Callable[[Tensor], None] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Tensor:
        """Continue each row of `prompt` (B, P) by `n_tokens` tokens: see `generation.generate`.

        Returns:
            (B, n_tokens), the tokens drawn.
        """
        self._check_tokens(prompt)
        with self._in_evaluation():
            return generate(
                self.backbone,
                self._embed,
                self.head,
                prompt.to(self.device),
                n_tokens,
                sampling=sampling,
                progress=progress,
                on_tokens=on_tokens,
                **options,
            )

    @torch.no_grad()
    def beam_search(
        self,
        prompt: Tensor,
        max_len: int,
        *,
        beam: int,
        end: int | None = None,
        length_penalty: float = LENGTH_PENALTY,
        length_norm: LengthNorm = "gnmt",
        n_best: int = 1,
        progress: Callable[[Iterable[int]], Iterable[int]] = iter,
    ) -> Hypotheses:
        """Find the likeliest continuations of each row of `prompt` (B, P): see `beam.beam_search`."""
        self._check_tokens(prompt)
        with self._in_evaluation():
            return beam_search(
                self.backbone,
                self._embed,
                self.head,
                prompt.to(self.device),
                max_len,
                beam=beam,
                end=end,
                length_penalty=length_penalty,
                length_norm=length_norm,
                n_best=n_best,
                progress=progress,
            )

    @contextmanager
    def _in_evaluation(self) -> Iterator[None]:
        """Put the modules into evaluation mode, with the memory of evaluation, and back."""
        training = [module for module in self.modules() if module.training]  # parts may be frozen
        self.eval()
        self.on_validation_start()
        try:
            yield
        finally:
            self.on_validation_end()
            for module in training:
                module.training = True

    def write_samples(
        self,
        folder: Callable[[], Path],
        *,
        datamodule: Any,
        n: int | None,
        sampling: Sampling,
        progress: Callable[[Iterable[int]], Iterable[int]],
        prompt: str | None = None,
        prompt_file: str | None = None,
        n_tokens: int = 500,
        beam: int | None = None,
        length_penalty: float = LENGTH_PENALTY,
        length_norm: LengthNorm = "gnmt",
    ) -> str:
        """Continue a text and write the samples: see `Task.write_samples`. A single sample is shown while it is drawn.

        With `beam`, the samples are the best continuations, each with its score. They end at the tokenizer's end token,
        if it has one, or after `n_tokens`.

        Args:
            folder: Makes the folder to write to.
            datamodule: Not used.
            n: How many samples. Default: 1.
            sampling: How tokens are drawn.
            progress: Wraps the iterable of steps, if there are several samples.
            prompt: How the text begins.
            prompt_file: A file with its beginning, in place of `prompt`.
            n_tokens: Tokens to draw.
            beam: Search with this many hypotheses instead of drawing. `sampling` is then not used.
            length_penalty: See `beam.beam_search`.
            length_norm: See `beam.beam_search`.

        Raises:
            ValueError: An option is out of range, or the prompt can't be read.
        """
        if n_tokens < 1:
            raise ValueError(f"--n_tokens {n_tokens}: draw at least one")
        begin = _prompt(prompt, prompt_file)
        tokenizer = self.text
        _check_known(tokenizer, begin)
        tokens = torch.tensor([[tokenizer.start, *tokenizer.encode(begin).tolist()]])
        if begin and not begin[-1].isspace():
            begin += tokenizer.separator
        shown = Decoded(tokenizer) if n in (None, 1) and beam is None else None
        if shown is not None:
            print(printable(begin), end="", flush=True)
            progress = iter
        if beam is None:
            drawn = self.sample(
                tokens.expand(n or 1, -1), n_tokens, sampling=sampling, progress=progress, on_tokens=shown
            ).cpu()
            numbered = [f"--- {i}\n{begin}{tokenizer.decode(row.numpy())}" for i, row in enumerate(drawn)]
        else:
            found = self.beam_search(
                tokens,
                n_tokens,
                beam=beam,
                end=tokenizer.end,
                length_penalty=length_penalty,
                length_norm=length_norm,
                n_best=n or 1,
                progress=progress,
            )
            numbered = _with_scores(found, begin, tokenizer)
        if shown is not None:
            shown.finish()
        else:
            print(*map(printable, numbered), sep="\n")
        path = folder() / "samples.txt"
        path.write_text("\n\n".join(numbered), encoding="utf-8")
        return f"text: {short(path)}"

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
            raise ValueError("the model's tokens can't be decoded to text: it was trained without a tokenizer")
        return Tokenizer.from_spec(self.tokenizer)

    @property
    def token_bytes(self) -> Tensor | None:
        """Bytes of text that each token stands for, (vocab_size,); None: they are not known, or a token is a unit."""
        if self.tokenizer is None or self.unit != "token":
            return None
        if self._token_bytes is None:
            sizes = self.text.token_bytes()
            self._token_bytes = torch.empty(0) if sizes is None else torch.from_numpy(sizes)
        return self._token_bytes if len(self._token_bytes) else None

    def check_batch(self, batch: TokenBatch) -> None:
        """Refuse tokens that are not of this vocabulary: see `Task.check_batch`."""
        check_fields(batch, TokenBatch)
        self._check_tokens(batch.inputs)

    def _check_tokens(self, tokens: Tensor) -> None:
        if not sequence.reads_values(tokens) or tokens.numel() == 0:
            return
        for token in (int(tokens.min()), int(tokens.max())):
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"the data hold token {token}, but the model has vocab_size={self.vocab_size}: 0 … "
                    f"{self.vocab_size - 1}; use the same vocabulary for both"
                )


def _described(size: int, tokenizer: str | None) -> str:
    return f"{size} tokens" if tokenizer is None else repr(Tokenizer.from_spec(tokenizer))


class Decoded:
    """Shows tokens as text while they come: as much of it as no further token can change.

    Args:
        tokenizer: Turns tokens into text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = 0

    def __call__(self, tokens: Tensor) -> None:
        """Show what (1,) more tokens add."""
        self._tokens.append(int(tokens))
        text = self._text()
        if not text.endswith("\ufffd"):  # the first bytes of a character
            self._show(text)

    def finish(self) -> None:
        """Show the rest."""
        self._show(self._text())
        print(flush=True)

    def _text(self) -> str:
        text: str = self._tokenizer.decode(np.array(self._tokens))
        return text

    def _show(self, text: str) -> None:
        print(printable(text[self._shown :]), end="", flush=True)
        self._shown = len(text)


def _with_scores(found: Hypotheses, begin: str, tokenizer: Tokenizer) -> list[str]:
    """Return the texts of the only prompt's hypotheses, each under its number, score and log-probability."""
    rows, lengths, scores, log_probs = (t[0].cpu() for t in found)
    return [
        f"--- {i}, score {score:.4f}, log p {log_p:.4f}\n{begin}{tokenizer.decode(row[:length].numpy())}"
        for i, (row, length, score, log_p) in enumerate(zip(rows, lengths, scores, log_probs, strict=True))
        if length > 0
    ]


def _prompt(prompt: str | None, prompt_file: str | None) -> str:
    if prompt_file is None:
        return prompt or ""
    if prompt is not None:
        raise ValueError("--prompt and --prompt_file were both given; give only one")
    try:
        return regular(Path(prompt_file)).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompt_file {prompt_file} is not UTF-8: {error.reason} at byte {error.start}") from error


def _check_known(tokenizer: Any, prompt: str) -> None:
    """Refuse characters that the model never saw, whose embedding is noise; a word that it did not is `<unk>`."""
    unknown = tokenizer.unknown(prompt)
    if not unknown or tokenizer.kind == NumberTokenizer.kind:  # which has no <unk>: to encode the prompt is an error
        return
    shown = ", ".join(map(repr, unknown[:5])) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
    if tokenizer.unit == "character":
        raise ValueError(f"the prompt has {shown}, which the model's training text does not contain; leave it out")
    rank_zero_warn(f"the prompt has {shown}, read as <unk>: not in the model's vocabulary")
