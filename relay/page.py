"""The page for a person who opens the relay's address in a browser: what this is, and nothing about who uses it."""

from __future__ import annotations

from string import Template

CONTENT_TYPE = "text/html; charset=utf-8"
CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

_PAGE = Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Peer relay</title>
<style>
body { max-width: 34em; margin: 4em auto; padding: 0 1em; font: 1em/1.5 system-ui, sans-serif }
dt { float: left; width: 9em; color: #666 }
</style>
<h1>Peer relay</h1>
<p>This server passes sealed datagrams between nodes that cannot reach each other directly. It cannot read them,
and it keeps none.</p>
<dl>
<dt>Connected now</dt><dd>$clients</dd>
<dt>Running for</dt><dd>$uptime</dd>
<dt>Version</dt><dd>$version</dd>
</dl>
<p>A node uses it when it is told this address as its relay.
<a href="healthz">Health</a> · <a href="metrics">metrics</a></p>
</html>
""")


def render(clients: int, uptime: float, version: str) -> bytes:
    """The page. `uptime` in seconds."""
    hours, rest = divmod(int(uptime), 3600)
    days, hours = divmod(hours, 24)
    text = f"{days} d {hours} h" if days else f"{hours} h {rest // 60} min"
    return _PAGE.substitute(clients=clients, uptime=text, version=version).encode()
