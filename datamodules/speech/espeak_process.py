"""A program that runs espeak-ng: it reads requests and writes the spoken phones and the audio.

espeak-ng runs in a separate process for three reasons. The library keeps state of every utterance that no call resets,
so only a new process gives the same audio for the same requests. It sets the locale. It ends the process on some
errors. This file is run by its path and imports only the standard library, so that it starts fast.

    python espeak_process.py LIBRARY [FOLDER_OF_ITS_DATA]

The program first writes a line of JSON, {"sample_rate", "version"}. For every line {"voice", "rate", "pitch", "text"}
that it reads, it writes a line {"phones": [[name, start in samples], ...], "samples"}, followed by that many 16-bit
samples. An error is a line {"error"}.
"""

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any, BinaryIO

# From espeak-ng/speak_lib.h
_SYNCHRONOUS = 2
_PHONEME_EVENTS, _IN_IPA, _DO_NOT_EXIT = 0x1, 0x2, 0x8000
_POSITION_IS_CHARACTER = 1
_UTF8 = 1
_RATE, _PITCH = 1, 3
_LAST, _PHONEME = 0, 7
_BUFFER_MS = 200
_SEED = 1


class _Id(ctypes.Union):
    _fields_ = (("number", ctypes.c_int), ("name", ctypes.c_char_p), ("string", ctypes.c_char * 8))


class _Event(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", _Id),
    )


_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event))


class _Espeak:
    """The initialised library.

    Args:
        library: Path or name of the library.
        data: The folder of espeak-ng-data; None: the library's default.

    Raises:
        RuntimeError: If the library cannot be initialised.
    """

    def __init__(self, library: str, data: str | None) -> None:
        self.library = ctypes.CDLL(library)
        self.library.espeak_Info.restype = ctypes.c_char_p
        self._audio = bytearray()
        self._phones: list[tuple[str, int]] = []
        self._callback = _Callback(self._take)
        options = _PHONEME_EVENTS | _IN_IPA | _DO_NOT_EXIT
        path = None if data is None else os.fsencode(data)
        self.sample_rate = self.library.espeak_Initialize(_SYNCHRONOUS, _BUFFER_MS, path, options)
        if self.sample_rate <= 0:
            raise RuntimeError(f"{library} does not find its data in {data}; if that path is long, use a shorter one")
        if hasattr(self.library, "espeak_ng_SetRandSeed"):  # version 1.52 seeds breath noise with the time
            self.library.espeak_ng_SetRandSeed(ctypes.c_long(_SEED))
        self.library.espeak_SetSynthCallback(self._callback)
        folder = ctypes.c_char_p()
        self.version = self.library.espeak_Info(ctypes.byref(folder)).decode().split()[0]
        self._variants = Path(os.fsdecode(folder.value or b"")) / "voices" / "!v"

    def _take(self, audio: Any, n: int, events: Any) -> int:
        if audio and n > 0:
            self._audio += ctypes.string_at(audio, 2 * n)
        i = 0
        while events[i].type != _LAST:
            if events[i].type == _PHONEME:
                self._phones.append((events[i].id.string.decode(errors="replace"), events[i].sample))
            i += 1
        return 0  # continue the synthesis

    def say(self, voice: str, rate: int, pitch: int, text: str) -> tuple[list[tuple[str, int]], bytes]:
        """Return the names and first samples of a text's sounds, and the 16-bit audio."""
        variant = voice.partition("+")[2]
        # The library silently falls back to the plain voice if a variant is missing.
        if self.library.espeak_SetVoiceByName(voice.encode()) or not (self._variants / variant).exists():
            raise RuntimeError(f"espeak-ng {self.version} has no voice {voice!r}")
        self.library.espeak_SetParameter(_RATE, rate, 0)
        self.library.espeak_SetParameter(_PITCH, pitch, 0)
        self._audio, self._phones = bytearray(), []
        encoded = text.encode() + b"\0"
        if self.library.espeak_Synth(encoded, len(encoded), 0, _POSITION_IS_CHARACTER, 0, _UTF8, None, None):
            raise RuntimeError(f"espeak-ng {self.version} could not synthesise {text!r}")
        return self._phones, bytes(self._audio)


def _main(library: str, data: str | None = None) -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keeps the library's own output out of the answers
    try:
        espeak = _Espeak(library, data)
        _answer(answers, {"sample_rate": espeak.sample_rate, "version": espeak.version})
        for line in sys.stdin:
            phones, audio = espeak.say(**json.loads(line))
            _answer(answers, {"phones": phones, "samples": len(audio) // 2}, audio)
    except (OSError, RuntimeError) as error:
        _answer(answers, {"error": str(error)})


def _answer(answers: BinaryIO, header: dict[str, Any], audio: bytes = b"") -> None:
    answers.write(json.dumps(header).encode() + b"\n" + audio)
    answers.flush()


if __name__ == "__main__":
    _main(*sys.argv[1:])
