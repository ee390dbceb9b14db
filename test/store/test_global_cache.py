"""The variables of SGLang's Mooncake store, as a store of ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_epd.errors import ConfigError
from sglang_epd.store import StoreUrl, store_url
from sglang_epd.store.url import MooncakeOptions
from store.fakes import Counts, Open, image, key_of, written
from stores import Server, mooncake_master

MASTER = {"MOONCAKE_MASTER": "master:50051"}
# What SGLang's variables are where they are not set.
UNSET = {"protocol": "rdma", "segment_mb": 4096}


@pytest.mark.parametrize(
    ("env", "options"),
    [
        ({}, {}),
        ({"MOONCAKE_PROTOCOL": "tcp"}, {"protocol": "tcp"}),
        ({"MOONCAKE_DEVICE": '{"0": "mlx5_0,mlx5_1"}'}, {"device": '{"0": "mlx5_0,mlx5_1"}'}),
        (
            {"MOONCAKE_TE_META_DATA_SERVER": "http://10.0.0.1:8080/metadata?a=b&c"},
            {"metadata": "http://10.0.0.1:8080/metadata?a=b&c"},
        ),
        ({"MOONCAKE_GLOBAL_SEGMENT_SIZE": "16GB"}, {"segment_mb": 16 << 10}),
        ({"MOONCAKE_GLOBAL_SEGMENT_SIZE": str(3 << 20)}, {"segment_mb": 3}),
        ({"MOONCAKE_GLOBAL_SEGMENT_SIZE": str((3 << 20) + 1)}, {"segment_mb": 4}),
        ({"MOONCAKE_GLOBAL_SEGMENT_SIZE": "0"}, {"segment_mb": 0}),
        ({"LOCAL_HOSTNAME": "b", "MOONCAKE_LOCAL_HOSTNAME": "a"}, {"host": "a"}),
        ({"LOCAL_HOSTNAME": "b"}, {"host": "b"}),
        ({"MOONCAKE_TENANT_ID": "default"}, {}),
        ({"MOONCAKE_TENANT_ID": "team a"}, {"tenant": "team a"}),
        # SGLang's store does not read these, and nor does ours.
        ({"MOONCAKE_CLIENT": "c:1", "MOONCAKE_CHECK_SERVER": "1"}, {}),
    ],
    ids=str,
)
def test_each_variable_is_a_parameter(env: dict[str, str], options: dict[str, Any]) -> None:
    url = StoreUrl.parse(store_url({**MASTER, **env}))
    assert (url.kind, url.host, url.port) == ("mooncake", "master", 50051)
    assert url.bounds == MooncakeOptions(**{**UNSET, **options})


def test_a_file_counts_before_the_environment_but_for_protocol_and_host(tmp_path: Path) -> None:
    file = tmp_path / "mooncake.json"
    env = {
        **MASTER,
        "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH": str(file),
        "MOONCAKE_PROTOCOL": "efa",
        "MOONCAKE_DEVICE": "mlx5_9",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": "9gb",
    }
    told = {
        "master_server_address": "[fd00::1]:50052",
        "metadata_server": "etcd://a:1",
        "global_segment_size": 1 << 30,
        "local_hostname": "of the file",
        "tenant_id": None,
    }
    file.write_text(json.dumps(told))
    url = StoreUrl.parse(store_url(env))
    assert (url.host, url.port) == ("fd00::1", 50052)
    assert url.bounds == MooncakeOptions(
        protocol="efa", metadata="etcd://a:1", segment_mb=1024, host="of the file"
    )
    file.write_text(json.dumps({**told, "protocol": "tcp", "device_name": "mlx5_0"}))
    bounds = StoreUrl.parse(store_url({**env, "LOCAL_HOSTNAME": "own"})).bounds
    assert isinstance(bounds, MooncakeOptions)
    assert (bounds.protocol, bounds.device, bounds.host) == ("tcp", "mlx5_0", "own")


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({}, "MOONCAKE_MASTER"),
        ({"MOONCAKE_CLIENT": "127.0.0.1:50052"}, "MOONCAKE_MASTER"),
        ({"MOONCAKE_MASTER": "etcd://a:1;b:2"}, "MOONCAKE_MASTER"),
        ({"MOONCAKE_MASTER": "master"}, "MOONCAKE_MASTER"),
        ({**MASTER, "MOONCAKE_GLOBAL_SEGMENT_SIZE": "4g"}, "MOONCAKE_GLOBAL_SEGMENT_SIZE"),
        ({**MASTER, "MOONCAKE_GLOBAL_SEGMENT_SIZE": "1.5gb"}, "MOONCAKE_GLOBAL_SEGMENT_SIZE"),
    ],
)
def test_a_variable_without_a_place_is_refused_by_name(env: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^--enable-mm-global-cache: {named} has to be"):
        store_url(env)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("{", "cannot be read"),
        ("[]", "no JSON object"),
        ('{"client_server_address": "a:1"}', "master_server_address has to be"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_name(
    tmp_path: Path, text: str | None, said: str
) -> None:
    file = tmp_path / "mooncake.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=f"^--enable-mm-global-cache: .*{file}.*{said}"):
        store_url({**MASTER, "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH": str(file)})


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Server]:
    """Of two tenants. It is there until their stores have ended, which else take seconds each."""
    quotas = tmp_path / "quotas.yaml"
    quotas.write_text("{version: 1, tenants: [{name: a, quota: 64MB}, {name: b, quota: 64MB}]}")
    flags = "--enable_multi_tenants=true", f"--tenant_quota_connector_uri={quotas}"
    with mooncake_master(tmp_path, *flags) as master:
        yield master


async def test_encoders_of_a_tenant_share_a_real_store(
    master: Server, open_at: Open, counts: Counts
) -> None:
    env = {
        "MOONCAKE_MASTER": f"127.0.0.1:{master.port}",
        "MOONCAKE_PROTOCOL": "tcp",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": str(64 << 20),
        "MOONCAKE_TENANT_ID": "a",
    }
    layout, embedding = image()
    first, second = await open_at(store_url(env)), await open_at(store_url(env))
    first.keep(key_of(1), layout, embedding)
    await written(counts)
    assert await second.find(key_of(1), "IMAGE") is not None
    stranger = await open_at(store_url({**env, "MOONCAKE_TENANT_ID": "b"}))
    assert await stranger.find(key_of(1), "IMAGE") is None
    assert counts.reads == {"hit": 1, "miss": 1}
