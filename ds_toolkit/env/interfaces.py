"""Which network interface leads to a host, and which, by their names, lead to none."""

from __future__ import annotations

import fcntl
import re
import socket
import struct

# Asks the kernel for the IPv4 address of an interface; from linux/sockios.h.
_SIOCGIFADDR = 0x8915
_ANY_PORT = 9
# Loopback, bridges of containers and virtual machines, and their ends of virtual cables.
_LEADS_NOWHERE = re.compile(
    r"lo|(docker|virbr|br-|veth|cni|flannel|cali|dummy|bonding_|ifb|podman|lxcbr|lxdbr|vmnet|vnet|cilium|ovs|cbr"
    r"|weave).*"
)
# They lead to other hosts by a detour.
_TUNNEL = re.compile(r"(tun|tap|wg|tailscale|vxlan|sit|gre|ip6tnl|ip6gre|erspan|zt).*")


def is_tunnel(interface: str) -> bool:
    """Whether a network interface by its name wraps packets up and sends them over another one."""
    return _TUNNEL.fullmatch(interface) is not None


def is_virtual(interface: str) -> bool:
    """Whether an interface by its name is none to train over: it leads to no other host, or is a tunnel."""
    return is_tunnel(interface) or _LEADS_NOWHERE.fullmatch(interface) is not None


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
