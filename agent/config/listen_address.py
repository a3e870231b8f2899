"""Where the metrics may listen: a loopback address and a port, and nothing else.

Apart from the listener itself, so that a command line can check the words without the listener's libraries.
"""

import ipaddress

from agent.errors import ConfigError


def parse_listen_address(address: str) -> tuple[str, int]:
    """Host (without brackets) and port of "127.0.0.1:9035" or "[::1]:9035". Raises ConfigError otherwise."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        if not ipaddress.ip_address(host).is_loopback:
            raise ConfigError(f"the metrics on {host} would be open to the network", "use 127.0.0.1 or [::1]")
        number = int(port) if port.isascii() and port.isdigit() else -1
    except ValueError:
        number = -1
    if not 1 <= number <= 65_535:
        raise ConfigError(f"{address!r} is not an address and a port", "write for example 127.0.0.1:9035")
    return host, number
