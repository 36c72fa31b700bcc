from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ds_toolkit.advise.environment import advise_environment
from ds_toolkit.env.envfile import parse_env_text
from ds_toolkit.env.fabric import Gpu, Host
from ds_toolkit.env.interfaces import interface_to, is_tunnel, is_virtual
from ds_toolkit.env.launchers import Launcher
from ds_toolkit.env.links import fastest_links
from ds_toolkit.env.rules import lint_env
from ds_toolkit.env.variables import REPLACED, VARIABLES
from ds_toolkit.errors import ToolkitError
from ds_toolkit.findings import Severity

GB = 10**9
INFINIBAND = Host((Gpu("A100-SXM4-80GB", 80 * GB),) * 8, 10**12, 64, ("mlx5_0",), ("eth0", "docker0", "lo"))
ETHERNET = replace(INFINIBAND, infiniband_devices=())
CPU = Host((), 10**10, 2, (), ("docker0", "eth0", "lo", "virbr0"))
EXAMPLE = Path(__file__).parents[2] / ".deepspeed_env.example"


def variables(host: Host, **arguments: object) -> dict[str, str]:
    advice = advise_environment(host, **arguments)  # type: ignore[arg-type]
    return parse_env_text(advice.text).variables


@pytest.mark.parametrize("launcher", list(Launcher))
@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("host", [INFINIBAND, ETHERNET, CPU], ids=["infiniband", "ethernet", "cpu"])
def test_every_file_is_clean_for_its_launcher(host: Host, debug: bool, launcher: Launcher) -> None:
    advice = advise_environment(host, debug=debug, launcher=launcher)
    findings = lint_env(
        parse_env_text(advice.text),
        launcher if launcher.reads_env_file else None,
        bool(host.infiniband_devices),
    )
    # Debugging is what was asked for.
    assert [finding for finding in findings if not (debug and finding.code == "DS724")] == []
    assert all(setting.why for setting in advice.settings)
    assert "#" not in advice.text
    assert advice.text.endswith("\n")
    assert {setting.name for setting in advice.settings} == variables(host, debug=debug).keys()
    assert not REPLACED.keys() & variables(host, debug=debug).keys()


def test_infiniband_is_disabled_only_where_there_is_none() -> None:
    assert "NCCL_IB_DISABLE" not in variables(INFINIBAND)
    assert variables(INFINIBAND)["NCCL_IB_TIMEOUT"] == "22"
    assert variables(ETHERNET)["NCCL_IB_DISABLE"] == "1"
    assert "NCCL_IB_DISABLE" not in variables(CPU)
    assert any("NCCL_IB_DISABLE" in reason for reason in advise_environment(CPU).left_out)


def test_peer_access_is_disabled_only_where_it_is_known_to_be_broken() -> None:
    consumer = replace(ETHERNET, gpus=(Gpu("NVIDIA GeForce RTX 4090", 24 * GB),) * 2)
    assert variables(consumer)["NCCL_P2P_DISABLE"] == "1"
    assert "NCCL_P2P_DISABLE" not in variables(replace(consumer, gpus=consumer.gpus[:1]))
    assert "NCCL_P2P_DISABLE" not in variables(INFINIBAND)


def test_the_interface_leads_to_the_other_hosts() -> None:
    routes = {"a": "eth1", "10.0.0.2": "eth1", "c": "docker0", "d": "lo", "e": "ib0"}
    found = variables(CPU, hosts=["a", "me@10.0.0.2"], find_interface=routes.get)
    assert found["NCCL_SOCKET_IFNAME"] == found["GLOO_SOCKET_IFNAME"] == "eth1"
    for hosts in (["c"], ["d"], ["unknown"], ["a", "e"]):
        advice = advise_environment(CPU, hosts=hosts, find_interface=routes.get)
        assert "IFNAME" not in advice.text
        assert any("NCCL_SOCKET_IFNAME" in reason for reason in advice.left_out)
    # The host itself is among them, and is reached over lo.
    assert variables(CPU, hosts=["a", "d"], find_interface=routes.get)["NCCL_SOCKET_IFNAME"] == "eth1"
    assert variables(CPU)["NCCL_SOCKET_IFNAME"] == "eth0"
    two = replace(CPU, network_interfaces=("eth0", "eth1"))
    assert "NCCL_SOCKET_IFNAME" not in variables(two)


def test_a_persons_lines_stay_and_win() -> None:
    existing = parse_env_text("HF_HOME=/data\nNCCL_DEBUG=TRACE\nTORCH_FR_BUFFER_SIZE=2000\n", "mine")
    advice = advise_environment(INFINIBAND, existing=existing)
    assert advice.text.startswith("HF_HOME=/data\nNCCL_DEBUG=TRACE\n")
    assert "NCCL_DEBUG (proposed: WARN)" in advice.kept
    assert {"HF_HOME", "TORCH_FR_BUFFER_SIZE"} <= set(advice.kept)
    assert "NCCL_DEBUG" not in {setting.name for setting in advice.settings}
    again = advise_environment(INFINIBAND, existing=parse_env_text(advice.text))
    assert again.text == advice.text
    assert again.settings == []


@pytest.mark.parametrize(
    ("text", "launcher", "says"),
    [
        ("WANDB_API_KEY=abc\n", Launcher.PDSH, "looks like a secret"),
        ("hf_token=abc\n", Launcher.PDSH, "looks like a secret"),
        ("Hf_Token=abc\n", Launcher.SLURM, "looks like a secret"),
        ("# a comment\n", Launcher.PDSH, "cannot read"),
        ("# A=1\n", Launcher.PDSH, "not the name of a variable"),
        ("A=b c\n", Launcher.PDSH, "would not reach|changed"),
    ],
)
def test_lines_that_would_do_harm_are_not_taken_over(text: str, launcher: Launcher, says: str) -> None:
    with pytest.raises(ToolkitError, match=says):
        advise_environment(INFINIBAND, existing=parse_env_text(text, "mine"), launcher=launcher)


@pytest.mark.parametrize("launcher", list(Launcher))
def test_commas_stay_where_they_are_carried(launcher: Launcher) -> None:
    existing = parse_env_text("NCCL_IB_HCA=mlx5_0,mlx5_1\n", "mine")
    advice = advise_environment(INFINIBAND, existing=existing, launcher=launcher)
    assert parse_env_text(advice.text).variables["NCCL_IB_HCA"] == "mlx5_0,mlx5_1"
    # The other way to Slurm is the one that cuts.
    said = [notice for notice in advice.notices if "NCCL_IB_HCA=mlx5_0,mlx5_1" in notice]
    assert len(said) == (launcher is Launcher.SLURM)
    assert all("`deepspeed --launcher slurm` cuts" in notice for notice in said)
    assert "DS704" in {finding.code for finding in lint_env(existing, Launcher.SLURM)}


def test_an_empty_secret_is_none() -> None:
    existing = parse_env_text("HF_TOKEN=\n", "mine")
    assert advise_environment(INFINIBAND, existing=existing).text.startswith("HF_TOKEN=\n")
    assert lint_env(existing) == []


def test_a_line_under_an_old_name_is_not_overruled_by_the_new_one() -> None:
    existing = parse_env_text("NCCL_ASYNC_ERROR_HANDLING=1\nTORCH_NCCL_TRACE_BUFFER_SIZE=500\n", "mine")
    advice = advise_environment(INFINIBAND, existing=existing)
    found = parse_env_text(advice.text).variables
    assert found["NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert found["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "500"
    assert not {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_FR_BUFFER_SIZE"} & found.keys()
    (reason,) = [reason for reason in advice.left_out if "ASYNC_ERROR_HANDLING" in reason]
    for part in ("TORCH_NCCL_ASYNC_ERROR_HANDLING=3:", " NCCL_ASYNC_ERROR_HANDLING=1 ", "overrule"):
        assert part in reason
    assert any(reason.startswith("TORCH_FR_BUFFER_SIZE=2000: ") for reason in advice.left_out)
    assert {"NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_TRACE_BUFFER_SIZE"} <= set(advice.kept)
    assert advice.notices == []


def test_old_and_new_name_side_by_side_are_reported() -> None:
    text = "NCCL_ASYNC_ERROR_HANDLING=1\nTORCH_NCCL_ASYNC_ERROR_HANDLING=2\n"
    advice = advise_environment(INFINIBAND, existing=parse_env_text(text, "mine"))
    assert advice.text.startswith(text)
    (notice,) = advice.notices
    assert "`NCCL_ASYNC_ERROR_HANDLING`" in notice
    assert "`TORCH_NCCL_ASYNC_ERROR_HANDLING`" in notice
    assert "the new one wins" in notice


def test_the_example_is_what_a_host_with_infiniband_gets() -> None:
    assert advise_environment(INFINIBAND).text == EXAMPLE.read_text()


def test_a_hang_ends_within_half_an_hour() -> None:
    settings = variables(INFINIBAND)
    assert settings["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    seconds = int(settings["DEEPSPEED_TIMEOUT"]) * 60 + int(settings["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"])
    assert seconds < 1800


def test_every_variable_that_is_written_is_one_that_is_known() -> None:
    for host in (INFINIBAND, ETHERNET, CPU):
        assert {*variables(host), *variables(host, debug=True)} <= VARIABLES.keys()


def test_routes_of_this_host() -> None:
    assert interface_to("127.0.0.1") == "lo"
    assert interface_to("no-such-host.invalid") is None


def test_links_are_read_from_the_kernel(tmp_path: Path) -> None:
    assert fastest_links(tmp_path) is None
    for name, state, speed in (
        ("eth0", "up", "25000"),
        ("eth1", "down", "100000"),
        ("docker0", "up", "400000"),
    ):
        folder = tmp_path / "sys/class/net" / name
        folder.mkdir(parents=True)
        (folder / "operstate").write_text(f"{state}\n")
        (folder / "speed").write_text(f"{speed}\n")
    (tmp_path / "sys/class/net/eth0/speed").write_text("-1\n")
    assert fastest_links(tmp_path) is None
    (tmp_path / "sys/class/net/eth0/speed").write_text("25000\n")
    assert fastest_links(tmp_path) == "25GbE"
    for number, state in enumerate(("4: ACTIVE", "4: ACTIVE", "1: DOWN")):
        port = tmp_path / f"sys/class/infiniband/mlx5_{number}/ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("200 Gb/sec (4X HDR)\n")
    assert fastest_links(tmp_path) == "2x200Gb-IB"


NOWHERE = "lo docker0 virbr0 br-1a2b veth12 cni0 flannel.1 cali1a2b ifb0 podman0 lxcbr0 lxdbr0 vmnet8 vnet3"
NOWHERE += " cilium_host ovs-system cbr0 weave"
TUNNELS = "wg0 tailscale0 tun0 tap0 vxlan.calico sit0 gre0 gretap0 ip6tnl0 ztabcdef"
REAL = ["eth0", "ib0", "eno1", "enp3s0f0", "wlan0", "bond0", "hsn0"]


@pytest.mark.parametrize("name", [*NOWHERE.split(), *TUNNELS.split()])
def test_bridges_and_tunnels_are_never_proposed(name: str) -> None:
    assert is_virtual(name)
    assert is_tunnel(name) == (name in TUNNELS.split())
    for variable, prefix in (
        ("NCCL_SOCKET_IFNAME", ""),
        ("NCCL_SOCKET_IFNAME", "="),
        ("GLOO_SOCKET_IFNAME", ""),
    ):
        (finding,) = lint_env(parse_env_text(f"{variable}={prefix}{name},eth0\n"))
        assert finding.code == "DS727"
        assert finding.severity is (Severity.WARNING if is_tunnel(name) else Severity.ERROR)
        assert f"`{name}`" in finding.message
    only = replace(CPU, network_interfaces=("lo", name))
    assert "NCCL_SOCKET_IFNAME" not in variables(only)
    assert "NCCL_SOCKET_IFNAME" not in variables(only, hosts=["a"], find_interface={"a": name}.get)


@pytest.mark.parametrize("name", REAL)
def test_real_interfaces_are_proposed(name: str) -> None:
    assert lint_env(parse_env_text(f"NCCL_SOCKET_IFNAME={name}\nGLOO_SOCKET_IFNAME={name}\n")) == []
    assert variables(replace(CPU, network_interfaces=("lo", name)))["NCCL_SOCKET_IFNAME"] == name


def test_what_the_toolkit_wrote_is_its_own_to_change() -> None:
    quiet = advise_environment(INFINIBAND, existing=parse_env_text("HF_HOME=/data\n"))
    debug = advise_environment(INFINIBAND, debug=True, existing=parse_env_text(quiet.text))
    assert parse_env_text(debug.text).variables == {"HF_HOME": "/data", **variables(INFINIBAND, debug=True)}
    assert "NCCL_DEBUG" in {setting.name for setting in debug.settings}
    assert not any("NCCL_DEBUG" in name for name in debug.kept)
    back = advise_environment(INFINIBAND, existing=parse_env_text(debug.text))
    assert parse_env_text(back.text).variables == parse_env_text(quiet.text).variables
    assert any("TORCH_NCCL_DESYNC_DEBUG=1" in reason for reason in back.left_out)


@pytest.mark.parametrize(
    "line", ["NCCL_DEBUG=INFO", "TORCH_DISTRIBUTED_DEBUG=DETAIL", "NCCL_DEBUG_SUBSYS=NET"]
)
def test_a_line_like_one_that_debugging_adds_is_the_persons(line: str) -> None:
    advice = advise_environment(INFINIBAND, existing=parse_env_text(f"HF_HOME=/data\n{line}\n"))
    assert advice.text.splitlines()[:2] == ["HF_HOME=/data", line]
    assert any(kept.startswith(line.partition("=")[0]) for kept in advice.kept)
