"""What is to be played, and how: the options of `g35 replay`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from agent.errors import did_you_mean
from agent.figures.tables import stored_token_bytes
from agent.host_os.result_file import why_not_writable
from agent.sizes import parse_size

BYTES_PER_TOKEN = 2048
BYTES_PER_TOKEN_MAX = 1 << 20
"""No model of today has more than half of it."""


def _plot_file(path: Path | None) -> Path | None:
    if path is not None and path.suffix not in (".png", ".svg", ".pdf"):
        raise typer.BadParameter("the file's name must end in .png, .svg or .pdf")
    if path is not None and (why := why_not_writable(path)):
        raise typer.BadParameter(why)
    return path


def _model(name: str) -> str:
    if name and name not in (known := stored_token_bytes()):
        raise typer.BadParameter(
            f"no model {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}"
        )
    return name


def _size(text: str) -> str:
    try:
        parse_size(text or "0")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return text


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    trace: Annotated[Path, typer.Argument(help="The trace: JSON lines in Mooncake's format.")]
    # Without a parser Click would look at it, and wait for ever for an agent that hangs.
    mount: Annotated[Path, typer.Option(parser=Path, metavar="<path>", help="Where the pool is mounted.")]
    requests: Annotated[int, typer.Option(min=0, help="Play only the first N requests; 0: all.")] = 0
    bytes_per_token: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=BYTES_PER_TOKEN_MAX,
            help=f"KV-cache bytes of a token; default: {BYTES_PER_TOKEN}, or the model's.",
        ),
    ] = None
    model: Annotated[
        str,
        typer.Option(
            callback=_model,
            help="Take a token's bytes from a model, such as llama-3.1-8b or deepseek-v3-fp8.",
        ),
    ] = ""
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Requests played at a time.")] = 4
    time_scale: Annotated[
        float, typer.Option(min=0.0, help="1: at the trace's pace, 10: ten times that, 0: without pauses.")
    ] = 0.0
    volume: Annotated[str, typer.Option(help="The volume that takes the blocks.")] = "kv"
    seed: Annotated[
        int, typer.Option(min=0, max=(1 << 64) - 1, help="Another seed: other keys, other contents.")
    ] = 0
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first broken line.")] = False
    prestage: Annotated[bool, typer.Option(help="Announce a prefix to the agent before reading it.")] = True
    agent_wait: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=3600.0,
            help="Seconds to wait for an agent that has died; then the replay ends with 1.",
        ),
    ] = 10.0
    lru_bytes: Annotated[
        str,
        typer.Option(
            callback=_size, help="Size of the LRU to compare with, such as 4G; default: the volume's."
        ),
    ] = ""
    json_output: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False
    plot: Annotated[
        Path | None,
        typer.Option(
            callback=_plot_file, help="Draw hit ratio, throughput and latency: a .png, .svg or .pdf file."
        ),
    ] = None

    @property
    def token_bytes(self) -> int:
        """KV-cache bytes of a token: given, the model's, or the default."""
        if self.bytes_per_token is None and self.model:
            return stored_token_bytes()[self.model]
        return self.bytes_per_token or BYTES_PER_TOKEN
