"""How many servers of which kind.

The notation is the field's: 4EPD are four colocated servers, 1E3PD is one encoder with three
servers that prefill and decode, 2E1P1D and 1EP1D have prefill and decode apart.
"""

from __future__ import annotations

import re

from sglang_epd.dispatch.policies import policy
from sglang_epd.errors import ConfigError
from sglang_epd.profile import Profile
from sglang_epd.schema import Count, Data, Positive, convert

# Servers without encoders of their own encode, too.
_NOTATION = re.compile(
    r"(?:(?P<encoders>[1-9]\d*)E)?(?P<prefills>[1-9]\d*)(?(encoders)|E)P(?P<decodes>[1-9]\d*)?D"
)


class Topology(Data, frozen=True):
    """Servers of one deployment.

    Attributes:
        encoders: 0 where the servers that prefill encode, too.
        prefills: servers that prefill, and decode where no server only decodes.
        decodes: servers that only decode.
        policy: of dispatch (`SGLANG_EPD_DISPATCH_POLICY`).
        cells: independent deployments of all of that, which share the requests.
    """

    prefills: Positive
    encoders: Count = 0
    decodes: Count = 0
    policy: str = "affinity"
    cells: Positive = 1

    def __post_init__(self) -> None:
        policy(self.policy)

    @property
    def name(self) -> str:
        begin = f"{self.encoders}E{self.prefills}P" if self.encoders else f"{self.prefills}EP"
        one = f"{begin}{self.decodes or ''}D"
        return f"{self.cells} x {one}" if self.cells > 1 else one

    def gpus(self, profile: Profile) -> float:
        """Accelerators of all servers."""
        servers = self.prefills + self.decodes
        return self.cells * (self.encoders * profile.encoder.gpus + servers * profile.language.gpus)

    def hour_cost(self, profile: Profile) -> float:
        """The cost of an hour of all servers, in the profile's currency."""
        return self.gpus(profile) * profile.gpu_hour_cost


def parse(text: str, *, policy: str = "affinity", cells: int = 1) -> Topology:
    """A topology from its notation.

    Raises:
        ConfigError: the text is no topology, or the policy or number of cells cannot be used.
    """
    found = _NOTATION.fullmatch(text.strip().upper())
    if found is None:
        raise ConfigError(f"{text!r} is no topology: write 4EPD, 1E3PD, 2E1P1D or 1EP1D")
    counts = {name: int(count) for name, count in found.groupdict().items() if count}
    return convert({**counts, "policy": policy, "cells": cells}, Topology, text)
