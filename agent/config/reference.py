"""docs/reference/configuration.md, made of the descriptions in the configuration's own classes."""

from __future__ import annotations

from agent.config.configuration import SECTIONS


def reference_markdown() -> str:
    """The page: a table for each section."""
    lines = [
        "# Configuration",
        "",
        "One TOML file, given to `g35 agent --config FILE`. Sizes take K, M, G or T (powers of 1,024).",
        "Unknown keys are refused. This page is made by `g35 config reference`.",
    ]
    for name, section in SECTIONS.items():
        repeated = name in ("enclosures", "discovery", "volumes", "policies", "virtiofs", "s3.tenants")
        lines += ["", f"## `{'[[' if repeated else '['}{name}{']]' if repeated else ']'}`", ""]
        lines += [
            (section.__doc__ or "").strip(),
            "",
            "| key | default | what it is |",
            "| --- | --- | --- |",
        ]
        for key, info in section.model_fields.items():
            default = "required" if info.is_required() else f"`{_shown(info.default)}`"
            lines.append(f"| `{key}` | {default} | {info.description} |")
    return "\n".join(lines) + "\n"


def _shown(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value >= 1 << 10 and value % (1 << 10) == 0:
        for power, unit in ((3, "G"), (2, "M"), (1, "K")):
            if value % 1024**power == 0:
                return f'"{value // 1024**power}{unit}"'
    return f'"{value}"' if isinstance(value, str) else str(value)
