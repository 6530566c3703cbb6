"""What a gateway's kernel is told, so that it is a NAT or a firewall of some kind: nft scripts, nothing else.

Outside interface wan0, inside interface lan0. Words of RFC 4787: mapping (which external port), filtering (who may come
in by it).

| kind        | mapping                     | filtering              | nft                                            |
| ----------- | --------------------------- | ---------------------- | ---------------------------------------------- |
| easy        | endpoint-independent        | address and port       | masquerade keeps the source port               |
| restricted  | endpoint-independent        | address                | + inbound DNAT for who was sent to (@perm)     |
| fullcone    | endpoint-independent        | endpoint-independent   | + inbound DNAT for everybody (@eim)            |
| symmetric   | address- and port-dependent | address and port       | masquerade fully-random, or a counter          |
| udp-blocked | none                        | TCP to 80 and 443 only | forward drops the rest                         |

port policies: preserve; random (endpoint-independent, but another port than inside); sequential (symmetric, the next
port for each new flow, which a peer can predict).

Every gateway drops what is sent to itself. With accept, an early packet of a peer makes a conntrack entry, and the
later outgoing flow gets another port: no real home router does that.
"""

from __future__ import annotations

from typing import Literal, get_args

Kind = Literal["easy", "restricted", "fullcone", "symmetric", "udp-blocked"]
Ports = Literal["preserve", "random", "sequential"]
Firewall = Literal["open", "stateful", "udp-blocked"]  # of a gateway, for IPv6: no translation

ENDPOINT_INDEPENDENT = ("easy", "restricted", "fullcone")
SEQUENTIAL_FIRST, SEQUENTIAL_COUNT = 40000, 1000


def nat_rules(
    kind: Kind, wan_ip: str, *, hairpin: bool = False, ports: Ports = "preserve", timeout_s: int = 120
) -> str:
    """The IPv4 part of a gateway whose outside address is `wan_ip`. Raises ValueError for what no gateway is."""
    if kind not in get_args(Kind) or ports not in get_args(Ports):
        raise ValueError(f"unknown NAT kind {kind!r} or port policy {ports!r}")
    if ports == "sequential" and kind != "symmetric":
        raise ValueError(f"sequential ports are for a symmetric NAT, not for {kind}")
    if kind not in ENDPOINT_INDEPENDENT and (hairpin or ports == "random"):
        raise ValueError(f"a {kind} NAT has no hairpin and no port policy random")
    before: list[str] = []
    after: list[str] = []
    learn: list[str] = []
    masquerade = (
        "masquerade" if kind in ("easy", "restricted", "fullcone", "udp-blocked") else "masquerade fully-random"
    )
    if kind in ENDPOINT_INDEPENDENT and (kind != "easy" or hairpin or ports == "random"):
        learn = [
            'oifname "wan0" meta l4proto udp ct direction original update @eim '
            "{ udp sport : ct original ip saddr . ct original proto-src }",
            'oifname "wan0" meta l4proto udp ct direction reply update @eim '
            "{ udp sport : ct reply ip saddr . ct reply proto-src }",
            'oifname "wan0" meta l4proto udp update @perm { udp sport . ip daddr }',
        ]
        if kind == "fullcone":
            before.append('iifname "wan0" meta l4proto udp dnat ip to udp dport map @eim')
        if kind == "restricted":
            before.append('iifname "wan0" udp dport . ip saddr @perm dnat ip to udp dport map @eim')
        if ports == "random":
            masquerade = "masquerade fully-random"
            after.append("meta l4proto udp snat ip to ip saddr . udp sport map @out")
            learn.append(
                'oifname "wan0" meta l4proto udp ct direction original update @out '
                "{ ct original ip saddr . ct original proto-src : ip saddr . udp sport }"
            )
        if hairpin:
            before.append(f'iifname "lan0" ip daddr {wan_ip} meta l4proto udp dnat ip to udp dport map @eim')
            after.append(f'iifname "lan0" oifname "lan0" ct status dnat snat to {wan_ip}')
    if ports == "sequential":  # a bare numgen comes out byte-swapped: hence the map
        table = ", ".join(f"{i} : {SEQUENTIAL_FIRST + i}" for i in range(SEQUENTIAL_COUNT))
        after.append(
            f'oifname "wan0" meta l4proto udp masquerade to :numgen inc mod {SEQUENTIAL_COUNT} map {{ {table} }}'
        )
    lifetime = f"flags dynamic,timeout; timeout {timeout_s}s; size 65535;"
    return f"""
add table ip nat
delete table ip nat
table ip nat {{
  map eim {{ type inet_service : ipv4_addr . inet_service; {lifetime} }}  # external port -> internal address
  map out {{ type ipv4_addr . inet_service : ipv4_addr . inet_service; {lifetime} }}  # the reverse
  set perm {{ type inet_service . ipv4_addr; {lifetime} }}  # who was sent to, from which external port
  chain pre {{ type nat hook prerouting priority dstnat; policy accept;
    {_lines(before)}
  }}
  chain post {{ type nat hook postrouting priority srcnat; policy accept;
    {_lines(after)}
    oifname "wan0" {masquerade}
  }}
  chain learn {{ type filter hook postrouting priority srcnat + 1; policy accept;
    {_lines(learn)}
  }}
}}
""" + _filter_table("ip", "icmp type echo-request", "tcp dport { 80, 443 }" if kind == "udp-blocked" else "")


def firewall_rules(firewall: Firewall) -> str:
    """The IPv6 part of a gateway (RFC 6092): nothing is translated, but not everything comes in."""
    if firewall not in get_args(Firewall):
        raise ValueError(f"unknown firewall {firewall!r}")
    opened = 'iifname "wan0" oifname "lan0" accept' if firewall == "open" else ""
    allowed = "tcp dport { 80, 443 }" if firewall == "udp-blocked" else ""
    return _filter_table("ip6", "meta l4proto ipv6-icmp", allowed, opened)


# A host's own: nothing comes in that it has not asked for, as on most clouds.
HOST_FIREWALL = """
table inet filter {
  chain input { type filter hook input priority filter; policy drop;
    iifname "lo" accept
    ct state established,related accept
    meta l4proto { icmp, ipv6-icmp } accept
  }
}
"""

# A host that does not hear the UDP of some sources.
DEAF = """
table inet deaf {
  set sources4 { type ipv4_addr; }
  set sources6 { type ipv6_addr; }
  chain input { type filter hook input priority -300; policy accept;
    meta l4proto udp ip saddr @sources4 counter drop
    meta l4proto udp ip6 saddr @sources6 counter drop
  }
}
"""

# All UDP to and through a machine vanishes.
NO_UDP = """
table inet no_udp {
  chain input { type filter hook input priority -300; policy accept; meta l4proto udp drop; }
  chain forward { type filter hook forward priority -300; policy accept; meta l4proto udp drop; }
}
"""


def _filter_table(family: str, ping: str, allowed: str, opened: str = "") -> str:
    translated = "ct status dnat accept" if family == "ip" else ""
    return f"""
add table {family} filter
delete table {family} filter
table {family} filter {{
  chain input {{ type filter hook input priority filter; policy drop;
    ct state established,related accept
    {ping} accept
  }}
  chain forward {{ type filter hook forward priority filter; policy drop;
    ct state established,related accept
    {translated}
    {opened}
    iifname "lan0" oifname "lan0" accept
    iifname "lan0" oifname "wan0" {allowed} accept
  }}
}}
"""


def _lines(rules: list[str]) -> str:
    return "\n    ".join(rules)
