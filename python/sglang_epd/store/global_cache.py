"""`--enable-mm-global-cache`: the variables of SGLang's Mooncake store, as a URL of ours.

SGLang reads the JSON file that `SGLANG_HICACHE_MOONCAKE_CONFIG_PATH` names, or else the
environment. This process's own host name counts before that of a file, which hosts share.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from sglang_epd.errors import ConfigError

_FLAG = "--enable-mm-global-cache"
_FILE = "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH"
# The variables that SGLang's store reads, by their keys in the file.
_VARIABLES = {
    "master_server_address": "MOONCAKE_MASTER",
    "protocol": "MOONCAKE_PROTOCOL",
    "device_name": "MOONCAKE_DEVICE",
    "metadata_server": "MOONCAKE_TE_META_DATA_SERVER",
    "global_segment_size": "MOONCAKE_GLOBAL_SEGMENT_SIZE",
    "tenant_id": "MOONCAKE_TENANT_ID",
    "local_hostname": "MOONCAKE_LOCAL_HOSTNAME",
}
_MASTER = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+):\d{1,5}", re.ASCII)
_SIZE = re.compile(r"(\d+) *(gb)?", re.ASCII)


def store_url(env: Mapping[str, str]) -> str:
    """The value of `SGLANG_EPD_STORE` that names the store of SGLang's variables.

    Args:
        env: the environment.

    Raises:
        ConfigError: they name no master, or have a value that such a URL cannot have.
    """
    path = env.get(_FILE, "")
    told = _file(path) if path else {key: env.get(name) for key, name in _VARIABLES.items()}
    own_host = env.get("MOONCAKE_LOCAL_HOSTNAME") or env.get("LOCAL_HOSTNAME")

    def value(key: str, default: str) -> str:
        return str(told.get(key) or default).strip()

    def refusal(key: str, why: str) -> ConfigError:
        return ConfigError(f"{_FLAG}: {f'{path}: {key}' if path else _VARIABLES[key]} {why}")

    master = value("master_server_address", "")
    if not _MASTER.fullmatch(master):
        # With a client of another process (MOONCAKE_CLIENT) alone SGLang's setup fails too.
        raise refusal("master_server_address", "has to be its master's host:port")
    size = _SIZE.fullmatch(value("global_segment_size", "4gb").lower())
    if size is None:
        raise refusal("global_segment_size", "has to be a number of bytes, or <number>gb")
    tenant = value("tenant_id", "")
    # SGLang's defaults: with ours a cluster without storage nodes would keep nothing.
    parameters = {
        "protocol": value("protocol", env.get("MOONCAKE_PROTOCOL") or "rdma"),
        "segment_mb": str(int(size[1]) << 10 if size[2] else -(-int(size[1]) >> 20)),
        "device": value("device_name", ""),
        "metadata": value("metadata_server", ""),
        "host": own_host or value("local_hostname", ""),
        "tenant": "" if tenant == "default" else tenant,
    }
    given = {name: text for name, text in parameters.items() if text}
    return f"mooncake://{master}?{urlencode(given)}"


def _file(path: str) -> dict[str, Any]:
    try:
        told = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{_FLAG}: {_FILE}={path} cannot be read: {error}") from None
    if not isinstance(told, dict):
        raise ConfigError(f"{_FLAG}: {_FILE}={path} is no JSON object")
    return told
