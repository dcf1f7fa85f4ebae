"""A program that runs espeak-ng: for each line of JSON that it reads, it writes one.

espeak-ng runs in a separate process for three reasons. The library keeps state of every utterance that no call resets,
so only a new process gives the same audio for the same requests. It sets the locale. It ends the process on some
errors. This file is run by its path and imports only the standard library, so that it starts fast.

    python espeak_process.py LIBRARY [FOLDER_OF_ITS_DATA]

The answer to {"voice", "rate", "pitch", "text"} is {"phones": [[name, start in samples], ...], "audio": 16-bit samples
in base64, "sample_rate", "version"}, or {"error"}.
"""

import base64
import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

# From espeak-ng/speak_lib.h
_SYNCHRONOUS = 2
_PHONEME_EVENTS, _IN_IPA, _DO_NOT_EXIT = 0x1, 0x2, 0x8000
_POSITION_IS_CHARACTER = _UTF8 = 1
_RATE, _PITCH = 1, 3
_LAST, _PHONEME = 0, 7
_BUFFER_MS = 200


class _Id(ctypes.Union):
    _fields_ = (("number", ctypes.c_int), ("name", ctypes.c_char_p), ("string", ctypes.c_char * 8))


class _Event(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("type", "identifier", "text_position", "length", "audio_position")),
        *(("sample", ctypes.c_int), ("user_data", ctypes.c_void_p), ("id", _Id)),
    )


_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event))


class _Espeak:
    """The initialised library. Raises RuntimeError if it cannot be initialised."""

    def __init__(self, name: str, data: str | None = None) -> None:
        self._library = ctypes.CDLL(name)
        self._library.espeak_Info.restype = ctypes.c_char_p
        self._audio, self._phones = bytearray(), list[tuple[str, int]]()
        self._callback = _Callback(self._take)  # kept: ctypes does not
        options = _PHONEME_EVENTS | _IN_IPA | _DO_NOT_EXIT
        path = None if data is None else os.fsencode(data)
        sample_rate = self._library.espeak_Initialize(_SYNCHRONOUS, _BUFFER_MS, path, options)
        if sample_rate <= 0:
            raise RuntimeError(f"{name} does not find its data in {data}; if that path is long, use a shorter one")
        if hasattr(self._library, "espeak_ng_SetRandSeed"):  # version 1.52 seeds breath noise with the time
            self._library.espeak_ng_SetRandSeed(ctypes.c_long(1))
        self._library.espeak_SetSynthCallback(self._callback)
        folder = ctypes.c_char_p()
        version = self._library.espeak_Info(ctypes.byref(folder)).decode().split()[0]
        self._variants = Path(os.fsdecode(folder.value or b"")) / "voices" / "!v"
        self._about = {"sample_rate": sample_rate, "version": version}

    def _take(self, audio: Any, n: int, events: Any) -> int:
        if audio and n > 0:
            self._audio += ctypes.string_at(audio, 2 * n)
        i = 0
        while events[i].type != _LAST:
            if events[i].type == _PHONEME:
                self._phones.append((events[i].id.string.decode(errors="replace"), events[i].sample))
            i += 1
        return 0  # continue the synthesis

    def say(self, voice: str, rate: int, pitch: int, text: str) -> dict[str, Any]:
        """Return the answer to a request."""
        # The library silently falls back to the plain voice if a variant is missing.
        variant = self._variants / voice.partition("+")[2]
        if self._library.espeak_SetVoiceByName(voice.encode()) or not variant.exists():
            raise RuntimeError(f"espeak-ng {self._about['version']} has no voice {voice!r}")
        self._library.espeak_SetParameter(_RATE, rate, 0)
        self._library.espeak_SetParameter(_PITCH, pitch, 0)
        self._audio, self._phones = bytearray(), []
        encoded = text.encode() + b"\0"
        if self._library.espeak_Synth(encoded, len(encoded), 0, _POSITION_IS_CHARACTER, 0, _UTF8, None, None):
            raise RuntimeError(f"espeak-ng {self._about['version']} could not synthesise {text!r}")
        return {"phones": self._phones, "audio": base64.b64encode(self._audio).decode(), **self._about}


def _main(*library: str) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # keeps the library's own output out of the answers
    try:
        espeak = _Espeak(*library)
        for request in sys.stdin:
            print(json.dumps(espeak.say(**json.loads(request))), file=answers, flush=True)
    except (OSError, RuntimeError) as error:
        print(json.dumps({"error": str(error)}), file=answers, flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
