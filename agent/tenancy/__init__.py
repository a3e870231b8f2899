"""Tenants: what each may see, its limits, its keys."""
