"""SHA-256 of every expert of a model: what a worker checks fetched bytes against.

Reads a model's files once, piece by piece, in a few threads; memory stays bounded. Caller: onboarding, which
hands the result to `manifest.build_manifest`. (For a model on a web server: `http_model.digest_far_experts`.)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from threading import local

from swarmnode.compute.recipe import Site
from swarmnode.errors import ManifestMismatch
from swarmnode.model.gguf_file import GgufFile, GgufTensor, Reader, SourceReader
from swarmnode.model.gguf_values import checked
from swarmnode.model.slicing import SliceShape, expert_digest, slice_shape

Digests = tuple[tuple[str, ...], ...]


def digest_experts(
    gguf: GgufFile,
    sites: Sequence[Site],
    progress: Callable[[int, int], None] | None = None,
    *,
    threads: int | None = None,
) -> Digests:
    """SHA-256 of every expert of every site, read piece by piece. `progress(bytes done, bytes in all)`.

    hashlib releases the GIL: a few threads hash as fast as the disk reads. Raises BrokenModel where a weight is NaN or
    infinite: every answer of that expert would be refused, and held against the node that gave it.
    """
    plans = [site_plan(gguf, site) for site in sites]
    total = sum(shape.stride * shape.n_expert for plan in plans for _, shape in plan)
    result = [[""] * site.n_expert for site in sites]
    readers = local()
    opened: list[SourceReader] = []

    def digest_one(position: int, expert: int) -> tuple[int, int, str]:
        if not hasattr(readers, "reader"):
            readers.reader = SourceReader(gguf.paths)
            opened.append(readers.reader)
        reader: SourceReader = readers.reader
        pieces = (
            chunk for tensor, shape in plans[position] for chunk in expert_chunks(reader, gguf, tensor, shape, expert)
        )
        return position, expert, expert_digest(pieces)

    done = 0
    pool = ThreadPoolExecutor(threads or min(4, os.cpu_count() or 1), thread_name_prefix="digest")
    try:
        for position, site in enumerate(sites):
            jobs = [pool.submit(digest_one, position, expert) for expert in range(site.n_expert)]
            for job in as_completed(jobs):
                _, expert, digest = job.result()
                result[position][expert] = digest
                done += sum(shape.stride for _, shape in plans[position])
                if progress is not None:
                    progress(done, total)
    finally:
        pool.shutdown(cancel_futures=True)
        for reader in opened:
            reader.close()
    return tuple(tuple(row) for row in result)


def expert_chunks(
    reader: Reader, gguf: GgufFile, tensor: GgufTensor, shape: SliceShape, expert: int
) -> Iterator[memoryview]:
    """The bytes of an expert in a stack, piece by piece. Raises BrokenModel where a weight is NaN or infinite."""
    return checked(
        reader.chunks(tensor.file, tensor.offset + shape.span(expert)[0], shape.stride),
        tensor.ggml_type,
        lambda _block: f"{gguf.paths[0]}: {tensor.name} of expert {expert} holds NaN or infinity; fetch the file again",
    )


def site_plan(gguf: GgufFile, site: Site) -> list[tuple[GgufTensor, SliceShape]]:
    """A site's tensors in its order, and how each is cut. Raises ManifestMismatch where they do not fit."""
    plan = []
    for name in site.tensors:
        tensor = gguf.tensors.get(name)
        if tensor is None:
            raise ManifestMismatch(f"{gguf.paths[0]}: site {site.index} names tensor {name}, which the file lacks")
        shape = slice_shape(name, tensor.ggml_type, tensor.ne)
        if shape.n_expert != site.n_expert:
            raise ManifestMismatch(f"{name} stacks {shape.n_expert} experts, site {site.index} has {site.n_expert}")
        plan.append((tensor, shape))
    return plan
