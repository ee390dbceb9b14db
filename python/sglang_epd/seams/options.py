"""Options for the processing of media, of models that SGLang's own EPD does not list.

Their processors follow some of them (GLM-4.1V: frames a second of a video; InternVL: tiles of
a picture), and an encoder prepares every item as its processor does by itself. A request that
asks for something else is refused, because it would be answered otherwise than by one server.
"""

from __future__ import annotations

from typing import Any

from sglang_epd.errors import MediaError
from sglang_epd.language.planner import plan
from sglang_epd.seams.identities import REQUEST_OPTIONS
from sglang_epd.wire import EncodeItem

# No processor looks at it.
_WITHOUT_EFFECT = {"detail"}


def plan_without_options(request: Any) -> list[EncodeItem]:
    """As `plan`, of a request that has no options for its media.

    Raises:
        MediaError: it has some, or an entry is unreadable.
    """
    items = plan(request)
    given = {name for name in REQUEST_OPTIONS if getattr(request, name, None)}
    for item in items:
        for name, value in item.options.items():
            given |= set(value) if isinstance(value, dict) else {name}
    given -= _WITHOUT_EFFECT
    if given:
        raise MediaError(
            "where its encoder is apart this model takes no options for its media: "
            + ", ".join(sorted(given))
        )
    return items
