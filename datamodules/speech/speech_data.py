"""Speech as filterbanks, with phone labels."""

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from lit_effattn.checks import at_least
from lit_effattn.datamodules.common.base import DataModule
from lit_effattn.datamodules.common.faults import Fault, Faults
from lit_effattn.datamodules.common.length_batches import LengthBatches
from lit_effattn.datamodules.common.sampling import digest, processes
from lit_effattn.datamodules.common.splits import SPLITS_OF
from lit_effattn.datamodules.common.store import default_cache
from lit_effattn.datamodules.speech.audio import MAX_SECONDS
from lit_effattn.datamodules.speech.augment import SpecAugment
from lit_effattn.datamodules.speech.corpora import EspeakCorpus
from lit_effattn.datamodules.speech.feature_store import FeatureReader, Features, read_features, stored_features
from lit_effattn.datamodules.speech.filterbanks import Filterbanks, moments, normalized
from lit_effattn.datamodules.speech.recordings import recordings
from lit_effattn.datamodules.speech.utterances import BLANK, SpeechBatch, SpeechCorpus, Utterance
from lit_effattn.datamodules.speech.wave_augment import WaveAugment

_WAVES = 1  # in the seed of `wave_augment`, which draws other numbers than `spec_augment`


class SpeechData(DataModule):
    """Utterances as log-mel filterbanks, 25 ms every 10 ms, with phone labels.

    A batch is a `SpeechBatch`: utterances of similar length, padded on the right with 0, which is the mean unless
    `normalize=null`. Batches are a pure function of (seed, epoch), and every process has the same number of them. An
    interrupted epoch resumes with the next batch. In validation, test and prediction every utterance occurs exactly
    once over all processes, the longest first.

    All recordings are read once before their first run, and again if a file or a setting has changed. A file that can't
    be opened, for lack of permission or because of the disk, ends the run. Unusable utterances are left out, and a
    warning counts them by reason and names the first few. A file is unusable if it is missing, empty or unreadable, has
    several channels, is too long or too short, has a lower sampling rate, or has phones, but only samples of 0. An
    utterance is unusable if its phones are unknown or not in the inventory. Training also leaves out an utterance that
    is too short for its phones, since CTC needs ⌈T / factor⌉ ≥ phones + pairs of equal neighbours, with the subsampling
    factor of the trainer's model. Validation and test keep it, since its error rate is defined. All other utterances
    that they leave out are not scored.

    Args:
        corpus: The utterances and the inventory of phones. Default: EspeakCorpus, which needs no download.
        n_mels: F, number of filters; 40 in most papers, or 80.
        sample_rate: Sampling rate in Hz. Recordings of a higher rate are resampled.
        normalize: Utterances over which each filter's mean is set to 0 and its variance to 1. speaker: all utterances
            of a speaker in the split (an utterance without speaker: itself). utterance: each utterance. corpus: the
            training utterances, whose statistics are in the checkpoint. null: no normalisation.
        batch_frames: Maximum of B · T, the frames of one process's training batch, padding included. A longer utterance
            has its own batch.
        eval_batch_frames: The same in validation, test and prediction. Default: `batch_frames`.
        batch_utterances: Maximum of B, in training and evaluation.
        spec_augment: Masks parts of the training utterances, different ones each epoch, as a pure function of (seed,
            epoch, utterance). Default: none.
        wave_augment: Changes the recordings of the training utterances by speed, noise and a telephone line,
            differently each epoch, as a pure function of (seed, epoch, utterance). Their features are then computed on
            each access and not cached. Batches are formed by the lengths before it. Statistics of speakers and of the
            corpus are those of the recordings before it. Default: none.
        cache: Cache the features in a file that processes share, 4·F bytes per frame (58 MB per hour at 40 filters).
            Otherwise they are computed again on each access.
        cache_dir: Cache folder; may be deleted at any time. Default: lit-effattn in $XDG_CACHE_HOME, which defaults to
            ~/.cache.
        min_seconds: Shortest utterance.
        max_seconds: Longest utterance.
        upsample: Also accept recordings of a lower sampling rate, whose upper band is then empty.
        audio: predict: recordings to recognise instead of the test split: a file, a folder of files, a JSON-lines
            manifest as in `ManifestCorpus`, but text and phonemes are optional; or several of these. An id that occurs
            in several begins with the name of each: `x/m.jsonl:a.wav`. Unusable recordings raise an error and are not
            left out. The corpus is then not needed.
        seed: Seed of the order of the training utterances, of `spec_augment` and of `wave_augment`.
        num_workers: Worker processes that load data; 0: none.

    Attributes:
        left_out: For train, val, test and predict, if set up, the reasons why utterances are left out.

    Raises:
        ValueError: If an argument is out of its range.
    """

    takes_inputs = "audio"

    def __init__(
        self,
        corpus: SpeechCorpus | None = None,
        *,
        n_mels: int = 40,
        sample_rate: int = 16_000,
        normalize: Literal["speaker", "utterance", "corpus"] | None = "utterance",
        batch_frames: int = 12_000,
        eval_batch_frames: int | None = None,
        batch_utterances: int = 64,
        spec_augment: SpecAugment | None = None,
        wave_augment: WaveAugment | None = None,
        cache: bool = False,
        cache_dir: str | None = None,
        min_seconds: float = 0.1,
        max_seconds: float = MAX_SECONDS,
        upsample: bool = False,
        audio: list[str] | str | None = None,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(num_workers, seed)
        # Without objects that are not plain data: checkpoints could not be read with `weights_only`.
        self.save_hyperparameters(logger=False, ignore=["corpus", "spec_augment", "wave_augment"])
        at_least(1, batch_frames=batch_frames, eval_batch_frames=eval_batch_frames)
        at_least(1, batch_utterances=batch_utterances)
        if normalize not in ("speaker", "utterance", "corpus", None):
            raise ValueError(f"normalize={normalize!r} is unknown; choose speaker, utterance, corpus or null")
        if not 0 <= min_seconds < max_seconds:
            raise ValueError(f"min_seconds={min_seconds} must be at least 0 and less than max_seconds={max_seconds}")
        _check_augment(spec_augment, n_mels, normalize)
        if audio is not None and not audio:
            raise ValueError(f"audio={audio!r} is empty; give files, folders or manifests, or leave it out")
        self.corpus = EspeakCorpus() if corpus is None else corpus
        self.filterbanks = Filterbanks(sample_rate, n_mels=n_mels)
        self.normalize = normalize
        self.batch_frames = batch_frames
        self.eval_batch_frames = batch_frames if eval_batch_frames is None else eval_batch_frames
        self.batch_utterances = batch_utterances
        self.spec_augment = spec_augment
        self.wave_augment = wave_augment
        self.cache = cache
        self.cache_dir = default_cache() if cache_dir is None else Path(cache_dir)
        self.audio = [audio] if isinstance(audio, str) else audio
        self.left_out: dict[str, list[Fault]] = {}
        self._reader = FeatureReader(self.filterbanks, min_seconds, max_seconds, upsample)
        self._splits: dict[str, Split] = {}
        self._readings: dict[str, tuple[list[Utterance], Features]] = {}
        self._statistics: Tensor | None = None  # of the training utterances

    @property
    def n_mels(self) -> int:
        """F, the number of filters."""
        return self.filterbanks.n_mels

    @property
    def phones(self) -> list[str]:
        """The inventory of phones. Label i + 1 of a batch is phone i."""
        return list(self.corpus.phones)

    @property
    def folded(self) -> list[str]:
        """The phone that each phone is scored as; "": not scored."""
        return list(self.corpus.folded)

    @property
    def frame_seconds(self) -> float:
        """Hop from one frame to the next in seconds."""
        return self.filterbanks.frame_seconds

    @property
    def places(self) -> list[Path]:
        """Files and folders that the corpus is read from. They may be missing."""
        return self.corpus.places

    def prepare_data(self) -> None:
        """Make the corpus if possible, or raise an error that names the missing files."""
        if self.audio is None:
            self.corpus.prepare()

    def setup(self, stage: str) -> None:
        """Read the recordings, or load an earlier run's results, and report the utterances found and left out.

        Raises:
            ValueError: If a split has no usable utterance, or a recording of `audio` is unusable.
        """
        if self.audio is not None:
            if stage != "predict":
                raise ValueError(f"audio={self.audio} is for predict only; leave it out to use the corpus")
            self._splits["predict"] = self._given(self.audio)
            return
        if stage == "fit":
            self._statistics = None  # they may be those of another run's checkpoint
            if self.wave_augment is not None:
                self.wave_augment.check(self.filterbanks.sample_rate)
        for split in SPLITS_OF[stage]:
            name = "predict" if stage == "predict" else split
            self._splits[name] = self._of_corpus(split, name)  # again: the trainer may have another model

    def _of_corpus(self, split: str, name: str) -> "Split":
        utterances, features = self._read(split)
        if not utterances:
            raise ValueError(f"{type(self.corpus).__name__} has no utterances of {split!r}; check its splits")
        labels = _Labels(self.corpus.phones)
        mislabelled, faults = labels.faults(utterances), features.readings.faults
        if name != "predict":
            faults = mislabelled | faults
            faults = faults | self._short(split, utterances, features.readings.n_frames, labels, faults)
        kept = self._kept(name, len(utterances), faults)
        hours = features.readings.n_frames[kept].sum() * self.frame_seconds / 3600
        rank_zero_info(f"{name}: {len(kept):,} utterances, {hours:.2f} h")
        labelled = [[] if i in mislabelled else labels(u) for i, u in enumerate(utterances)]
        return Split(utterances, labelled, features, kept)

    def _short(
        self, split: str, utterances: list[Utterance], n_frames: np.ndarray, labels: "_Labels", faults: dict[int, Fault]
    ) -> dict[int, Fault]:
        """Return the utterances to leave out for too few frames. Validation and test keep them, with a warning."""
        if split == "train" and self.wave_augment is not None:
            n_frames = self._fewest_frames(n_frames, self.wave_augment)
        factor = getattr(getattr(self.trainer, "lightning_module", None), "subsampling", 1)  # of the trainer's model
        short = labels.short(utterances, -(-n_frames // factor))
        short = {i: fault for i, fault in short.items() if i not in faults}
        if split == "train":
            return short
        if short:
            _warn(f"{split}: {len(short)} of {len(utterances)} utterances have an error rate, but no loss", short)
        return {}

    def _fewest_frames(self, n_frames: np.ndarray, augment: WaveAugment) -> np.ndarray:
        """Return the frames that remain of `n_frames` at the largest speed."""
        banks = self.filterbanks
        n_samples = ((n_frames - 1) * banks.hop_samples + banks.frame_samples) / augment.fastest
        return np.array([banks.n_frames(int(n)) for n in n_samples])

    def _kept(self, name: str, n: int, faults: dict[int, Fault]) -> np.ndarray:
        self.left_out[name] = [faults[i] for i in sorted(faults)]
        if len(faults) == n:
            first = self.left_out[name][0].message
            raise ValueError(f"none of the {n} utterances of {name!r} can be used; the first: {first}")
        if faults:
            unscored = ", and are not in the score" if name in ("val", "test") else ""
            _warn(f"{name}: {len(faults)} of {n} utterances are left out{unscored}", faults)
        return np.array([i for i in range(n) if i not in faults])

    def _read(self, split: str) -> tuple[list[Utterance], Features]:
        if split not in self._readings:
            utterances = self.corpus.utterances(split)
            features = stored_features(
                utterances,
                self._reader,
                name=split,
                folder=self.cache_dir,
                keep=self.cache and (split != "train" or self.wave_augment is None),
                num_workers=self.num_workers,
            )
            self._readings[split] = utterances, features
        return self._readings[split]

    def _given(self, audio: list[str]) -> "Split":
        given = [(name, u) for name in audio for u in recordings(Path(name))]
        counts = Counter(u.id for _, u in given)
        utterances = [u._replace(id=f"{name}:{u.id}") if counts[u.id] > 1 else u for name, u in given]
        features = read_features(utterances, self._reader, num_workers=self.num_workers)
        if faults := list(features.readings.faults.values()):
            more = f" ({len(faults) - 1} more of {len(utterances)} can't be used)" if len(faults) > 1 else ""
            raise ValueError(f"{faults[0].message}{more}")
        return Split(utterances, [[] for _ in utterances], features, np.arange(len(utterances)))

    def predict_dataloader(self) -> DataLoader[SpeechBatch]:
        """Return a loader of every recording of `audio` once, or of every test utterance."""
        return self._evaluation("predict")

    def _batches(self, split: str, training: bool) -> tuple["SpeechUtterances", LengthBatches]:
        of_split = self._splits[split]  # first: fails before `setup`, so that Lightning's __str__ reads no recordings
        # Not in `setup`, since a checkpoint's statistics are loaded after it.
        statistics = of_split.features.readings.statistics
        if self.normalize == "corpus":
            statistics = {None: self._corpus_statistics()}
        changes = (self.spec_augment, self.wave_augment) if training else (None, None)
        data = SpeechUtterances(of_split, self.normalize, statistics, *changes, self.seed)
        order: dict[str, Any] = {"shuffle": training, "seed": self.seed, **processes(self.trainer)}
        batch_frames = self.batch_frames if training else self.eval_batch_frames
        return data, LengthBatches(data.n_frames, batch_frames, max_samples=self.batch_utterances, **order)

    def _corpus_statistics(self) -> Tensor:
        if self._statistics is None:
            if self.audio is not None:
                raise ValueError(
                    "normalize='corpus' needs the statistics of the training utterances, which only a checkpoint that "
                    "was trained with it has: give ckpt_path of one, or leave normalize out"
                )
            self._statistics = self._read("train")[1].readings.statistics[None]
        return self._statistics

    def state_dict(self) -> dict[str, Any]:
        """Return the inventory of phones and the settings of the features."""
        settings = {"features": repr(self.filterbanks), "normalize": self.normalize}
        state: dict[str, Any] = {"phones": self.phones, **settings}
        return state | ({"statistics": self._corpus_statistics()} if self.normalize == "corpus" else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the statistics of the training utterances from a checkpoint. Warn if it has another `normalize`.

        Raises:
            ValueError: If the checkpoint's labels or features differ.
        """
        if state_dict["features"] != repr(self.filterbanks):
            raise ValueError(
                f"the checkpoint was trained on {state_dict['features']}, but these data are {self.filterbanks!r}; "
                "use the sample_rate and n_mels that it was trained with"
            )
        if self.audio is None and state_dict["phones"] != self.phones:
            raise ValueError(
                f"the checkpoint's {len(state_dict['phones'])} phones are {' '.join(state_dict['phones'])}, but the "
                f"corpus's {len(self.phones)} are {' '.join(self.phones)}: the same label means another phone; use a "
                "corpus of the same inventory"
            )
        if (saved := state_dict.get("normalize", self.normalize)) != self.normalize:
            rank_zero_warn(f"normalize={self.normalize!r}, but the checkpoint was trained with normalize={saved!r}")
        self._statistics = state_dict.get("statistics")


class Split(NamedTuple):
    """The utterances of a split."""

    utterances: list[Utterance]
    labels: list[list[int]]  # empty if the phones are unknown or not in the inventory
    features: Features
    kept: np.ndarray  # (n,), the indices of the utterances that are not left out


@dataclass(eq=False)
class SpeechUtterances(Dataset[SpeechBatch]):
    """A data set that maps a list of indices to a batch: with n utterances, index i + e · n is number i in epoch e."""

    split: Split
    normalize: str | None
    statistics: dict[str | None, Tensor]  # `moments` by speaker, and under None for all
    augment: SpecAugment | None
    wave_augment: WaveAugment | None
    seed: int

    def __len__(self) -> int:
        return len(self.split.kept)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The number of utterances, and a digest of their names, lengths and labels."""
        items = [(self.split.utterances[i].id, self.split.labels[i]) for i in self.split.kept.tolist()]
        return {"utterances": len(self), "digest": digest(items, self.n_frames)}

    @property
    def n_frames(self) -> np.ndarray:
        """(n,), frames of each utterance."""
        return self.split.features.readings.n_frames[self.split.kept]

    def __getitem__(self, indices: list[int]) -> SpeechBatch:
        epochs, places = np.divmod(indices, len(self))
        numbers = self.split.kept[places].tolist()
        features = [self._features(i, epoch) for i, epoch in zip(numbers, epochs.tolist(), strict=True)]
        labels = [torch.tensor(self.split.labels[i], dtype=torch.long) for i in numbers]
        return SpeechBatch(
            pad_sequence(features, batch_first=True),  # B × (T, F) -> (B, T, F)
            torch.tensor([len(x) for x in features]),
            pad_sequence(labels, batch_first=True, padding_value=BLANK),  # B × (U,) -> (B, U)
            torch.tensor([len(x) for x in labels]),
            [self.split.utterances[i].id for i in numbers],
        )

    def _features(self, i: int, epoch: int) -> Tensor:
        utterance = self.split.utterances[i]
        # Seeded by the id: what is drawn for an utterance does not depend on the other utterances.
        name = zlib.crc32(utterance.id.encode(errors="surrogatepass"))
        if self.wave_augment is None:
            features = self.split.features[i]
        else:
            rng = np.random.default_rng((self.seed, epoch, name, _WAVES))
            features = self.split.features.reader(utterance, partial(self.wave_augment, rng=rng))
        features = self._normalized(utterance, features)
        if self.augment is None:
            return features
        return self.augment(features, np.random.default_rng((self.seed, epoch, name)))

    def _normalized(self, utterance: Utterance, features: Tensor) -> Tensor:
        if self.normalize is None:
            return features
        if self.normalize == "corpus":
            return normalized(features, self.statistics[None])
        alone = self.normalize == "utterance" or utterance.speaker is None
        return normalized(features, moments(features) if alone else self.statistics[utterance.speaker])


class _Labels:
    """Maps phones to labels, and finds utterances without valid labels."""

    def __init__(self, phones: Sequence[str]) -> None:
        self._of = {phone: i + 1 for i, phone in enumerate(phones)}

    def __call__(self, utterance: Utterance) -> list[int]:
        return [self._of[phone] for phone in utterance.phones or () if phone in self._of]

    def faults(self, utterances: Sequence[Utterance]) -> dict[int, Fault]:
        """Return the faults of utterances whose phones are unknown or not in the inventory."""
        faults = {}
        for i, u in enumerate(utterances):
            if u.phones is None:
                faults[i] = Fault("without phones", f"{u.id}: it has no phones; give them")
            elif unknown := next((phone for phone in u.phones if phone not in self._of), None):
                faults[i] = Fault("unknown phone", f"{u.id}: {unknown!r} is not in the inventory of the corpus")
        return faults

    def short(self, utterances: Sequence[Utterance], n_frames: np.ndarray) -> dict[int, Fault]:
        """Return the faults of utterances too short for CTC: one frame per phone, and one between equal neighbours.

        Without phones, one frame is needed.
        """
        faults = {}
        for i, (u, n) in enumerate(zip(utterances, n_frames.tolist(), strict=True)):
            labels = self(u)
            needed = max(1, len(labels) + sum(a == b for a, b in pairwise(labels)))
            if n < needed:
                message = f"{u.id}: {n} frames after subsampling, but its phones need {needed}; check both"
                faults[i] = Fault("shorter than its phones", message)
        return faults


def _warn(what: str, faults: dict[int, Fault]) -> None:
    rank_zero_warn(f"{what}:\n  {Faults(faults[i] for i in sorted(faults))}")


def _check_augment(augment: SpecAugment | None, n_mels: int, normalize: str | None) -> None:
    if augment is None:
        return
    if normalize is None:
        raise ValueError("normalize=None: spec_augment masks with 0, the mean of normalised features; choose utterance")
    if augment.freq_mask > n_mels:
        raise ValueError(f"spec_augment.freq_mask={augment.freq_mask} must be at most n_mels={n_mels}")
