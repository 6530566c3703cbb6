"""The gate's verdict on the wire types, for `bench wan`: by the gate's own command, in a process of its own.

Called by `wan_measure.py` when the first lever needs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys

import msgspec

from swarmnode.onboard import ModelPack

GATE_END_S = 10.0  # that a gate has to remove its folder


async def run_gate(pack: ModelPack, positions: int) -> str:
    """Let the gate judge the wire types for this pack. Returns why it did not pass, or could not be run; "" where it
    passed. Where this is cancelled, the gate ends too, and removes what it has made."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "swarmnode", "gate", str(pack.path), "--positions", str(positions), "--json",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for this process, which ends it: twice would break off its tidying up
    )  # fmt: skip
    try:
        stdout, stderr = (data.decode("utf-8", "replace") for data in await process.communicate())
    finally:
        await _end(process)
    if not process.returncode:
        return ""
    return f"the gate: {why(stdout, stderr) or f'exit code {process.returncode}'}"


async def _end(process: asyncio.subprocess.Process) -> None:
    for how in (process.terminate, process.kill):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            how()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), GATE_END_S)


def why(stdout: str, stderr: str) -> str:
    """Why a gate that was told --json has failed: its report's `error`, else the last line of its standard error."""
    try:
        error = msgspec.json.decode(stdout, type=_Report).error
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        error = ""
    said = [line.strip("│ ") for line in stderr.splitlines() if re.search(r"\w", line)]
    return error or (said[-1] if said else "")


class _Report(msgspec.Struct, frozen=True):
    error: str = ""
