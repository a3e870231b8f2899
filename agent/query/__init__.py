"""The query door: HTTP for routers that ask how much of a prompt this pool can serve (docs/query.md)."""
