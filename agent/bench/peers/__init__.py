"""Other stores that are measured beside /kv, each by its own client in its own environment.

`*_client.py` and mooncake_provider.py run in an engine's interpreter (make engines), which has nothing of
ours: besides the engine they import the standard library, ../contents.py, ../rounds.py, ../clocked.py and
lines.py alone, which stand on the standard library. servers.py runs in our own.
"""
