"""`g35 run`: `g35 up`, `g35 replay`, `g35 status` and `g35 down` in one temporary folder, gone at the end.

SIGTERM and SIGHUP take the pool down as Ctrl-C does. After `kill -9` the kernel ends `g35 up`, and so its
children; the next run clears the folder away.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from agent.cli.temporary_folder import KeptFolder, temporary_folder
from agent.cli.up.children import end_process
from agent.cli.up.interrupts import ended_by_signals
from agent.cli.up.up_arguments import Media, Transport, check_captures, drive_size_option
from agent.errors import G35Error, UserError
from agent.host_os.parent_death import die_with_parent
from agent.replay.replay_options import ReplayOptions

SAMPLE = Path(__file__).parents[1] / "replay" / "sample_trace.jsonl"
_DOWN_SECONDS = 60.0
_WAYS: dict[Transport, str] = {
    "rdma": "NVMe/RDMA (RoCEv2 by emulated NICs, on loopback)",
    "tcp": "NVMe/TCP",
}


def run(
    trace: Annotated[Path | None, typer.Option(help="A trace of your own; default: a bundled one.")] = None,
    requests: Annotated[int, typer.Option(min=0, help="Play only the first N requests; 0: all.")] = 0,
    bytes_per_token: Annotated[
        int | None,
        typer.Option(
            min=1, max=32768, help="KV-cache bytes of a token; default: 2048, and 128 for your own trace."
        ),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Requests played at a time.")] = 4,
    drive_size: Annotated[
        str, typer.Option(callback=drive_size_option, help="Size of each of the four drives.")
    ] = "640M",
    transport: Annotated[
        Transport,
        typer.Option(help="rdma: NVMe/RDMA over emulated NICs; tcp: NVMe/TCP, which is faster here."),
    ] = "rdma",
    pcap: Annotated[
        Path | None,
        typer.Option(help="With --transport rdma: a folder for a capture of each emulated NIC's packets."),
    ] = None,
    media: Annotated[Media, typer.Option(help="Keep the drives in memory, or in files.")] = "memory",
) -> None:
    """Start enclosures, agent and mount, replay a trace through them, and end all of it.

    Exit code 1 if a wrong byte was served, the agent died for good, or not all requests were played.
    """
    from agent.cli.replay_verb import show_table
    from agent.replay.run_replay import run_replay
    from agent.replay.trace_lines import block_tokens_of

    if pcap is not None:
        check_captures(transport)
    if trace is not None and not trace.is_file():
        raise UserError(f"there is no trace {trace}", "`g35 trace generate` makes one")
    per_token = bytes_per_token or (2048 if trace is None else 128)
    chosen = trace or SAMPLE
    with ended_by_signals(), temporary_folder("g35-run-") as state:
        slot_bytes = max(-(-block_tokens_of(chosen) * per_token // 4096) * 4096, 64 << 10)
        up = [
            "--transport", transport, "--media", media, "--drive-size", drive_size,
            "--value-size", str(slot_bytes),
        ]  # fmt: skip
        if pcap is not None:
            up += ["--pcap", str(pcap.absolute())]
        with _pool_up(state, transport, up):
            options = ReplayOptions(
                trace=chosen,
                mount=state / "mnt",
                requests=requests,
                bytes_per_token=per_token,
                concurrency=concurrency,
            )
            _say(f"replay {chosen.name}, every byte read is compared with what was stored")
            report = run_replay(options)
            show_table(report, f"replay of {chosen.name}")
            _say("status")
            subprocess.run(_g35("status", "--state", state), check=False)
        _say("all is down again, nothing is left")
    for trouble in report.troubles():
        print(f"error: {trouble}", file=sys.stderr)
    if not report.good:
        raise typer.Exit(1)


def _g35(*words: str | Path) -> list[str]:
    return [sys.executable, "-P", "-m", "agent.cli", *map(str, words)]


def _say(what: str) -> None:
    print(f"── {what}", flush=True)


@contextmanager
def _pool_up(state: Path, transport: Transport, options: list[str]) -> Iterator[None]:
    if shutil.which("fusermount3") is None and not Path("/dev/fuse").exists():
        raise UserError("there is no /dev/fuse here, so nothing can be mounted", "see `make setup`")
    _say(f"up: two enclosures of two drives each over {_WAYS[transport]}, a fresh pool, the agent, its mount")
    process = subprocess.Popen(
        _g35("up", "--state", state, *options),
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent,
    )
    assert process.stdout is not None
    try:
        if not any(line.strip() == "ready" for line in process.stdout):
            if any(state.glob("*.log")):
                advice = f"`g35 up` says why above; its logs stay in {state} until the next g35 run"
                raise KeptFolder("the pool did not come up", advice)
            raise G35Error("the pool did not come up", "`g35 up` says why above")
        yield
    finally:
        end_process(process, _DOWN_SECONDS)
        process.stdout.close()
