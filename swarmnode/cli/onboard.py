"""`swarmnode onboard`: make a model pack out of a GGUF."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from swarmnode.cli.options import AsJson


def onboard(
    file: Annotated[
        str, typer.Argument(help="A GGUF with routed experts, or its http(s) address; any part of a split one.")
    ],
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="PATH", help="Folder of the pack.", show_default="FILE.pack"),
    ] = None,
    hash_all: Annotated[
        bool,
        typer.Option("--hash", help="Of an address: read everything once, so that nodes can give each other experts."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Cut a GGUF into a backbone file and a manifest of its experts: a model pack."""
    import json  # noqa: PLC0415

    from swarmnode import onboard as rooms  # noqa: PLC0415
    from swarmnode.errors import UsageError  # noqa: PLC0415
    from swarmnode.gate.report import mean_expert_bytes  # noqa: PLC0415
    from swarmnode.interruptible import run_interruptible  # noqa: PLC0415
    from swarmnode.model.http_url import file_name, url_of  # noqa: PLC0415
    from swarmnode.model.manifest import is_hashed  # noqa: PLC0415
    from swarmnode.onboard import ModelPack  # noqa: PLC0415
    from swarmnode.tables import ProgressBar, human_bytes  # noqa: PLC0415

    if not file.strip():
        raise UsageError("onboard what? give a GGUF with routed experts, or its http(s) address")
    if out is not None and not out.strip():
        raise UsageError("--out is empty: give the folder that the pack is to be in, or leave it out")
    url = url_of(file)
    target = Path(out) if out is not None else _beside(Path(file if url is None else file_name(url)))
    with ProgressBar(enabled=not as_json) as bar:

        def work(check: Callable[[], None]) -> ModelPack:
            def progress(stage: str, done: int, total: int) -> None:
                check()
                bar.update(stage, done, total)

            return rooms.onboard(file if url is not None else Path(file), target, progress, hash_all=hash_all)

        pack = run_interruptible(work)
    manifest = pack.manifest
    backbone = pack.backbone.stat().st_size
    experts = sum(tensor.stride * tensor.ne[-1] for tensor in manifest.tensors)
    if as_json:
        print(
            json.dumps(
                {
                    "pack": str(target),
                    "name": manifest.name,
                    "architecture": manifest.architecture,
                    "model_hash": manifest.model_hash,
                    "sites": len(manifest.sites),
                    "experts": manifest.n_expert,
                    "used": manifest.n_used,
                    "shared_expert": manifest.shared_expert,
                    "expert_bytes": experts,
                    "backbone_bytes": backbone,
                    "hashed": is_hashed(manifest),
                }
            )
        )
        return
    layers = len(manifest.sites)
    print(f"{manifest.name} ({manifest.architecture})")
    print(f"{layers} MoE layers, {manifest.n_expert} experts, top {manifest.n_used}")
    print(f"experts {human_bytes(experts)}, one {human_bytes(mean_expert_bytes(manifest))}; pack {target}")
    if not is_hashed(manifest):
        print("its experts come straight from that address, not from other nodes: --hash reads them all once")


def _beside(file: Path) -> Path:
    """FILE.pack; of a folder, which is no model anyway, something within it."""
    return file.with_suffix(".pack") if file.name not in ("", "..") else file / "model.pack"
