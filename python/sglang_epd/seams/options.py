"""Options for the processing of media, of models that SGLang's own EPD does not list.

Their processors follow some of them (GLM-4.1V: frames a second of a video; InternVL: tiles of
a picture), and an encoder prepares every item as its processor does by itself. A request that
asks for something else is refused, because it would be answered otherwise than by one server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sglang_epd.errors import MediaError
from sglang_epd.language.planner import SALT, plan
from sglang_epd.seams.identities import REQUEST_OPTIONS
from sglang_epd.wire.http import EncodeItem

# No processor looks at them.
_WITHOUT_EFFECT = {"detail", SALT}
# What SGLang puts into the `video_config` of a chat itself, for the few that read it.
_SGLANGS_OWN = "_"


def plan_without_options(request: Any) -> list[EncodeItem]:
    """As `plan`, of a request that has no options for its media.

    Raises:
        MediaError: it has some, or an entry is unreadable.
    """
    items = plan(request)
    given = _given((name, getattr(request, name, None)) for name in REQUEST_OPTIONS)
    for item in items:
        given |= _given(item.options.items())
    if given:
        raise MediaError(
            "where its encoder is apart this model takes no options for its media: "
            + ", ".join(sorted(given))
        )
    return items


def _given(options: Iterable[tuple[str, Any]]) -> set[str]:
    """The names of those that ask for something; of a collection, those in it."""
    names = set()
    for name, value in options:
        if isinstance(value, Mapping):
            names |= _given(value.items())
        elif value and name not in _WITHOUT_EFFECT and not name.startswith(_SGLANGS_OWN):
            names.add(name)
    return names
