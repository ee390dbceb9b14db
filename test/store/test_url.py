from __future__ import annotations

from pathlib import Path

import pytest

from sglang_epd.errors import ConfigError
from sglang_epd.store import StoreUrl
from sglang_epd.store.url import FolderBounds, MooncakeOptions


def test_a_folder():
    url = StoreUrl.parse("file:///mnt/with%20space?ttl_s=60&max_item_mb=4&max_mb=100&queue_mb=8")
    assert (url.kind, url.folder) == ("file", Path("/mnt/with space"))
    assert url.bounds == FolderBounds(ttl_s=60, max_item_mb=4, queue_mb=8, max_mb=100)
    assert url.max_item_bytes == 4 << 20


def test_mooncake():
    url = StoreUrl.parse("mooncake://master:50051?protocol=rdma&device=mlx5_0&segment_mb=512")
    assert (url.kind, url.host, url.port) == ("mooncake", "master", 50051)
    assert url.bounds == MooncakeOptions(protocol="rdma", device="mlx5_0", segment_mb=512)


@pytest.mark.parametrize("scheme", ["mooncake", "redis"])
def test_a_password_is_never_shown(scheme: str):
    for typed in ("hunter2@cache:6380", "me:hunter2@cache:6380?ttl_s=60", "hunter2@cache:x"):
        with pytest.raises(ConfigError) as refused:
            StoreUrl.parse(f"{scheme}://{typed}")
        assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("", "begin with"),
        ("/mnt/store", "begin with"),
        ("s3://bucket", "begin with"),
        ("redis://cache", "begin with"),
        ("mooncake://[::1", "no URL"),
        ("mooncake://cache:99999", "no URL"),
        ("file://mnt/store", "absolute"),
        ("file:///", "absolute"),
        ("file:store", "absolute"),
        ("mooncake://master", "host:port"),
        ("mooncake://master:50051/path", "host:port"),
        ("mooncake://me@master:50051", "host:port"),
        ("file:///mnt?segment_mb=1", "segment_mb"),
        ("mooncake://master:1?max_mb=1", "max_mb"),
        ("file:///mnt?ttl_s=0", "ttl_s"),
        ("file:///mnt?ttl_s=-1", "ttl_s"),
        ("file:///mnt?ttl_s=1.5", "ttl_s"),
        ("file:///mnt?ttl_s=", "ttl_s"),
        ("file:///mnt?ttl_s=١", "ttl_s"),
        ("file:///mnt?ttl_s=1&ttl_s=2", "twice"),
        ("file:///mnt?ttl_s", "parameters"),
        ("file:///mnt?what=1", "what.*max_mb"),
        ("mooncake://master:1?segment_mb=-1", "segment_mb"),
        ("file:///mnt?namespace=..", "namespace"),
        ("file:///mnt?namespace=a/b", "namespace"),
        ("file:///mnt?namespace=", "namespace"),
        ("file:///mnt?max_mb=10", "max_mb"),
        ("file:///mnt?queue_mb=10", "queue_mb"),
        ("file:///mnt#part", "fragment"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(typed: str, said: str):
    with pytest.raises(ConfigError, match=said) as refused:
        StoreUrl.parse(typed)
    assert "SGLANG_EPD_STORE" in str(refused.value)
