"""A GGUF model as a whole: one file or all parts of one that gguf-split cut, and its expert tensors.

Opening reads headers only and holds no file open; tensor bytes are read through `SourceReader`, piece by
piece, so that memory stays bounded whatever the model's size. The parser is `gguf_header.py`; cutting experts
is `slicing.py`. Callers: onboarding, `manifest.py`, `backbone_file.py`, `source_bank.py`, `store.py`.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import IO, Protocol

from swarmnode.errors import DenseModel, ModelError, NotGguf, TruncatedFile
from swarmnode.model.gguf_header import Header, read_header
from swarmnode.model.gguf_metadata import Metadata

# Every name under which llama.cpp stacks routed experts; grovemoe's second set is "chexps".
EXPERT_TENSOR = re.compile(r"^blk\.([0-9]{1,6})\.ffn_(gate_up|gate|up|down)_(ch)?exps\.(weight|bias|scale)$")
_PART_NAME = re.compile(r"^(.+)-([0-9]{5})-of-([0-9]{5})\.gguf$")

CHUNK_BYTES = 1 << 20  # what is read at once: large enough for a disk's full speed, small beside any expert


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor; `ne` as GGUF has it (ne[0] innermost), `offset` absolute in the part with number `file`."""

    name: str
    ggml_type: int
    ne: tuple[int, ...]
    offset: int
    n_bytes: int
    file: int


class Reader(Protocol):
    """Reads byte ranges of a model's files. For one thread; several threads take one each."""

    def chunks(self, file: int, offset: int, length: int) -> Iterator[memoryview]:
        """`length` bytes from `offset` of part `file`, in pieces that are valid until the next one is taken.

        Raises TruncatedFile where the file ends before, ModelError where it cannot be read.
        """

    def expect(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        """Say which (file, offset, length) will be read, in this order: a far reader fetches ahead."""

    def close(self) -> None:
        """Close all files."""

    def __enter__(self) -> Reader: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The headers of a model.

    `metadata` and `alignment` are the first part's, `tensors` all parts' in file order. For a model on a web server
    (`http_model.py`) `paths` are names only, and `far` makes its readers.
    """

    paths: tuple[Path, ...]
    sizes: tuple[int, ...]
    metadata: Metadata
    alignment: int
    tensors: Mapping[str, GgufTensor]
    far: Callable[[], Reader] | None = None

    def reader(self) -> Reader:
        """A new reader of the tensors' bytes."""
        return self.far() if self.far is not None else SourceReader(self.paths)

    @classmethod
    def open(cls, path: Path | str) -> GgufFile:
        """Read the headers of the model that `path` is, or is any one part of.

        Raises NotGguf, TruncatedFile, or ModelError naming a part that is missing or cannot be read.
        """
        given = Path(path)
        if not given.name.isprintable() or set(given.name) & set("\\:"):  # as manifests have them
            raise ModelError(f"{str(given)!r}: a file name with control characters, \\ or :; rename the file")
        header, size = _read(given)
        paths = [given.with_name(name) for name in part_names(given.name, header, given)]
        count = len(paths)
        for n, part in enumerate(paths):
            if not part.exists():
                raise ModelError(f"{part}: part {n + 1} of {count} is missing; put all parts into one folder")
        headers, sizes = [], []
        for n, part in enumerate(paths):
            other, size = (header, size) if part == given else _read(part)
            check_part(other, n, count, part)
            headers.append(other)
            sizes.append(size)
        return assemble(paths, headers, sizes)

    @property
    def architecture(self) -> str:
        """`general.architecture`. Raises NotGguf where the file does not name one."""
        name = self.metadata.text("general.architecture")
        if not name or not name.isprintable() or len(name) > 64:
            raise NotGguf(f"{self.paths[0]}: general.architecture is missing or no name; not a model file")
        return name

    @property
    def name(self) -> str:
        """`general.name`, or the file's name where there is none."""
        name = self.metadata.text("general.name") or self.paths[0].stem
        return "".join(c for c in name if c.isprintable())[:200]

    def hyperparameter(self, key: str) -> int:
        """The integer under `ARCHITECTURE.key` (largest item of a per-layer array).

        Raises NotGguf where absent.
        """
        full = f"{self.architecture}.{key}"
        value = self.metadata.integer(full)
        if value is None or not 0 <= value < 1 << 31:
            raise NotGguf(f"{self.paths[0]}: metadata key {full} is missing or no usable integer")
        return value

    def expert_tensors(self) -> dict[str, GgufTensor]:
        """The stacked tensors of the routed experts, in file order.

        Raises DenseModel where there are none.
        """
        found = {name: tensor for name, tensor in self.tensors.items() if EXPERT_TENSOR.match(name)}
        if not any(name.endswith(".weight") for name in found):
            raise DenseModel(
                f"{self.paths[0]}: no routed experts (architecture {self.architecture}); "
                "swarmnode runs Mixture-of-Experts models, this one is dense"
            )
        return found


class SourceReader:
    """Reads byte ranges of a model's files; one open file per part.

    For one thread; several threads take one each.
    """

    def __init__(self, paths: tuple[Path, ...]) -> None:
        self._paths = paths
        self._files: dict[int, IO[bytes]] = {}
        self.bytes_read = 0

    def chunks(self, file: int, offset: int, length: int) -> Iterator[memoryview]:
        """`length` bytes from `offset` of part `file`, in pieces that are valid until the next one is taken.

        Raises TruncatedFile where the file ends before, ModelError where it cannot be read.
        """
        path = self._paths[file]
        buffer = memoryview(bytearray(min(length, CHUNK_BYTES)))
        done = 0
        try:
            if file not in self._files:
                self._files[file] = path.open("rb", buffering=0)
            handle = self._files[file]
            while done < length:
                handle.seek(offset + done)
                got = handle.readinto(buffer[: length - done])  # type: ignore[attr-defined]  # a raw file has it
                if not got:
                    raise TruncatedFile(f"{path}: ends at byte {offset + done}, {length - done} more are needed")
                done += got
                self.bytes_read += got
                yield buffer[:got]
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error.strerror})") from error

    def expect(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        """Nothing: the system reads ahead."""

    def read(self, file: int, offset: int, length: int) -> bytes:
        """The same, whole: for pieces known to be small."""
        return b"".join(bytes(chunk) for chunk in self.chunks(file, offset, length))

    def close(self) -> None:
        """Close all files."""
        for handle in self._files.values():
            handle.close()
        self._files.clear()

    def __enter__(self) -> SourceReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _read(path: Path) -> tuple[Header, int]:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ModelError(f"{path}: not a regular file; give the path of a .gguf file")
        return read_header(path)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error


def part_names(name: str, header: Header, where: Path | str) -> list[str]:
    """File names of all parts of the model of which the file `name` with `header` is one.

    Raises ModelError where the name does not say so.
    """
    count = header.metadata.integer("split.count")
    if count is None or count <= 1:
        return [name]
    number = header.metadata.integer("split.no")
    match = _PART_NAME.match(name)
    if match is None or (int(match[2]) - 1, int(match[3])) != (number, count):
        at = (number or 0) + 1
        raise ModelError(
            f"{where}: part {at} of {count} must be named NAME-{at:05d}-of-{count:05d}.gguf beside the other parts"
        )
    return [f"{match[1]}-{n + 1:05d}-of-{count:05d}.gguf" for n in range(count)]


def check_part(header: Header, n: int, count: int, where: Path | str) -> None:
    """Raise ModelError where this is not the header of part number `n` of `count`."""
    if count > 1 and (header.metadata.integer("split.no"), header.metadata.integer("split.count")) != (n, count):
        raise ModelError(f"{where}: its header does not say part {n + 1} of {count}; fetch it again")


def assemble(
    paths: Sequence[Path], headers: Sequence[Header], sizes: Sequence[int], far: Callable[[], Reader] | None = None
) -> GgufFile:
    """One model out of its parts' headers. Raises NotGguf where they do not belong together."""
    tensors: dict[str, GgufTensor] = {}
    for number, header in enumerate(headers):
        _check_same(headers[0], header, paths[number])
        for entry in header.tensors:
            if entry.name in tensors:
                raise NotGguf(f"{paths[number]}: tensor {entry.name} is in another part too; the parts do not belong")
            tensors[entry.name] = GgufTensor(entry.name, entry.ggml_type, entry.ne, entry.offset, entry.n_bytes, number)
    said = headers[0].metadata.integer("split.tensors.count")
    if len(headers) > 1 and said != len(tensors):
        raise NotGguf(f"{paths[0]}: names {said} tensors in all parts, they hold {len(tensors)}; fetch the parts again")
    first = headers[0]
    return GgufFile(tuple(paths), tuple(sizes), first.metadata, first.alignment, MappingProxyType(tensors), far)


def _check_same(first: Header, header: Header, path: Path) -> None:
    """A part repeats nothing of the first one's metadata, or says the same."""
    for key in ("general.architecture", "split.tensors.count"):
        if key in header.metadata and key in first.metadata and header.metadata.raw(key) != first.metadata.raw(key):
            raise NotGguf(f"{path}: its {key} is not the first part's; the parts do not belong")
