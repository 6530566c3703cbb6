"""A process that fills or thins out a slice store, for tests that kill it: python store_child.py ACTION STORE PACK N.

PACK is a folder with manifest.json and tiny.gguf. N > 0: the process kills itself, as `kill -9` does, at the N-th
operation on the store's files. It prints a line after each expert.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from swarmnode.errors import ModelError
from swarmnode.model import store
from swarmnode.model.manifest import load_manifest


def kill_at(count: int, folder: str) -> None:
    seen = 0

    def hook(event: str, args: tuple[object, ...]) -> None:
        nonlocal seen
        if event in ("open", "os.rename", "os.remove", "mmap.__new__") and folder in str(args[0]):
            seen += 1
            if seen == count:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def main(action: str, folder: str, pack: str, count: str) -> None:
    store.BATCH_EXPERTS = 2
    manifest = load_manifest(Path(pack) / "manifest.json")
    wanted = {site.index: range(site.n_expert) for site in manifest.sites}
    if int(count):
        kill_at(int(count), folder)
    with store.SliceStore(folder, manifest) as slices:
        if action == "hold":
            print("holding", flush=True)
            sys.stdin.read()
        elif action == "forget":
            slices.forget(0, [1, 4])
        elif action == "full":
            import resource

            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
            try:
                slices.fill_from_source(Path(pack) / "tiny.gguf", wanted)
            except ModelError as error:
                print(error, flush=True)
        else:
            slices.fill_from_source(
                Path(pack) / "tiny.gguf", wanted, lambda done, total: print(done, total, flush=True)
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
