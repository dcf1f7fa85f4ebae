"""The TIMIT corpus (Garofolo et al. 1993, LDC93S1)."""

from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_effattn.datamodules.common.files import regular, walk
from lit_effattn.datamodules.speech.phonemes import TIMIT_39, TIMIT_48, TIMIT_61
from lit_effattn.datamodules.speech.utterances import SpeechCorpus, Utterance

_DEVELOPMENT = (
    "fadg0 faks0 fcal1 fcmh0 fdac1 fdms0 fdrw0 fedw0 fgjd0 fjem0 fjmg0 fjsj0 fkms0 fmah0 fmml0 fnmr0 frew0 fsem0 majc0 "
    "mbdg0 mbns0 mbwm0 mcsh0 mdlf0 mdls0 mdvc0 mers0 mgjf0 mglb0 mgwt0 mjar0 mjfc0 mjsw0 mmdb1 mmdm2 mmjr0 mmwh0 mpdf0 "
    "mrcs0 mreb0 mrjm4 mrjr0 mroa0 mrtk0 mrws1 mtaa0 mtdt0 mteb0 mthc0 mwjg0"
)
_CORE_TEST = (
    "mdab0 mwbt0 felc0 mtas1 mwew0 fpas0 mjmp0 mlnt0 fpkt0 mlll0 mtls0 fjlm0 mbpm0 mklt0 fnlp0 mcmj0 mjdh0 fmgd0 mgrt0 "
    "mnjm0 fdhc0 mjln0 mpam0 fmld0"
)
DEVELOPMENT_SPEAKERS = frozenset(_DEVELOPMENT.split())
"""50 speakers of the test folder, none of the core test: the usual development set, from Kaldi's recipe."""
CORE_TEST_SPEAKERS = frozenset(_CORE_TEST.split())
"""24 speakers of the test folder, two men and a woman of each dialect, listed in TIMIT's documentation."""

_SPEAKERS = {"train": None, "val": DEVELOPMENT_SPEAKERS, "test": CORE_TEST_SPEAKERS}
_N_UTTERANCES = {"train": 3696, "val": 400, "test": 192}
_AUDIO = (".wav.wav", ".flac", ".wav", ".sph")  # in order of preference; copies in RIFF are called .WAV.wav


class TimitCorpus(SpeechCorpus):
    """TIMIT: 3,696 training utterances, 400 of 50 speakers for validation, 192 of the 24 core speakers for test.

    The two sentences that all speakers say, SA1 and SA2, are left out. The 61 labels are mapped to 48 for training,
    with the glottal stop q deleted. The 48 are folded to 39 for scoring (Lee & Hon 1989), with all silences and
    closures as sil.

    Args:
        root: The folder that contains TRAIN and TEST. Names may be in upper or lower case. Audio is NIST SPHERE as on
            the disc, RIFF or FLAC.
    """

    phones = TIMIT_48
    """The 48 training phones."""
    folded = tuple(TIMIT_39.values())
    """The phone that each phone is scored as, 39 different ones."""

    def __init__(self, root: str) -> None:
        self.root: Path = Path(root)

    def prepare(self) -> None:
        """Check that the corpus exists, and warn if utterances are missing.

        Raises:
            FileNotFoundError: If the corpus is missing. The message says which files are expected.
            ValueError: If a label is not one of TIMIT's.
        """
        for split, expected in _N_UTTERANCES.items():
            if (n := len(self.utterances(split))) != expected:
                rank_zero_warn(
                    f"{self.root}: TIMIT has {expected} utterances for {split!r}, but {n} were found; errors can't be "
                    "compared with published ones"
                )

    def utterances(self, split: str) -> list[Utterance]:
        """Return the utterances of "train", "val" or "test".

        Raises:
            FileNotFoundError: If there are none, or one has no audio.
            ValueError: If a label is not one of TIMIT's.
        """
        labels = _labels(self._folder("train" if split == "train" else "test"), _SPEAKERS[split])
        if not labels:
            raise self._missing(f"no .PHN file of a speaker for {split!r}")
        return [_utterance(path) for path in labels]

    def _folder(self, name: str) -> Path:
        folders = self.root.iterdir() if self.root.is_dir() else ()
        folder = next((folder for folder in folders if folder.name.lower() == name and folder.is_dir()), None)
        if folder is None:
            raise self._missing(f"no folder {name.upper()}")
        return folder

    def _missing(self, lacking: str) -> FileNotFoundError:
        return FileNotFoundError(
            f"TIMIT is not in {self.root.resolve()}: it has {lacking}. Get LDC93S1 from https://catalog.ldc.upenn.edu/"
            "LDC93S1, and set root to the folder that has TRAIN and TEST in it, with DR1/FCJF0/SI1027.PHN and so on"
        )


def _labels(folder: Path, speakers: frozenset[str] | None) -> list[Path]:
    paths = (
        path
        for path in walk(folder, (".phn",)).files
        if not path.name.lower().startswith("sa") and (speakers is None or path.parent.name.lower() in speakers)
    )
    return sorted(paths, key=_id)


def _id(labels: Path) -> str:
    return f"{labels.parent.name}_{labels.stem}".lower()


def _utterance(labels: Path) -> Utterance:
    files = {path.name.lower(): path for path in labels.parent.iterdir()}
    stem = labels.stem.lower()
    audio = next((files[stem + suffix] for suffix in _AUDIO if stem + suffix in files), None)
    if audio is None:
        raise FileNotFoundError(f"{labels.with_suffix('.WAV')}: there is no such file, or .flac; add it")
    return Utterance(_id(labels), audio, labels.parent.name.lower(), _read_labels(labels))


def _read_labels(path: Path) -> tuple[str, ...]:
    """Return the phones of a .PHN file. Its lines are like `3050 4559 sh`, with times in samples."""
    phones = []
    for number, line in enumerate(regular(path).read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            _, _, label = line.split()
            phone = TIMIT_61[label]
        except (ValueError, KeyError) as error:
            raise ValueError(f"{path}:{number}: {line!r} is not like '3050 4559 sh', with one of TIMIT's 61") from error
        if phone is not None:
            phones.append(phone)
    return tuple(phones)
