"""One process of the gate of architectures: jobs come in on stdin, results go out on stdout, a line of JSON each.

Before the result come two lines: TAKEN, as soon as a job is begun, and BUILT, when llama.cpp alone has run the model.

llama.cpp ends the process where an assertion of its own fails; whoever started it (`run.py`) sees which job it was at.
"""

from __future__ import annotations

import faulthandler
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from swarmnode.architectures.check import check_architecture

TAKEN, BUILT = b"taken", b"built"


def main(folder: Path) -> None:
    """Do jobs `[arch, variant, type]` until stdin ends."""
    faulthandler.enable()  # a disk that is full under a mapped file ends the process: say so at least
    decoder, encoder = msgspec.json.Decoder(tuple[str, str, str]), msgspec.json.Encoder()
    for line in sys.stdin.buffer:
        arch, variant, ggml_type = decoder.decode(line)
        _write(TAKEN)
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix=f"{arch}-", dir=folder) as place:
            result = check_architecture(arch, variant, ggml_type, Path(place), lambda: _write(BUILT))
        result.seconds = round(time.monotonic() - began, 3)
        _write(encoder.encode(result))


def _write(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
