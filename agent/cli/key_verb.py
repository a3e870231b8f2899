"""`g35 key`: the root key of a pool, and secrets for authenticating to enclosures."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from agent.errors import ConfigError
from agent.inline.secrets import create_root_key, load_root_key
from agent.query.access_tokens import new_tokens_file
from agent.s3.credentials import new_credentials_file
from nvmeof.authentication.secret import LENGTHS, new_secret
from nvmeof.authentication.secret_files import SecretFileError, write_secret_file
from nvmeof.wire.authentication import HashId

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="The root key, which wraps the keys of all tenants; secrets of hosts, enclosures and clients.",
)


class Transform(StrEnum):
    """How a secret becomes a key."""

    NONE = "none"
    SHA256 = "sha256"
    SHA384 = "sha384"
    SHA512 = "sha512"


@app.command()
def new(file: Annotated[Path, typer.Argument(help="Where to write it; must not exist.")]) -> None:
    """Make a root key in a file of mode 0600. Without the key the pool is lost: keep a copy offline."""
    create_root_key(file)
    print(f"{file}: a new root key")


@app.command()
def check(file: Annotated[Path, typer.Argument(help="The file of a root key.")]) -> None:
    """Say whether a key file is usable, and print its fingerprint."""
    print(f"{file}: usable, fingerprint {load_root_key(file, 'check the path').fingerprint().hex()}")


@app.command("make-dhchap")
def make_dhchap(
    file: Annotated[Path, typer.Argument(help="Where to write it; must not exist.")],
    length: Annotated[int, typer.Option(help="Bytes of the secret: 32, 48 or 64.")] = 32,
    transform: Annotated[
        Transform,
        typer.Option(help="sha256, sha384 or sha512 binds the key to the NQN of its owner; none: unbound."),
    ] = Transform.SHA256,
) -> None:
    """Make a DH-HMAC-CHAP secret in a file of mode 0600. The host has one, each enclosure another."""
    if length not in LENGTHS:
        raise ConfigError(f"a DH-HMAC-CHAP secret has 32, 48 or 64 bytes, not {length}", "choose one of them")
    chosen = None if transform is Transform.NONE else HashId[transform.name]
    try:
        write_secret_file(file, new_secret(length, chosen))
    except SecretFileError as error:
        raise ConfigError(error.message, error.advice) from None
    print(f"{file}: a new DH-HMAC-CHAP secret of {length} bytes")


@app.command("make-s3")
def make_s3(file: Annotated[Path, typer.Argument(help="Where to write it; must not exist.")]) -> None:
    """Make an access key for the S3 door. Its file has mode 0600, and AWS tools read it as well."""
    new_credentials_file(file)
    print(f"{file}: a new access key; the agent and its clients read it (AWS_SHARED_CREDENTIALS_FILE)")


@app.command("make-query")
def make_query(file: Annotated[Path, typer.Argument(help="Where to write it; must not exist.")]) -> None:
    """Make a token for the query door. Its file has mode 0600; routers send the token."""
    new_tokens_file(file)
    print(f"{file}: a new token; the agent reads the file, a router sends `Authorization: Bearer TOKEN`")
