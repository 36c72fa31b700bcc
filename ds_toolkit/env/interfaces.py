"""Which network interface leads to a host."""

from __future__ import annotations

import fcntl
import socket
import struct

# Asks the kernel for the IPv4 address of an interface; from linux/sockios.h.
_SIOCGIFADDR = 0x8915
_ANY_PORT = 9


def interface_to(host: str) -> str | None:
    """The interface whose address the kernel would send from; None if the host is not known or not reachable.

    Nothing is sent: connecting a datagram socket only looks up the route.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, _ANY_PORT))
            address: str = probe.getsockname()[0]
    except (OSError, UnicodeError):
        return None
    return next((name for _, name in socket.if_nameindex() if _address_of(name) == address), None)


def _address_of(interface: str) -> str | None:
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None  # it has no IPv4 address
    return socket.inet_ntoa(answer[20:24])
