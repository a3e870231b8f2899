"""Names of volumes and tenants: one rule for all new ones, so that they look and are typed the same
everywhere. Tenants that pools have already may have names in any script.
"""

import re
import unicodedata
from typing import Annotated, Final

from pydantic import AfterValidator

NAME_MAX: Final = 64
_OBEYED: Final = frozenset({"Cc", "Cf", "Zl", "Zp"})
_NAME: Final = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{NAME_MAX - 1}}}")


def checked_name(name: str) -> str:
    """The name, if it may be one of a new volume or tenant. Raises ValueError that says why not."""
    if _NAME.fullmatch(name):
        return name
    odd = re.search(r"[^A-Za-z0-9._-]", name)
    if len(name) > NAME_MAX:
        why = f"has {len(name)} characters, and {NAME_MAX} are the most"
    elif odd:
        why = f"has {odd[0]!r} in it"
    else:
        why = "does not begin with a letter or a digit" if name else "is empty"
    raise ValueError(
        f"the name {name!r} {why}: names are typed and are parts of paths, so they have letters "
        "(a to z, A to Z), digits, '.', '_' and '-'"
    )


def _printable(name: str) -> str:
    if 0 < len(name) <= NAME_MAX and not any(unicodedata.category(each) in _OBEYED for each in name):
        return name
    raise ValueError(f"a tenant's name has 1 to {NAME_MAX} characters, and no control characters")


TenantName = Annotated[str, AfterValidator(_printable)]
"""Of one that a pool may have already: nothing in it that a terminal would obey."""
VolumeName = Annotated[str, AfterValidator(checked_name)]
