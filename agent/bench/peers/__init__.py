"""Other stores that are measured beside /kv, each by its own client in its own environment.

`*_client.py` and mooncake_provider.py run in an engine's interpreter (make engines) without ours: they
import the engine, the standard library, ../contents.py, ../rounds.py and lines.py.
"""
