"""What connects GPUs and hosts, and how fast it is."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from ds_toolkit.errors import ToolkitError

# What collectives reach of a link's rate; NCCL's bus bandwidth on well-built fabrics. Our assumption.
ACHIEVED_SHARE = 0.8
# One direction of all links of one GPU: NVIDIA's figures for V100, A100, H100 and B200 (half of "total").
_GPU_LINKS_GIGABYTES = {"NVLINK2": 150, "NVLINK3": 300, "NVLINK4": 450, "NVLINK5": 900}
# One direction of a 16-lane slot: 8, 16 and 32 GT/s, 128b/130b.
_PCIE_GIGABYTES = {"PCIE3": 15.75, "PCIE4": 31.5, "PCIE5": 63.0}
_ETHERNET_OR_INFINIBAND = re.compile(
    r"(?:(?P<links>\d+)x)?(?P<gigabits>\d+(?:\.\d+)?)\s*-?(?:GBE|GB-?(?:IB|ROCE|ETH(?:ERNET)?))",
    re.IGNORECASE,
)
EXAMPLES = "10GbE, 100GbE, 400Gb-IB, 8x400Gb-IB, NVLink4 or PCIe4"
DEFAULT_GPU_LINK = "PCIe4"
# Of one PCIe 4.0 slot to host memory, and of one data-centre NVMe drive.
HOST_BYTES_PER_SECOND = 25e9
NVME_BYTES_PER_SECOND = 5e9


@dataclass(frozen=True)
class Network:
    """The slowest link that a collective over all ranks crosses, as it is shared.

    Attributes:
        name: as people call it.
        bytes_per_second: nominal rate in one direction: of one GPU's links inside a host, or of all links
            between one host and the others.
    """

    name: str
    bytes_per_second: float

    @property
    def achieved_bytes_per_second(self) -> float:
        """What collectives reach of the nominal rate."""
        return self.bytes_per_second * ACHIEVED_SHARE


def parse_network(text: str) -> Network:
    """The network of a name such as `100GbE`, `400Gb-IB`, `8x400Gb-IB` (eight cards a host) or `NVLink4`.

    Raises:
        ToolkitError: it is none of them.
    """
    name = text.strip()
    plain = name.upper().replace("-", "").replace(" ", "").replace(".0", "").replace("GEN", "")
    gigabytes = {**_GPU_LINKS_GIGABYTES, **_PCIE_GIGABYTES}.get(plain)
    if gigabytes is not None:
        return Network(name, gigabytes * 1e9)
    match = _ETHERNET_OR_INFINIBAND.fullmatch(name)
    bits_per_second = float(match["gigabits"]) * 1e9 * float(match["links"] or 1) if match else 0.0
    if not bits_per_second or math.isinf(bits_per_second):
        raise ToolkitError(f"`{text}` is not a network", fix=f"write it as {EXAMPLES}")
    return Network(name, bits_per_second / 8)
