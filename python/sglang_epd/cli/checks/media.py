"""A URL of users' media, fetched as an encoder with this shell's settings would."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping

from sglang_epd.cli.checks import Finding, fail, ok
from sglang_epd.errors import ConfigError, EpdError, MediaForbiddenError
from sglang_epd.media.fetch import MediaFetcher
from sglang_epd.media.limits import MediaLimits
from sglang_epd.media.source import MediaSource


def media(url: str, env: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Whether an item at this URL can be had.

    Args:
        env: with the settings of media.
    """
    try:
        limits = MediaLimits.from_env(env)
        nbytes = asyncio.run(_fetch(url, limits))
    except ConfigError:
        return  # listed with the settings
    except MediaForbiddenError as error:
        mend = (
            "on encoders, set SGLANG_EPD_MEDIA_ALLOWED_NETWORKS to its network, 10.0.0.0/8 say"
            " (or ..._DOMAINS, ..._LOCAL_ROOT)"
        )
        yield fail("media", error.message, mend)
    except EpdError as error:
        yield fail("media", error.message, "look at it from the encoders' hosts with curl")
    else:
        yield ok("media", f"{nbytes} bytes can be fetched from here")


async def _fetch(url: str, limits: MediaLimits) -> int:
    async with MediaFetcher(limits) as fetcher:
        return len((await fetcher.ask(MediaSource(url=url))).data)
