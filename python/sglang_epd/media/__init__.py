"""An item before an encoder sees it: source, digest, limits, safe fetching, decoding.

It reads no configuration besides that of `MediaLimits`, and never hands media, credentials or
query strings to a message: `display` is the only way a source is shown.
"""

from sglang_epd.media.address import AddressPolicy
from sglang_epd.media.container import (
    VideoFacts,
    check_audio,
    check_container,
    check_frames_read,
    check_video,
)
from sglang_epd.media.fetch import MediaFetcher
from sglang_epd.media.fetcher import FetchedMedia, Fetcher, parse, reading_until
from sglang_epd.media.fetching import FetchingProcess
from sglang_epd.media.freshness import Step, Trail
from sglang_epd.media.intake import Age, Arrival, FetchBounds, Intake
from sglang_epd.media.limits import MediaLimits
from sglang_epd.media.size import image_size
from sglang_epd.media.slots import Account
from sglang_epd.media.source import (
    EscapeBudget,
    MediaSource,
    check_content_hash,
    digest,
    display,
    parse_content_hash,
    parse_source,
)

__all__ = [
    "Account",
    "AddressPolicy",
    "Age",
    "Arrival",
    "EscapeBudget",
    "FetchBounds",
    "FetchedMedia",
    "Fetcher",
    "FetchingProcess",
    "Intake",
    "MediaFetcher",
    "MediaLimits",
    "MediaSource",
    "Step",
    "Trail",
    "VideoFacts",
    "check_audio",
    "check_container",
    "check_content_hash",
    "check_frames_read",
    "check_video",
    "digest",
    "display",
    "image_size",
    "parse",
    "parse_content_hash",
    "parse_source",
    "reading_until",
]
