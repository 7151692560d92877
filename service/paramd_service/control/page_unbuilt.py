"""What stands in the dashboard's place where it has not been built."""

from __future__ import annotations

UNBUILT = b"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>paramd</title>
<h1>paramd control plane</h1>
<p>It runs, but its dashboard has not been built: this is a source install without npm.
Releases from the package index have it inside. In the checkout, with Node 20.19 or newer:
<pre>make web</pre>
<p>Then restart the control plane. Until then <code>paramd top</code> shows much the same in a
terminal, and the API is at <code>/api/v1</code>, described by <code>/api/v1/openapi.json</code>.
</html>
"""
